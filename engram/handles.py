"""The handle of a memory inside a host: the hooks that feed it, taps, statistics, what learns, taking it out again.

A hook at the decoder's entry finds the ids, refuses what cannot be hashed rightly, and hashes once for all layers; one
at each site adds that layer's update; one at the exit puts the state for decoding into the cache. Forwards of one model
take turns, whatever threads they come from: a memory knows one forward at a time.
"""

from __future__ import annotations

import copy
import inspect
import logging
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from engram.caches import CACHE_NAMES, cache_in, given_cache, put_state, read_mask, state_in
from engram.decoding import DecodeState
from engram.editing import EditsRows
from engram.hosts import Host
from engram.memory import Memory
from engram.saving import PlainSaver, SavesMemory
from engram.strict import choice
from engram.table import RowProxy
from engram.window import positions_from_segments, segments_from_positions

log = logging.getLogger("engram")
Trainable = Literal["all", "memory", "memory+norms"]
TRAINABLE = ("all", "memory", "memory+norms")


TURN_TIMEOUT = 600.0
"""Seconds after which a thread gives up waiting for the forward of another one."""


def _give_back_to_ddp(model: nn.Module) -> None:
    """The other way round: names of the memory are taken off the list, and the list with the last of them."""
    ignored = [name for name in model.__dict__.pop("_ddp_params_and_buffers_to_ignore", []) if name[:7] != "engram."]
    if ignored:
        model.__dict__["_ddp_params_and_buffers_to_ignore"] = ignored


