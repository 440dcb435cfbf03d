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

import logging
from typing import Any

import torch
from torch import nn

from engram.compress import TokenMap
from engram.config import ConfigError, EngramConfig
from engram.handles import TRAINABLE, Handle, Trainable, forget_compiled, handle_of
from engram.hosts import Host, base_of, find
from engram.memory import Memory
from engram.strict import choice
from engram.table import RowProxy

log = logging.getLogger("engram")


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
    choice("trainable", trainable, TRAINABLE)
    host, wrapper, model = find(model), model, base_of(model)
    if isinstance(getattr(model, "engram", None), Memory) or handle_of(host) is not None:
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
    forget_compiled()
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
