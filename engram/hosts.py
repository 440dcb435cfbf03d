"""One entry per host architecture: where its decoder blocks are, and how ids, values and residual streams reach them.

Adding a family is adding an entry. Paths are attribute paths; the decoder is the module whose forward takes token ids
and runs the blocks. A family without an entry is found by its structure, and the error says what was looked for.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import Any

from torch import nn

from engram.config import ConfigError

log = logging.getLogger("engram")


@dataclass(frozen=True)
class HostEntry:
    """Where things are in one family.

    decoder     path of the decoder in the language model; the model itself where it has no such part.
    blocks, embedding   names in the decoder.
    streams     config field with the number of residual streams; None is one stream.
    flat        the streams lie side by side in one hidden state [B, T, S * D].
    attention, values   path in a block of the attention, and of the linear layer in it that makes the values; None
                where a family has none (latent attention).
    fused       what `values` makes: "v", or queries, keys and values in one: "qkv" (one after another), or "heads" (the
                three of a head together).
    fails       what fails in the host itself (transformers 5.24), memory or not: decoding modes, of which tests assert
                just that; "packing" (attention sees across packed documents), which the memory refuses.
    """

    name: str
    decoder: str = "model"
    blocks: str = "layers"
    embedding: str = "embed_tokens"
    streams: str | None = None
    flat: bool = False
    attention: str = "self_attn"
    values: str | None = "v_proj"
    fused: str = "v"
    fails: tuple[str, ...] = ()


ENTRIES: dict[str, HostEntry] = {
    "llama": HostEntry("Llama"),
    "mistral": HostEntry("Mistral"),
    "mixtral": HostEntry("Mixtral"),
    "qwen2": HostEntry("Qwen2"),
    "qwen3": HostEntry("Qwen3"),
    "qwen3_moe": HostEntry("Qwen3-MoE"),
    "gemma2": HostEntry("Gemma 2"),
    "gemma3_text": HostEntry("Gemma 3"),
    "olmo2": HostEntry("OLMo 2"),
    "smollm3": HostEntry("SmolLM3"),
    "gpt_oss": HostEntry("GPT-OSS", fails=("packing",)),
    "phi3": HostEntry("Phi-3", values="qkv_proj", fused="qkv"),
    "gpt2": HostEntry(
        "GPT-2", "transformer", blocks="h", embedding="wte", attention="attn", values="c_attn", fused="qkv"
    ),
    "gpt_neox": HostEntry(
        "GPT-NeoX", "gpt_neox", embedding="embed_in", attention="attention", values="query_key_value", fused="heads"
    ),
    "deepseek_v3": HostEntry("DeepSeek-V3", values=None),
    "deepseek_v4": HostEntry("DeepSeek-V4", streams="hc_mult", values=None, fails=("lazy", "static", "drafts")),
    "qwen4_exp_text": HostEntry(
        "Qwen4-Exp", streams="hc_count", flat=True, values=None, fails=("packing", "lazy", "drafts")
    ),
}


@dataclass(frozen=True)
class Host:
    """The parts of one model that the memory needs.

    streams       residual streams.
    value_width   width of the attention values of a block.
    """

    entry: HostEntry
    decoder: nn.Module
    blocks: nn.ModuleList
    embedding: nn.Module
    config: Any
    streams: int = 1

    @property
    def value_width(self) -> int:
        """Width of the attention's values: key/value heads times their width."""
        heads = int(getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads)
        width = getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads
        return heads * int(width)

    def values_of(self, layer: int) -> nn.Module:
        """The linear layer that makes the values of a block. Raises ConfigError where the family has none."""
        name = self.entry.values
        if name is None:
            raise ConfigError(
                f"site: 'value', but {self.entry.name} has no linear layer of attention values (latent attention); "
                f"use 'residual' or 'embedding'"
            )
        attention = getattr(self.blocks[layer], self.entry.attention, None)
        found = getattr(attention, name, None)
        if not isinstance(found, nn.Module):
            raise ConfigError(f"site: 'value', but block {layer} has no {self.entry.attention}.{name}")
        inner = getattr(found, "get_base_layer", None)  # of an adapter, which may be merged and go
        return inner() if callable(inner) else found


