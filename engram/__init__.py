"""engram: hashed n-gram memory for language models.

`import engram` stays light: the names below are looked up in their files when first used, so that `engram --help`
and the tools that only read configs never import torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_NAMES = {
    "EngramConfig": "engram.config:EngramConfig",
    "HashConfig": "engram.config:HashConfig",
    "NgramHash": "engram.hashing:NgramHash",
    "TokenMap": "engram.compress:TokenMap",
    "Engram": "engram.layer:Engram",
    "Memory": "engram.memory:Memory",
    "attach": "engram.attaching:attach",
    "Handle": "engram.handles:Handle",
    "load": "engram.checkpoint:load",
    "from_pretrained": "engram.checkpoint:from_pretrained",
    "families": "engram.families",
    "optim": "engram.optim",
    "released_config": "engram.released:released_config",
    "released_rows": "engram.released:released_rows",
    "load_released": "engram.releasing:load_released",
    "export_released": "engram.releasing:export_released",
}
"""Public name -> "module" or "module:attribute". The values are strings so that nothing is imported here."""

__all__ = ["__version__", *sorted(_NAMES)]


def __getattr__(name: str) -> Any:
    """The object behind a public name, imported at first use. Raises AttributeError for any other name."""
    if name not in _NAMES:
        raise AttributeError(f"module 'engram' has no attribute {name!r}; it offers {', '.join(sorted(_NAMES))}")
    module, _, attribute = _NAMES[name].partition(":")
    value: Any = importlib.import_module(module)
    if attribute:
        value = getattr(value, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])
