"""One training run as a strict configuration: data, backbone, memory, budget, optimizer, and how often to look.

    cfg = load("configs/runs/smoke.yaml", overrides=["rho=0.8", "steps=200"])

`memory` holds EngramConfig fields; `hidden_size` comes from the backbone and `seed` from the run unless given. With
`rho` the backbone is the rho=1 reference of a budget and the arm is planned by train/budget.py; without it backbone and
memory are built as they stand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from engram.backbone import BackboneConfig
from engram.config import EngramConfig
from engram.optim import RowDecay, RowRule
from engram.strict import apply_overrides, check_fields, from_dict, load_yaml, require, to_dict
from engram.train.budget import Arm, plan_arm
from engram.train.corpus import DataConfig


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW for the backbone and the memory's dense parts, a row-wise rule for rows (engram/optim.py).

    lr, row_lr_multiplier    peak rate of dense parameters, and the factor of the rows on it (5 in the paper).
    row_weight_decay, row_decay    decay of rows: none at 0, of "touched" rows, or "global", of all of them.
    schedule    "cosine" to `final_lr` of the peak, "linear", or "constant", after `warmup` of all steps (a share).
    clip        largest gradient norm, rows included; 0 turns clipping off.
    """

    lr: float = 2e-3
    row_lr_multiplier: float = 5.0
    row_rule: RowRule = "rowwise_adam"
    betas: tuple[float, float] = (0.9, 0.95)
    row_betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.1
    row_weight_decay: float = 0.0
    row_decay: RowDecay = "touched"
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: float = 0.05
    final_lr: float = 0.1
    clip: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, "optimizer")
        require(self.lr > 0, f"optimizer.lr: {self.lr} must be greater than 0")
        require(self.row_lr_multiplier > 0, f"optimizer.row_lr_multiplier: {self.row_lr_multiplier} must be above 0")
        require(0 <= self.warmup < 1, f"optimizer.warmup: {self.warmup} is a share of all steps, 0 to below 1")
        require(0 <= self.final_lr <= 1, f"optimizer.final_lr: {self.final_lr} is a share of lr, 0 to 1")
        require(self.clip >= 0, f"optimizer.clip: {self.clip} must be 0 (off) or a norm")

    def factor(self, step: int, steps: int) -> float:
        """Learning rate of 0-based `step` of `steps`, as a share of the peak."""
        warm = math.ceil(self.warmup * steps)
        if step < warm:
            return (step + 1) / warm
        done = (step - warm) / max(1, steps - warm)
        if self.schedule == "constant":
            return 1.0
        shape = 0.5 * (1 + math.cos(math.pi * done)) if self.schedule == "cosine" else 1 - done
        return self.final_lr + (1 - self.final_lr) * shape


@dataclass(frozen=True)
class StudyConfig:
    """What the finished model is asked; the answers are kept in its result.

    lens_tokens   tokens of the logit lens; 0 leaves it out.
    ngrams        fit unigram and Kneser-Ney bigram and trigram models on the tokens that the run consumed.
    gate_tokens   tokens of the gate summary; 0 leaves gates and rows out.
    text          sample text whose gates and rows are shown; None takes the head of a held-out document.
    """

    lens_tokens: int = 8192
    ngrams: bool = True
    gate_tokens: int = 8192
    text: str | None = None