WRAPPERS = ("OptimizedModule", "DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")
"""Of torch.compile and of several devices: they look at the modules when they are made, so they come after `attach`."""


def base_of(model: nn.Module) -> nn.Module:
    """The language model itself, where an adapter library has wrapped it. Raises ConfigError for other wrappers."""
    if type(model).__name__ in WRAPPERS:
        raise ConfigError(f"model: {type(model).__name__} is a wrapper; attach to the model first, then wrap it")
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if callable(unwrap) else model  # type: ignore[no-any-return]


def find(model: nn.Module) -> Host:
    """The parts of a transformers decoder model (with or without its head, or wrapped by an adapter library).

    Raises ConfigError when the architecture is unknown and no decoder is found in it (saying what was looked for), or
    when the parts of a known one are not where they should be.
    """
    model = base_of(model)
    config = getattr(model, "config", None)
    entry = ENTRIES.get(str(getattr(config, "model_type", None)))
    if entry is None:
        return _by_structure(model, config)
    decoder = getattr(model, entry.decoder, model)
    blocks, embedding = getattr(decoder, entry.blocks, None), getattr(decoder, entry.embedding, None)
    if not isinstance(blocks, nn.ModuleList) or not isinstance(embedding, nn.Module):
        raise ConfigError(
            f"model: {type(model).__name__} looks like {entry.name}, but has no {entry.blocks!r} list and "
            f"{entry.embedding!r} module under {entry.decoder!r}"
        )
    streams = 1 if entry.streams is None else int(getattr(config, entry.streams))
    return Host(entry, decoder, blocks, embedding, config, streams)


def _by_structure(model: nn.Module, config: Any) -> Host:
    """A decoder that is not listed: one list of as many blocks as the config counts, beside the input embedding."""
    kind = f"{type(model).__name__} (model_type {getattr(config, 'model_type', None)!r})"
    known = ", ".join(sorted(ENTRIES))
    fields = ("num_hidden_layers", "hidden_size", "vocab_size")
    missing = [field for field in fields if not isinstance(getattr(config, field, None), int)]
    if missing:
        raise ConfigError(
            f"model: {kind} is not a known host ({known}), and its config does not count {', '.join(missing)}. In a "
            f"model of your own use engram.Memory directly"
        )
    embed = getattr(model, "get_input_embeddings", None)
    embedding = embed() if callable(embed) else None
    found = []
    for path, decoder in model.named_modules():
        lists = [
            (name, child)
            for name, child in decoder.named_children()
            if isinstance(child, nn.ModuleList) and len(child) == config.num_hidden_layers
        ]
        names = [name for name, child in decoder.named_children() if child is embedding]
        if len(lists) == 1 and names:
            found.append((path, decoder, lists[0], names[0]))
    if len(found) != 1:
        raise ConfigError(
            f"model: {kind} is not a known host ({known}), and its structure does not tell: looked for one module that "
            f"has both the input embedding ({type(embedding).__name__}) and one list of {config.num_hidden_layers} "
            f"blocks, found {len(found)}. In a model of your own use engram.Memory directly"
        )
    path, decoder, (name, blocks), embedding_name = found[0]
    arguments = inspect.signature(decoder.forward).parameters
    if not {"cache", "past_key_values"} & set(arguments):
        raise ConfigError(
            f"model: {kind} is not a known host ({known}), and {path or 'its decoder'} takes no cache of transformers: "
            f"what it remembers between two forwards could not carry the memory's state"
        )
    log.warning("attach: %s is not a listed host; blocks found by structure in %s.%s", kind, path or "model", name)
    entry = HostEntry(type(model).__name__, path, name, embedding_name, values=None)
    return Host(entry, decoder, blocks, embedding, config)  # type: ignore[arg-type]
