"""Put memory into somebody else's model and take it out again.

    handle = engram.attach(model, cfg, tokenizer=None)     # model(...) keeps working, now with memory
    with handle.taps() as taps: model(ids)                 # taps[layer]["gate"], ["rows"], ["value"], ...
    handle.detach()

A hook at the decoder's entry hashes the ids once for all layers; a hook before each memory block adds that layer's
update to the hidden state, before the block's attention. The memory is the submodule `model.engram`, so `.to()`,
`parameters()` and `state_dict()` see it.

Packed documents: transformers isolates them in attention only when position ids restart, no attention mask is given and
no cache is used. The same restarts (or a `segment_ids` argument, which is taken out here) cut hash and convolution.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from engram.compress import TokenMap
from engram.config import ConfigError, EngramConfig
from engram.hosts import Host, find
from engram.memory import Memory
from engram.window import positions_from_segments, segments_from_positions

CACHE_NAMES = ("cache", "past_key_values")  # transformers renamed the argument during 5.x


def attach(model: nn.Module, cfg: EngramConfig, tokenizer: Any = None, token_map: TokenMap | None = None) -> Handle:
    """Add a memory to a transformers decoder model, in place, and return its handle.

    cfg.compress needs `tokenizer` (or a finished `token_map`); without it raw ids are hashed.
    Raises ConfigError, with the model left as it was, when the architecture is unknown, a block does not exist, widths
    or
    residual streams differ, a map is missing, or a memory is attached already.
    """
    host = find(model)
    if isinstance(getattr(model, "engram", None), Memory):
        raise ConfigError("attach: this model has a memory already; handle.detach() removes it")
    _check(cfg, host)
    vocab_size = int(host.config.vocab_size)
    if cfg.compress and token_map is None:
        if tokenizer is None:
            raise ConfigError("compress: true needs the model's tokenizer: attach(model, cfg, tokenizer=...)")
        token_map = TokenMap.from_tokenizer(tokenizer, vocab_size)
    if not cfg.compress:
        token_map = None
    first = next(host.decoder.parameters())
    with torch.device(first.device):
        memory = Memory(cfg, None if token_map is not None else vocab_size, token_map)
    memory.to(first.device)
    for layer in memory.layers.values():
        layer.to(first.dtype)
    memory.train(model.training)
    model.engram = memory
    return Handle(model, memory, host)


def _check(cfg: EngramConfig, host: Host) -> None:
    blocks, hidden = len(host.blocks), int(host.config.hidden_size)
    for layer in cfg.layers:
        if layer >= blocks:
            raise ConfigError(
                f"layers: block {layer} does not exist; {host.entry.name} here has blocks 0..{blocks - 1}"
            )
    if cfg.hidden_size != hidden:
        raise ConfigError(f"hidden_size: {cfg.hidden_size} differs from the model's {hidden}")
    if cfg.branches != host.entry.streams:
        raise ConfigError(
            f"branches: {cfg.branches}, but {host.entry.name} has {host.entry.streams} residual stream(s)"
        )
    if cfg.site == "value":
        raise ConfigError("site: 'value' is not available in this version; use 'residual' or 'embedding'")


class Handle:
    """A memory inside a host model: taps, statistics, switching off, taking out."""

    def __init__(self, model: nn.Module, memory: Memory, host: Host) -> None:
        self.model, self.memory, self.host = model, memory, host
        self._off = False
        self._hooks = [
            host.decoder.register_forward_pre_hook(self._enter, with_kwargs=True),
            host.decoder.register_forward_hook(self._leave),
        ]
        if memory.cfg.site == "embedding":
            self._hooks.append(host.embedding.register_forward_hook(self._at_embedding))
        else:
            for layer in memory.cfg.layers:
                hook = _BeforeBlock(self, layer)
                self._hooks.append(host.blocks[layer].register_forward_pre_hook(hook, with_kwargs=True))

    def detach(self) -> nn.Module:
        """Take the memory out; the model is what it was before. Calling it twice is harmless."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if getattr(self.model, "engram", None) is self.memory:
            del self.model.engram
        return self.model

    def taps(self) -> Taps:
        """Detached stages by layer and name: rows and gate of the last forward at once, every stage inside `with`."""
        return Taps(self.memory)

    def stats(self) -> dict[int, dict[str, Any]]:
        """Counters by layer, see `Memory.stats`."""
        return self.memory.stats()

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside, the model computes as if no memory were attached."""
        before, self._off = self._off, True
        try:
            yield
        finally:
            self._off = before

    def _enter(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """At the decoder's entry: find the ids, refuse what cannot be hashed rightly, hash once for all layers."""
        segment_ids = kwargs.pop("segment_ids", None)
        if self._off and segment_ids is None:
            return args, kwargs
        ids_BT = args[0] if args else kwargs.get("input_ids")
        if ids_BT is None:
            raise ValueError(
                "memory: this forward got inputs_embeds only; rows are addressed by token ids, so pass input_ids"
            )
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 and isinstance(args[1], Tensor) else None)
        self._refuse_decoding(ids_BT, kwargs, mask)
        if segment_ids is None and mask is None and kwargs.get("position_ids") is not None:
            segment_ids = segments_from_positions(kwargs["position_ids"])
            if segment_ids is not None:
                segment_ids = segment_ids.expand_as(ids_BT)
        elif segment_ids is not None and kwargs.get("position_ids") is None:
            kwargs["position_ids"] = positions_from_segments(segment_ids)
        if segment_ids is not None:
            self._refuse_leaks(kwargs, mask)
        if not self._off:
            self.memory.start(ids_BT, segment_ids=segment_ids, mask=mask)
        return args, kwargs

    def _refuse_decoding(self, ids_BT: Tensor, kwargs: dict[str, Any], mask: Tensor | None) -> None:
        cache = next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
        seen = 0 if cache is None else int(cache.get_seq_length())
        if seen > 0:
            raise RuntimeError(
                f"memory: this forward continues a cache of {seen} tokens; decoding with a cache is not available in "
                f"this version, and hashing the newest tokens alone would read wrong rows. Pass the whole sequence "
                f"with use_cache=False"
            )
        if mask is not None and (mask.ndim != 2 or mask.shape != ids_BT.shape):
            raise ValueError(
                f"attention_mask: shape {list(mask.shape)}; the memory needs the mask of the ids {list(ids_BT.shape)}"
            )

    def _refuse_leaks(self, kwargs: dict[str, Any], mask: Tensor | None) -> None:
        """Attention would see across packed documents although hash and convolution do not."""
        if mask is not None:
            raise ValueError("segment_ids: packed documents are isolated in attention only without an attention_mask")
        use_cache = kwargs.get("use_cache")
        use_cache = getattr(self.host.config, "use_cache", False) if use_cache is None else use_cache
        if use_cache or any(kwargs.get(name) is not None for name in CACHE_NAMES):
            raise ValueError(
                "position_ids restart (packed documents) while a cache is used: transformers then lets attention leak "
                "between the documents. Pass use_cache=False"
            )

    def _leave(self, decoder: nn.Module, args: Any, output: Any) -> None:
        if not self._off:
            self.memory.finish()

    def _at_embedding(self, embedding: nn.Module, args: Any, x_BTD: Tensor) -> Tensor:
        if self._off:
            return x_BTD
        cfg = self.memory.cfg
        x_BTD = x_BTD + self.memory(cfg.layers[0], x_BTD)
        return x_BTD / (1 + cfg.columns) if cfg.mix == "mean" else x_BTD


class _BeforeBlock:
    """Pre-hook of one block: add the layer's update to the hidden state."""

    def __init__(self, handle: Handle, layer: int) -> None:
        self.handle, self.layer = handle, layer

    def __call__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.handle._off:
            return args, kwargs
        if args:
            return (args[0] + self.handle.memory(self.layer, args[0]), *args[1:]), kwargs
        x = kwargs["hidden_states"]
        return args, {**kwargs, "hidden_states": x + self.handle.memory(self.layer, x)}


class Taps(dict[int, dict[str, Tensor]]):
    """Layer -> name -> detached tensor. As a context manager it records every stage of the forwards inside it."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory
        self._read()

    def _read(self) -> None:
        for layer in self._memory.cfg.layers:
            self[layer] = self._memory.layer(layer).taps

    def __getitem__(self, layer: int) -> dict[str, Tensor]:
        """The stages of `layer` in the latest forward."""
        return self._memory.layer(layer).taps

    def __enter__(self) -> Taps:
        self._set(True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._read()
        self._set(False)

    def _set(self, tapping: bool) -> None:
        for layer in self._memory.cfg.layers:
            self._memory.layer(layer).tapping = tapping
