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

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from engram.compress import TokenMap
from engram.config import ConfigError, EngramConfig
from engram.editing import EditsRows
from engram.hosts import Host, find
from engram.memory import Memory
from engram.saving import PlainSaver, SavesMemory
from engram.table import RowProxy
from engram.window import positions_from_segments, segments_from_positions

log = logging.getLogger("engram")
CACHE_NAMES = ("cache", "past_key_values")  # transformers renamed the argument during 5.x


def attach(
    model: nn.Module,
    cfg: EngramConfig,
    tokenizer: Any = None,
    token_map: TokenMap | None = None,
    *,
    rows_of: Handle | Memory | None = None,
) -> Handle:
    """Add a memory to a transformers decoder model, in place, and return its handle.

    cfg.compress needs `tokenizer` (or a finished `token_map`); without it raw ids are hashed.
    rows_of  another model's handle or memory, whose rows this one uses instead of its own; see `Memory`.
    Raises ConfigError, with the model left as it was, when the architecture is unknown, a block does not exist, widths
    or residual streams differ, a map is missing, a memory is attached already, or `rows_of` has other rows.
    """
    host = find(model)
    if isinstance(getattr(model, "engram", None), Memory):
        raise ConfigError("attach: this model has a memory already; handle.detach() removes it")
    if hasattr(model, "engram"):
        raise ConfigError("attach: the model has an attribute `engram` of its own, which the memory would overwrite")
    _check(cfg, host)
    vocab_size = int(host.config.vocab_size)
    token_map = _token_map(cfg, tokenizer, token_map, vocab_size)
    if token_map is None and cfg.vocab_size is not None:
        if cfg.vocab_size < vocab_size:
            raise ConfigError(f"vocab_size: {cfg.vocab_size} is less than the {vocab_size} ids of the model")
        vocab_size = cfg.vocab_size
    first = next(host.decoder.parameters())
    with torch.device(first.device):
        shared = rows_of.memory if isinstance(rows_of, Handle) else rows_of
        memory = Memory(cfg, None if token_map is not None else vocab_size, token_map, rows_of=shared)
    memory.to(first.device)
    for layer in memory.layers.values():
        layer.to(first.dtype)
    memory.train(model.training)
    model.engram = memory
    _keep_from_ddp(model, memory)
    return Handle(model, memory, host)


def _keep_from_ddp(model: nn.Module, memory: Memory) -> None:
    """Row proxies, rows and hash constants are not for DistributedDataParallel: no dense gradient to reduce."""
    names = [f"engram.{name}" for name, p in memory.named_parameters() if isinstance(p, RowProxy)]
    names += [f"engram.{name}" for name, _ in memory.named_buffers()]
    ignored: Any = getattr(model, "_ddp_params_and_buffers_to_ignore", [])
    model.__dict__["_ddp_params_and_buffers_to_ignore"] = [*ignored, *names]


def _give_back_to_ddp(model: nn.Module) -> None:
    """The other way round: names of the memory are taken off the list, and the list with the last of them."""
    ignored = [name for name in model.__dict__.pop("_ddp_params_and_buffers_to_ignore", []) if name[:7] != "engram."]
    if ignored:
        model.__dict__["_ddp_params_and_buffers_to_ignore"] = ignored


def _token_map(cfg: EngramConfig, tokenizer: Any, token_map: TokenMap | None, vocab_size: int) -> TokenMap | None:
    """The map to use: none without `compress`, else the given one or the tokenizer's, which must agree."""
    if not cfg.compress:
        if token_map is not None:
            raise ConfigError("token_map: given, but compress is false and raw ids would be hashed; set compress: true")
        if tokenizer is not None:
            log.warning("attach: compress is false, so raw ids are hashed and the tokenizer is not used")
        return None
    if token_map is None and tokenizer is None:
        raise ConfigError("compress: true needs the model's tokenizer: attach(model, cfg, tokenizer=...)")
    built = None if tokenizer is None else TokenMap.from_tokenizer(tokenizer, vocab_size)
    if built is not None and token_map is not None and built.sha256 != token_map.sha256:
        raise ConfigError(f"token_map: {token_map} is not the map of this tokenizer, {built}; pass one of them")
    found = token_map if built is None else built
    if found is not None and len(found) != vocab_size:
        raise ConfigError(
            f"token_map: it covers {len(found)} ids, the model has {vocab_size}; "
            f"build it with TokenMap.from_tokenizer(tokenizer, vocab_size={vocab_size})"
        )
    return found


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