def forget_compiled() -> None:
    """Graphs that were compiled before would not run the hooks that come or go now: memory without effect, silently."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def handle_of(host: Host) -> Handle | None:
    """The handle whose memory this decoder has, whichever of its outer modules carries it."""
    hooks = host.decoder._forward_pre_hooks.values()
    return next((one for hook in hooks if isinstance(one := getattr(hook, "__self__", None), Handle)), None)


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
        self._turn, self._holder = threading.Lock(), 0
        self._saver = PlainSaver(model, memory)
        self._names = [name for name in inspect.signature(host.decoder.forward).parameters if name != "kwargs"]
        self._hooks = [
            host.decoder.register_forward_pre_hook(self._enter, with_kwargs=True),
            host.decoder.register_forward_hook(self._leave, with_kwargs=True),
            host.decoder.register_forward_hook(self._end, always_call=True),
        ]
        if memory.cfg.site == "embedding":
            self._hooks.append(host.embedding.register_forward_hook(_AtEmbedding(self, memory.cfg.layers[0])))
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
            forget_compiled()
        return self.model

    def prefetch(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        cache: Any = None,
    ) -> None:
        """Start fetching the rows of a later forward with these arguments, while the model computes something else.

        cache  of the texts that the forward will continue, as it is now.

        Worth it where rows do not live on the device; for tables that do, nothing happens.
        """
        state = None if cache is None else state_in(given_cache({"cache": cache}), self.memory.number)
        keep_BT, _ = read_mask(attention_mask, input_ids, 0 if state is None else state.length)
        if segment_ids is None:
            segment_ids = _documents(input_ids, position_ids, keep_BT)
        self.memory.prefetch(input_ids, segment_ids=segment_ids, mask=keep_BT, state=state)

    def set_trainable(self, what: Trainable) -> None:
        """What learns: "memory" alone, "memory+norms" (of the host, too), or "all" of the model.

        Rows that cannot be trained (their format, or shared with another model) stay frozen. An adapter library
        freezes what it does not know, so call this after it. With "memory" its adapters are frozen as well. Raises
        ConfigError for anything else.
        """
        choice("trainable", what, TRAINABLE)
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
        self._begin(decoder)
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
        keep_BT, seen_BT = None, None
        if not self._off:  # the host judges its masks itself
            keep_BT, seen_BT = read_mask(mask, ids_BT, 0 if state is None else state.length)
        if segment_ids is not None and kwargs.get("position_ids") is None:
            kwargs["position_ids"] = positions_from_segments(segment_ids)
        elif segment_ids is None and seen_BT is None:
            segment_ids = _documents(ids_BT, kwargs.get("position_ids"), keep_BT)
        if segment_ids is not None:
            self._refuse_leaks(kwargs, mask)
        self._inside = True
        if self._off:
            self.memory.bypass()
            return (), kwargs
        segment_ids = seen_BT if segment_ids is None else segment_ids
        use_cache = kwargs.get("use_cache")
        use_cache = getattr(self.host.config, "use_cache", False) if use_cache is None else use_cache
        if state is None and segment_ids is None and (use_cache or cache is not None):
            state = self._state = self.memory.new_state()
        self.memory.start(ids_BT, segment_ids=segment_ids, mask=keep_BT, state=state)
        return (), kwargs

    @torch.compiler.disable
    def _begin(self, decoder: nn.Module) -> None:
        """One forward at a time. Raises RuntimeError for a replica, and where the host runs too few of its blocks."""
        if decoder is not self.host.decoder:
            raise RuntimeError(
                "memory: this is a replica of the model (DataParallel), whose memory is that of the original; use "
                "DistributedDataParallel, or one process for each device"
            )
        runs = getattr(self.host.config, "num_hidden_layers", None)
        last = max(self.memory.cfg.layers)
        if not self._off and runs is not None and last >= runs:
            raise RuntimeError(
                f"memory: the host runs {runs} blocks in this forward (early exit) and never reaches the memory at "
                f"block {last}; use another draft, or memory in the first blocks alone"
            )
        mine = threading.get_ident()
        if self._holder != mine:  # else a forward of this thread was interrupted and never ended
            if not self._turn.acquire(timeout=TURN_TIMEOUT):
                raise RuntimeError(
                    f"memory: a forward of another thread has not ended within {TURN_TIMEOUT:.0f} s; forwards of one "
                    f"model take turns"
                )
            self._holder = mine
        self._inside, self._state = False, None

    @torch.compiler.disable
    def _end(self, decoder: nn.Module, args: Any, output: Any) -> None:
        """Also after an error: nobody is inside any more, and the next thread's turn comes."""
        self._inside, self._state = False, None
        if self._holder == threading.get_ident():
            self._holder = 0
            self._turn.release()

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
        self.memory.finish()
        state = self._state
        if state is None:
            return
        cache = given_cache(kwargs)
        cache = cache_in(output) if cache is None else cache
        if cache is None:
            self.memory.forget_state()
        else:
            put_state(cache, state)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has a turn of its own, and begins outside of any forward."""
        return {**self.__dict__, "_turn": None, "_holder": 0, "_inside": False, "_state": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._turn = threading.Lock()


def _documents(ids_BT: Tensor, position_ids: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """Packed documents of a forward, from positions that restart."""
    if position_ids is not None and position_ids.ndim == 3:  # one line for text, others for pictures
        position_ids = position_ids[0]
    segment_BT = None if position_ids is None else segments_from_positions(position_ids, mask)
    return None if segment_BT is None else segment_BT.expand_as(ids_BT)


class _AtSite:
    """What a module of the host is hooked with."""

    def __init__(self, handle: Handle, layer: int) -> None:
        self.handle, self.layer = handle, layer

    def __deepcopy__(self, memo: dict[int, Any]) -> _AtSite:
        """A copied model has a handle of its own; a copy of this one module alone does not take the model along."""
        whole = id(self.handle.host.decoder) in memo
        return type(self)(copy.deepcopy(self.handle, memo) if whole else self.handle, self.layer)


class _AtEmbedding(_AtSite):
    """Hook of the input embedding: add the update to it, or mix it in."""

    def __call__(self, embedding: nn.Module, args: Any, x_BTD: Tensor) -> Tensor:
        handle = self.handle
        if handle._off or not handle._inside:  # somebody else may look words up, too
            return x_BTD
        cfg = handle.memory.cfg
        x_BTD = x_BTD + handle.memory(self.layer, x_BTD)
        return x_BTD / (1 + cfg.columns) if cfg.mix == "mean" else x_BTD


class _BeforeBlock(_AtSite):
    """Pre-hook of one block: add the layer's update to the hidden state."""

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


class _IntoValues(_AtSite):
    """Hook of the linear layer that makes a block's attention values: add the layer's update to them."""

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
