"""One entry per host architecture: where its decoder blocks are, and how ids reach them.

Adding a family is adding an entry. Paths are attribute paths; the decoder is the module whose forward takes token ids
and runs the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from engram.config import ConfigError


@dataclass(frozen=True)
class HostEntry:
    """Where things are in one family: the decoder inside the language model, its blocks, its embedding, its streams."""

    name: str
    decoder: str
    blocks: str = "layers"
    embedding: str = "embed_tokens"
    streams: int = 1


ENTRIES: dict[str, HostEntry] = {
    "llama": HostEntry("Llama", "model"),
    "qwen3": HostEntry("Qwen3", "model"),
    "deepseek_v3": HostEntry("DeepSeek-V3", "model"),
    "gpt2": HostEntry("GPT-2", "transformer", blocks="h", embedding="wte"),
}


@dataclass(frozen=True)
class Host:
    """The parts of one model that the memory needs."""

    entry: HostEntry
    decoder: nn.Module
    blocks: nn.ModuleList
    embedding: nn.Module
    config: Any


def find(model: nn.Module) -> Host:
    """The parts of a transformers decoder model (with or without its head).

    Raises ConfigError when the architecture is unknown (naming the known ones) or its parts are not where they should
    be.
    """
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    entry = ENTRIES.get(str(model_type))
    if entry is None:
        raise ConfigError(
            f"model: {type(model).__name__} (model_type {model_type!r}) is not a known host; known are "
            f"{', '.join(sorted(ENTRIES))}. In a model of your own use engram.Memory directly"
        )
    decoder = getattr(model, entry.decoder, model)
    blocks, embedding = getattr(decoder, entry.blocks, None), getattr(decoder, entry.embedding, None)
    if not isinstance(blocks, nn.ModuleList) or not isinstance(embedding, nn.Module):
        raise ConfigError(
            f"model: {type(model).__name__} looks like {entry.name}, but has no {entry.blocks!r} list and "
            f"{entry.embedding!r} module under {entry.decoder!r}"
        )
    return Host(entry, decoder, blocks, embedding, config)