@dataclass(frozen=True)
class TrainConfig:
    """One run. `steps` optimizer steps of `accumulate` batches each; `*_every` count steps, 0 means only at the end.

    rho         plan the arm (see train/budget.py); null builds backbone and memory as given.
    precision     "auto" is bf16 where a GPU has it and fp32 on a CPU, whose bf16 is emulated.
    threads       compute threads on a CPU; null leaves torch's choice.
    loss_free_balancing   rate of the routing biases (DeepSeek-V3: 0.001).
    wandb         project name; null logs to JSON lines alone.
    """

    name: str = "run"
    seed: int = 0
    steps: int = 1000
    accumulate: int = 1
    rho: float | None = None
    data: DataConfig = field(default_factory=DataConfig)
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    memory: dict[str, Any] | None = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    study: StudyConfig = field(default_factory=StudyConfig)
    loss_free_balancing: float = 0.001
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = None
    log_every: int = 10
    eval_every: int = 0
    checkpoint_every: int = 0
    wandb: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("steps", "accumulate", "log_every"):
            require(getattr(self, name) >= 1, f"{name}: {getattr(self, name)} must be at least 1")
        for name in ("eval_every", "checkpoint_every"):
            require(getattr(self, name) >= 0, f"{name}: {getattr(self, name)} must be 0 (at the end only) or a number")
        require(self.threads is None or self.threads >= 1, f"threads: {self.threads} must be at least 1")
        self.check_shapes()

    def check_shapes(self) -> None:
        """Raise ConfigError where backbone, memory and data do not fit together."""
        require(
            self.rho is None or self.memory is not None or self.rho == 1, "rho: below 1 it needs a `memory` section"
        )
        require(
            self.data.seq_len <= self.backbone.max_position,
            f"data.seq_len: {self.data.seq_len} exceeds backbone.max_position {self.backbone.max_position}",
        )
        self.engram()

    def engram(self) -> EngramConfig | None:
        """The memory section as a checked EngramConfig, or None. Raises ConfigError."""
        if self.memory is None:
            return None
        filled = {"hidden_size": self.backbone.hidden_size, "seed": self.seed, **self.memory}
        cfg = from_dict(EngramConfig, filled, "memory")
        for layer in cfg.layers:
            require(
                layer < self.backbone.blocks, f"memory.layers: block {layer}, the backbone has {self.backbone.blocks}"
            )
        return cfg

    def arm(self, vocab_size: int) -> Arm:
        """What to build, with its costs counted: the planned arm of `rho`, or backbone and memory as they stand."""
        memory, seq_len = self.engram(), self.data.seq_len
        if self.rho is None and memory is not None:
            return plan_arm(self.backbone, memory, 1.0, seq_len=seq_len, vocab_size=vocab_size, mode="on_top")
        template = memory or EngramConfig(hidden_size=self.backbone.hidden_size, layers=(0,))
        rho = 1.0 if self.rho is None else self.rho
        return plan_arm(self.backbone, template, rho, seq_len=seq_len, vocab_size=vocab_size)

    @property
    def tokens(self) -> int:
        """Training tokens of the whole run."""
        return self.steps * self.accumulate * self.data.batch_size * self.data.seq_len

    def to_dict(self) -> dict[str, Any]:
        """Plain data, the inverse of `from_dict`."""
        return to_dict(self)


FREE_TO_CHANGE = ("log_every", "eval_every", "checkpoint_every", "wandb", "study", "threads", "name")
"""Fields that do not enter the weights: a resumed run may set them anew, and a finished one is not trained again."""


def changed_fields(ours: TrainConfig, theirs: Mapping[str, Any]) -> list[str]:
    """Names of the fields that make another training run of it; `theirs` is the plain data of a saved configuration.

    What a configuration of an earlier version does not name had the value that is the default now.
    """
    mine, defaults = (json.loads(json.dumps(cfg.to_dict())) for cfg in (ours, type(ours)()))
    filled = {name: theirs.get(name, default) for name, default in defaults.items()}
    for name, default in defaults.items():
        if isinstance(default, dict) and isinstance(filled[name], dict):
            filled[name] = {**default, **filled[name]}
    return [name for name in mine if name not in FREE_TO_CHANGE and mine[name] != filled[name]]


def load(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """A YAML file with `--set` overrides -> TrainConfig. Raises ConfigError naming field, value and remedy."""
    return from_dict(TrainConfig, apply_overrides(load_yaml(path), overrides))
