"""Put memory into somebody else's model and take it out again.

    handle = engram.attach(model, cfg, tokenizer=None)     # model(...) keeps working, now with memory
    with handle.taps() as taps: model(ids)                 # taps[layer]["gate"], ["rows"], ["value"], ...
    handle.detach()

A hook at the decoder's entry hashes the ids once for all layers; a hook before each memory block adds that layer's
update to the hidden state, before the block's attention. The memory is the submodule `model.engram`, so `.to()`,
`parameters()` and `state_dict()` see it.

Decoding with a cache is the same function: the cache carries the memory's state (engram/caches.py).

Packed documents: transformers isolates them in attention only when position ids restart, no attention mask is given and
no cache is used. The same restarts (or a `segment_ids` argument, which is taken out here) cut hash and convolution.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from engram.caches import CACHE_NAMES, cache_in, given_cache, new_tokens_kept, put_state, state_in
from engram.compress import TokenMap
from engram.config import ConfigError, EngramConfig
from engram.decoding import DecodeState
from engram.editing import EditsRows
from engram.hosts import Host, base_of, find
from engram.memory import Memory
from engram.saving import PlainSaver, SavesMemory
from engram.table import RowProxy
from engram.window import positions_from_segments, segments_from_positions

log = logging.getLogger("engram")
Trainable = Literal["all", "memory", "memory+norms"]


def attach(
    model: nn.Module,
    cfg: EngramConfig,
    tokenizer: Any = None,
    token_map: TokenMap | None = None,
    *,
    rows_of: Handle | Memory | None = None,
    trainable: Trainable = "all",
) -> Handle:
    """Add a memory to a transformers decoder model, in place, and return its handle.

    A fresh memory does not change what the model computes, and learns from the first step: rows start at zero, or the
    value projection does where `cfg.init` gives rows another start. Only `mix: mean` (LongCat) and summed rows that
    start normal (BLT) change the model from the beginning, which is said once.

    cfg.compress needs `tokenizer` (or a finished `token_map`); without it raw ids are hashed.
    rows_of    another model's handle or memory, whose rows this one uses instead of its own; see `Memory`.
    trainable  what learns; see `Handle.set_trainable`.
    Raises ConfigError, with the model left as it was, when the architecture is unknown, a block does not exist, widths
    or residual streams differ, a map is missing, a memory is attached already, or `rows_of` has other rows.
    """
    host, wrapper, model = find(model), model, base_of(model)
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
    device = _device_of(host, cfg.layers[0])  # not `first`'s: that lies on meta where weights are fetched when they run
    with torch.device(device):
        shared = rows_of.memory if isinstance(rows_of, Handle) else rows_of
        width = host.value_width if cfg.site == "value" else None
        memory = Memory(
            cfg, None if token_map is not None else vocab_size, token_map, rows_of=shared, value_width=width
        )
    memory.to(device)
    dtype = first.dtype if first.is_floating_point() else torch.get_default_dtype()  # quantised weights are integers
    for block, layer in zip(cfg.layers, memory.modules_by_layer(), strict=True):
        layer.to(_device_of(host, block), dtype)
    _start_silent(memory)
    memory.train(model.training)
    model.engram = memory
    _keep_from_ddp(model, memory)
    handle = Handle(model, memory, host, wrapper)
    if trainable != "all":
        handle.set_trainable(trainable)
    return handle


def _device_of(host: Host, block: int) -> torch.device:
    """Where a block computes: `device_map` may spread them. Blocks that are fetched when they run say so by a hook."""
    module = host.blocks[block]
    hooks = [getattr(part, "_hf_hook", None) for part in module.modules()]
    execution = next(
        (device for hook in hooks if (device := getattr(hook, "execution_device", None)) is not None), None
    )
    if execution is not None:
        return torch.device(execution)
    found = next((p.device for p in module.parameters() if p.device.type != "meta"), None)
    return next(host.decoder.parameters()).device if found is None else found


def _start_silent(memory: Memory) -> None:
    """Where rows do not start at zero the value projection does: never both, or nothing would ever learn."""
    cfg = memory.cfg
    if cfg.mix == "mean":
        log.warning(
            "attach: mix 'mean' divides the embedding by %d: the model computes something else from now on",
            1 + cfg.columns,
        )
    if cfg.init == "zeros":
        return
    if cfg.combine == "sum":
        log.warning(
            "attach: summed rows start normal: the model computes something else from now on; init: zeros does not"
        )
    for layer in memory.modules_by_layer():
        if layer.value is not None:
            for parameter in layer.value.parameters():
                nn.init.zeros_(parameter)
                parameter.init_std = 0.0  # type: ignore[attr-defined]


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
    wanted = host.streams if cfg.site == "residual" else 1
    if cfg.branches != wanted:
        raise ConfigError(
            f"branches: {cfg.branches}, but {host.entry.name} has {wanted} stream(s) at site {cfg.site!r}"
        )
    if cfg.site == "value":
        for layer in cfg.layers:
            host.values_of(layer)
        if cfg.combine == "sum" and cfg.head_dim != host.value_width:
            raise ConfigError(f"head_dim: {cfg.head_dim}; summed rows at site 'value' need {host.value_width}")


class Handle(SavesMemory, EditsRows):
    """A memory inside a host model: taps, statistics, what learns, switching off, taking out.

    model is the language model that carries the memory; `wrapper` what was given to `attach` (an adapter library may
    have wrapped the model).
    """

    def __init__(self, model: nn.Module, memory: Memory, host: Host, wrapper: nn.Module | None = None) -> None:
        self.model, self.memory, self.host = model, memory, host
        self.wrapper = model if wrapper is None else wrapper
        self._off = self._inside = False
        self._state: DecodeState | None = None
        self._saver = PlainSaver(model, memory)
        self._names = [name for name in inspect.signature(host.decoder.forward).parameters if name != "kwargs"]
        self._hooks = [
            host.decoder.register_forward_pre_hook(self._enter, with_kwargs=True),
            host.decoder.register_forward_hook(self._leave, with_kwargs=True),
        ]
        if memory.cfg.site == "embedding":
            self._hooks.append(host.embedding.register_forward_hook(self._at_embedding))
        for layer in memory.cfg.layers if memory.cfg.site == "residual" else ():
            hook = _BeforeBlock(self, layer)
            self._hooks.append(host.blocks[layer].register_forward_pre_hook(hook, with_kwargs=True))
        for layer in memory.cfg.layers if memory.cfg.site == "value" else ():
            self._hooks.append(host.values_of(layer).register_forward_hook(_IntoValues(self, layer)))

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

    def set_trainable(self, what: Trainable) -> None:
        """What learns: "memory" alone, "memory+norms" (of the host, too), or "all" of the model.

        Rows that cannot be trained (their format, or shared with another model) stay frozen. An adapter library
        freezes what it does not know, so call this after it. With "memory" its adapters are frozen as well. Raises
        ValueError for anything else.
        """
        if what not in ("all", "memory", "memory+norms"):
            raise ValueError(f"trainable: {what!r}; choose 'memory', 'memory+norms' or 'all'")
        for parameter in self.wrapper.parameters():
            if not isinstance(parameter, RowProxy) and parameter.is_floating_point():
                parameter.requires_grad_(what == "all")
        if what == "memory+norms":
            for name, module in self.wrapper.named_modules():
                if "norm" in type(module).__name__.lower() or name.rpartition(".")[2].startswith("ln_"):
                    for parameter in module.parameters(recurse=False):
                        parameter.requires_grad_(True)
        for layer in self.memory.modules_by_layer():
            for parameter in layer.parameters():
                if not isinstance(parameter, RowProxy):
                    parameter.requires_grad_(True)
            if layer.table.may_train and layer.table.common.members()[0] is layer.table:
                layer.table.trainable = True

    def trainable_parameters(self) -> dict[str, int]:
        """Numbers of values: "rows" and "dense" of the memory that learn, "host" that learns, and "all" there are."""
        dense = [p for p in self.memory.parameters() if not isinstance(p, RowProxy)]
        mine = {id(p) for p in self.memory.parameters()}
        host = [p for p in self.wrapper.parameters() if id(p) not in mine]
        rows = [m.table.store.spec for m in self.memory.modules_by_layer()]
        learning = [m.table.store.spec for m in self.memory.modules_by_layer() if m.table.trainable]
        return {
            "rows": sum(spec.rows * spec.width for spec in learning),
            "dense": sum(p.numel() for p in dense if p.requires_grad),
            "host": sum(p.numel() for p in host if p.requires_grad),
            "all": sum(p.numel() for p in (*dense, *host)) + sum(spec.rows * spec.width for spec in rows),
        }

    def print_trainable(self) -> None:
        """One line: how many values of rows, of the memory's dense parts and of the host learn."""
        counts = self.trainable_parameters()
        learning = counts["rows"] + counts["dense"] + counts["host"]
        print(
            f"trainable: {counts['rows']:,} in rows, {counts['dense']:,} in the memory's dense parts, "
            f"{counts['host']:,} in the host; {learning:,} of {counts['all']:,} ({learning / counts['all']:.2%})"
        )

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
        cache = given_cache(kwargs)
        state = None if cache is None or self._off else state_in(cache, self.memory.number)
        past = 0 if state is None else state.length
        if not self._off:  # the host judges its masks itself
            mask = new_tokens_kept(mask, ids_BT, past)
        if segment_ids is not None and kwargs.get("position_ids") is None:
            kwargs["position_ids"] = positions_from_segments(segment_ids)
        elif segment_ids is None:
            segment_ids = _documents(ids_BT, kwargs.get("position_ids"), mask)
        if segment_ids is not None:
            self._refuse_leaks(kwargs, kwargs.get("attention_mask"))
        self._inside = True
        if self._off:
            self.memory.bypass()
            return (), kwargs
        use_cache = kwargs.get("use_cache")
        use_cache = getattr(self.host.config, "use_cache", False) if use_cache is None else use_cache
        if state is None and (use_cache or cache is not None):
            state = self._state = self.memory.new_state()
        self.memory.start(ids_BT, segment_ids=segment_ids, mask=mask, state=state)
        return (), kwargs

    def _refuse_leaks(self, kwargs: dict[str, Any], mask: Tensor | None) -> None:
        """Attention would see across packed documents although hash and convolution do not."""
        if "packing" in self.host.entry.fails:
            raise ValueError(
                f"position_ids restart (packed documents), but attention of {self.host.entry.name} sees across "
                f"documents whatever its positions are; run one document a row"
            )
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

    def _leave(self, decoder: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """The end of a forward: every layer was reached, and a cache that was just filled carries the state."""
        self._inside = False
        self.memory.finish()
        state, self._state = self._state, None
        if state is None:
            return
        cache = given_cache(kwargs)
        cache = cache_in(output) if cache is None else cache
        if cache is None:
            self.memory.forget_state()
        else:
            put_state(cache, state)

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
        if args:
            return (args[0] + self._update(args[0]), *args[1:]), kwargs
        x = kwargs["hidden_states"]
        return args, {**kwargs, "hidden_states": x + self._update(x)}

    def _update(self, x: Tensor) -> Tensor:
        host = self.handle.host
        if not host.entry.flat:
            return self.handle.memory(self.layer, x)  # type: ignore[no-any-return]
        x_BTSD = x.unflatten(-1, (host.streams, -1))
        update: Tensor = self.handle.memory(self.layer, x_BTSD)
        return update.flatten(-2)


class _IntoValues:
    """Hook of the linear layer that makes a block's attention values: add the layer's update to them."""

    def __init__(self, handle: Handle, layer: int) -> None:
        self.handle, self.layer = handle, layer

    def __call__(self, linear: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        update_BTV = self.handle.memory(self.layer, args[0])
        fused, width = self.handle.host.entry.fused, update_BTV.shape[-1]
        if fused == "v":
            return out + update_BTV
        if fused == "qkv":
            return torch.cat([out[..., :-width], out[..., -width:] + update_BTV], dim=-1)
        heads = int(self.handle.host.config.num_attention_heads)
        out_BT3V = out.unflatten(-1, (heads, 3, width // heads))  # queries, keys and values of a head together
        query, key, value = out_BT3V.unbind(-2)
        return torch.stack([query, key, value + update_BTV.unflatten(-1, (heads, -1))], dim=-2).flatten(-3)


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
