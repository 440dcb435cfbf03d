"""`engram attach`: train a memory into an existing model, and write it without the model.

    engram attach MODEL_OR_PATH --config configs/attach/memory.yaml --data texts.jsonl --out runs/attached
    engram attach MODEL_OR_PATH --config configs/attach/memory.yaml --data texts.jsonl --out runs/attached --resume

The model is a folder of transformers or a name on the hub, the data what `data.source` takes (docs/data.md); its own
tokenizer makes the tokens. The run folder is that of `engram train` (log, checkpoint, result.json), and `memory/` in it
is what `engram.load(model, folder)` adds to the model again. The result has the held-out loss with the memory and, on
the same tokens, of the model without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from engram.attaching import attach
from engram.config import EngramConfig
from engram.eval.loss import held_out_loss
from engram.handles import Handle
from engram.hosts import find
from engram.strict import ConfigError, apply_overrides, from_dict, load_yaml, require
from engram.train.assembly import Built
from engram.train.data import prepare
from engram.train.loop import Run, claim, only_one
from engram.train.recipe import StudyConfig, TrainConfig
from engram.train.textfiles import reason

FOLDER = "memory"
"""What of the run folder is added to the model again."""


@dataclass(frozen=True)
class AdaptConfig(TrainConfig):
    """A memory for an existing model; fields as in TrainConfig, of which `backbone` and `rho` mean nothing here.

    model       folder or hub name, which `engram attach` takes as its argument.
    trainable   what learns: "memory" alone, "memory+norms", or "all" of the model.
    dtype       of the model's weights: "auto" as they were saved, or another one.
    """

    model: str = ""
    trainable: Literal["memory", "memory+norms", "all"] = "memory"
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    loss_free_balancing: float = 0.0
    study: StudyConfig = field(default_factory=lambda: StudyConfig(lens_tokens=0, ngrams=False))

    def check_shapes(self) -> None:
        """Blocks and widths are those of a model that is not known yet."""
        require(self.rho is None, f"rho: {self.rho} plans a backbone of one's own; leave it out")

    def memory_for(self, model: nn.Module) -> EngramConfig:
        """The memory section for this model: width and streams are the model's. Raises ConfigError."""
        host = find(model)
        section = dict(self.memory or {})
        streams = host.streams if section.get("site", "residual") == "residual" else 1
        filled = {"hidden_size": int(host.config.hidden_size), "branches": streams, "seed": self.seed, **section}
        return from_dict(EngramConfig, filled, "memory")


class Adaptation(Run):
    """A training run whose model was there before."""

    @property
    def saved(self) -> nn.Module:
        """A frozen model need not be in every checkpoint."""
        assert isinstance(self.cfg, AdaptConfig)
        return saved_part(self.cfg, self.built)

    def budget(self) -> dict[str, Any]:
        """What learns, in values; the model's own size is not planned here."""
        assert self.built.handle is not None
        return {"parameters": self.built.handle.trainable_parameters()}

    def examine(self) -> dict[str, Any]:
        """The answers of any run, the loss of the bare model on the same tokens, and the written memory."""
        metrics = super().examine()
        handle = self.built.handle
        assert handle is not None
        with handle.disabled():
            metrics["loss_without_memory"] = held_out_loss(self.built.model, self.corpus.validation_batches()).nats
        handle.save_pretrained(self.folder / FOLDER)
        metrics["memory"] = str(self.folder / FOLDER)
        return metrics


def run_config(
    model: str,
    config: str,
    data: list[str],
    overrides: list[str],
    dry_run: bool = False,
    out: str | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """`engram attach`: a model, a YAML path, texts and overrides -> result dictionary (with `dry_run`, the plan)."""
    raw = apply_overrides(load_yaml(config), overrides)
    section = dict(raw.get("data") or {})
    section.setdefault("tokenizer", model)
    if data:
        section["source"] = data[0] if len(data) == 1 else data
    cfg = from_dict(AdaptConfig, {**raw, "model": model, "data": section})
    require(cfg.memory is not None, "memory: the configuration has no `memory` section")
    if dry_run:
        return planned(cfg)
    return train_memory(cfg, Path(out) if out else Path("runs") / f"{Path(config).stem}-{cfg.seed}", resume)


def planned(cfg: AdaptConfig) -> dict[str, Any]:
    """The complete configuration, the memory as it will be, and what will learn; trains nothing."""
    handle = put_into(cfg, load_model(cfg))
    try:
        return {
            "config": cfg.to_dict(),
            "memory": handle.memory.cfg.to_dict(),
            "parameters": handle.trainable_parameters(),
            "tokens": cfg.tokens,
            "bytes": {str(layer): stats["bytes"] for layer, stats in handle.stats().items()},
        }
    finally:
        handle.memory.close()


def train_memory(cfg: AdaptConfig, folder: Path, resume: bool = False, quiet: bool = False) -> dict[str, Any]:
    """Train the memory of one model in `folder` -> its result. Raises ConfigError as `train_run` does."""
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    with only_one(folder):
        model = load_model(cfg)
        corpus = prepare(cfg.data, cfg.seed)
        words = int(find(model).config.vocab_size)
        require(
            corpus.vocab_size <= words,
            f"data.tokenizer: it has {corpus.vocab_size} ids, the model's embedding has {words}; use the model's own",
        )
        handle = put_into(cfg, model, corpus.tokenizer)
        try:
            built = Built(model, handle)
            saved = claim(folder, cfg, resume, built)
            return Adaptation(cfg, folder, corpus, built, quiet).go(saved)
        finally:
            handle.memory.close()


def saved_part(cfg: AdaptConfig, built: Built) -> nn.Module:
    """What of the model is in the checkpoints: what learns."""
    assert built.handle is not None
    return built.handle.memory if cfg.trainable == "memory" else built.model


def load_model(cfg: AdaptConfig) -> nn.Module:
    """The model to be adapted. Raises ConfigError when there is none of that name."""
    from transformers import AutoModelForCausalLM

    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(cfg.model, dtype=cfg.dtype)
    except Exception as error:  # transformers, the hub and safetensors each have errors of their own
        raise ConfigError(f"model: {cfg.model!r} could not be loaded: {reason(error)}") from error
    return model


def put_into(cfg: AdaptConfig, model: nn.Module, tokenizer: Any = None) -> Handle:
    """The model with its fresh memory, of which `cfg.trainable` learns. Raises ConfigError."""
    memory = cfg.memory_for(model)
    longest = getattr(find(model).config, "max_position_embeddings", None)
    require(
        longest is None or cfg.data.seq_len <= longest,
        f"data.seq_len: {cfg.data.seq_len} exceeds the {longest} positions of the model",
    )
    with torch.random.fork_rng(devices=[]):  # the memory starts from the run's seed, whatever ran before
        torch.manual_seed(cfg.seed)
        return attach(model, memory, tokenizer if memory.compress else None, trainable=cfg.trainable)
