"""From a recipe to the model it describes: the planned arm, the backbone with its memory, equal initial values by name.

    built = assemble(cfg, corpus.vocab_size, corpus.tokenizer)

Training and every later look at a run folder build the model here, so they cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from engram.attaching import attach
from engram.backbone import build, reseed
from engram.handles import Handle
from engram.train.budget import Arm
from engram.train.recipe import TrainConfig


@dataclass(frozen=True)
class Built:
    """A model, the handle of its memory (None without one), and the arm it was planned as (None: not planned)."""

    model: nn.Module
    handle: Handle | None
    arm: Arm | None = None


def assemble(cfg: TrainConfig, vocab_size: int, tokenizer: Any = None) -> Built:
    """The model of one run on the CPU, initialised from `cfg.seed` by parameter name. Raises ConfigError."""
    arm = cfg.arm(vocab_size)
    model = build(arm.backbone, vocab_size, cfg.seed)
    handle = (
        None if arm.memory is None else attach(model, arm.memory, tokenizer=tokenizer if arm.memory.compress else None)
    )
    if handle is not None:
        reseed(model, cfg.seed)  # the memory's projections too; the rest is refilled with what it had
    return Built(model, handle, arm)