class Handle(SavesMemory, EditsRows):
    """A memory inside a host model: taps, statistics, switching off, taking out."""

    def __init__(self, model: nn.Module, memory: Memory, host: Host) -> None:
        self.model, self.memory, self.host = model, memory, host
        self._off = self._inside = False
        self._saver = PlainSaver(model, memory)
        self._names = [name for name in inspect.signature(host.decoder.forward).parameters if name != "kwargs"]
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
        self._saver.remove()
        self.memory.drop_fetches()
        if getattr(self.model, "engram", None) is self.memory:
            del self.model.engram
            _give_back_to_ddp(self.model)
        return self.model

    def prefetch(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> None:
        """Start fetching the rows of a later forward with these arguments, while the model computes something else.

        Worth it where rows do not live on the device; for tables that do, nothing happens.
        """
        if segment_ids is None:
            segment_ids = _documents(input_ids, position_ids, attention_mask)
        self.memory.prefetch(input_ids, segment_ids=segment_ids, mask=attention_mask)

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
        kwargs = {**dict(zip(self._names, args, strict=False)), **kwargs}
        if self._off and segment_ids is None:
            self.memory.bypass()
            return (), kwargs
        ids_BT, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
        if ids_BT is None:
            raise ValueError(
                "memory: this forward got inputs_embeds only; rows are addressed by token ids, so pass input_ids"
            )
        self._refuse_decoding(ids_BT, kwargs, mask)
        if segment_ids is not None and kwargs.get("position_ids") is None:
            kwargs["position_ids"] = positions_from_segments(segment_ids)
        elif segment_ids is None:
            segment_ids = _documents(ids_BT, kwargs.get("position_ids"), mask)
        if segment_ids is not None:
            self._refuse_leaks(kwargs, mask)
        self._inside = True
        if self._off:
            self.memory.bypass()
        else:
            self.memory.start(ids_BT, segment_ids=segment_ids, mask=mask)
        return (), kwargs

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
            raise ValueError(
                "attention_mask: packed documents (position_ids that restart, or segment_ids) are isolated in "
                "attention only without an attention_mask; leave it out"
            )
        use_cache = kwargs.get("use_cache")
        use_cache = getattr(self.host.config, "use_cache", False) if use_cache is None else use_cache
        if use_cache or any(kwargs.get(name) is not None for name in CACHE_NAMES):
            raise ValueError(
                "position_ids restart (packed documents) while a cache is used: transformers then lets attention leak "
                "between the documents. Pass use_cache=False"
            )

    def _leave(self, decoder: nn.Module, args: Any, output: Any) -> None:
        self._inside = False
        self.memory.finish()

    def _at_embedding(self, embedding: nn.Module, args: Any, x_BTD: Tensor) -> Tensor:
        if self._off or not self._inside:  # somebody else may look words up, too
            return x_BTD
        cfg = self.memory.cfg
        x_BTD = x_BTD + self.memory(cfg.layers[0], x_BTD)
        return x_BTD / (1 + cfg.columns) if cfg.mix == "mean" else x_BTD


def _documents(ids_BT: Tensor, position_ids: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """Packed documents of a forward, from positions that restart."""
    segment_BT = None if position_ids is None else segments_from_positions(position_ids, mask)
    return None if segment_BT is None else segment_BT.expand_as(ids_BT)


class _BeforeBlock:
    """Pre-hook of one block: add the layer's update to the hidden state."""

    def __init__(self, handle: Handle, layer: int) -> None:
        self.handle, self.layer = handle, layer

    def __call__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        memory = self.handle.memory
        if args:
            return (args[0] + memory(self.layer, args[0]), *args[1:]), kwargs
        x = kwargs["hidden_states"]
        return args, {**kwargs, "hidden_states": x + memory(self.layer, x)}


class Taps(Mapping[int, dict[str, Tensor]]):
    """Layer -> name -> detached tensor. Inside `with` it shows every stage of the latest forward, and keeps it after.

    Without `with` it keeps what the last forward left: rows and gate.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._kept: dict[int, dict[str, Tensor]] | None = self._now()

    def _now(self) -> dict[int, dict[str, Tensor]]:
        return {layer: dict(self._memory.layer(layer).taps) for layer in self._memory.cfg.layers}

    def __getitem__(self, layer: int) -> dict[str, Tensor]:
        return (self._now() if self._kept is None else self._kept)[layer]

    def __iter__(self) -> Iterator[int]:
        return iter(self._memory.cfg.layers)

    def __len__(self) -> int:
        return len(self._memory.cfg.layers)

    def __enter__(self) -> Taps:
        self._kept = None
        self._set(True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kept = self._now()
        self._set(False)

    def _set(self, tapping: bool) -> None:
        for layer in self._memory.cfg.layers:
            self._memory.layer(layer).tapping = tapping
