"""A disk store that opens its file when it is first needed, so that the checkpoint to go back to can be named before.

Opening a table undoes what came after its last committed checkpoint. A model is built before its checkpoint is read, so
the file must not be opened while it is built.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engram.stores.base import TableSpec
from engram.stores.disk import DiskStore
from engram.strict import ConfigError


class DeferredDiskStore:
    """The rows of `path`, opened at the first use or by `open`; see DiskStore."""

    kind = "disk"
    device = torch.device("cpu")

    def __init__(self, path: str | Path, spec: TableSpec, identity: str, **options: Any) -> None:
        self.path, self.spec, self.identity, self.options = Path(path), spec, identity, options
        self._opened: DiskStore | None = None

    def exists(self) -> bool:
        """Whether there is a file already."""
        return os.path.exists(self.path)

    def open(self, generation: int | None = None) -> DiskStore:
        """Open (or make) the file as it was at checkpoint `generation`, or at its last committed one.

        Raises ConfigError when it is another table, cannot be written, or is open already at another checkpoint.
        """
        if self._opened is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._opened = DiskStore(self.path, self.spec, self.identity, generation=generation, **self.options)
        elif generation is not None and generation != self._opened.generation:
            raise ConfigError(
                f"path: {self.path} is open already; checkpoint {generation} must be named before its use"
            )
        return self._opened

    def gather(self, ids_n: Tensor, out: Tensor | None = None) -> Tensor:
        """Row numbers [n] -> values [n, W]."""
        return self.open().gather(ids_n, out)

    def update(self, ids_U: Tensor, values_UW: Tensor) -> None:
        """Write the values of distinct rows."""
        self.open().update(ids_U, values_UW)

    def read_range(self, start: int, stop: int) -> Tensor:
        """See DiskStore."""
        return self.open().read_range(start, stop)

    def write_range(self, start: int, bytes_nb: Tensor) -> None:
        """See DiskStore."""
        self.open().write_range(start, bytes_nb)

    def bytes_held(self) -> dict[str, int]:
        """Bytes by place; nothing before the file is open."""
        return {"disk": 0} if self._opened is None else self._opened.bytes_held()

    def flush(self) -> None:
        """Everything that was updated has reached the disk."""
        if self._opened is not None:
            self._opened.flush()

    def prepare_checkpoint(self) -> int:
        """See DiskStore."""
        return self.open().prepare_checkpoint()

    def commit_checkpoint(self, generation: int) -> None:
        """See DiskStore."""
        self.open().commit_checkpoint(generation)

    def close(self) -> None:
        """Let go of the file; a later use would open it again."""
        if self._opened is not None:
            self._opened.close()
        self._opened = None

    def __deepcopy__(self, memo: dict[int, Any]) -> DeferredDiskStore:
        raise ConfigError(f"placement: rows in {self.path} cannot be copied with their model; use placement 'host'")
