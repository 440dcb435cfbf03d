"""Look at a finished (or interrupted) run again: `engram eval loss|lens|gates|rows RUN`.

    engram eval gates runs/smoke-0 --text "import numpy as np"

The model is built from the run's own config.json and checkpoint by the same code that trained it; that of `engram
attach` is loaded from where it was.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from engram.eval.lens import logit_lens
from engram.eval.loss import held_out_loss
from engram.eval.report import write_json
from engram.strict import ConfigError, choice, from_dict
from engram.train import snapshots
from engram.train.adapt import AdaptConfig, load_model, put_into, saved_part
from engram.train.assembly import Built, assemble
from engram.train.data import Corpus, open_prepared
from engram.train.recipe import TrainConfig
from engram.train.study import look_into_memory
from engram.train.windows import WindowReader

KINDS = ("loss", "lens", "gates", "rows")


def run(kind: str, run: str, out: str | None = None, text: str | None = None) -> dict[str, Any]:
    """One question to the model of a run folder -> the answer, also written to RUN/eval-<kind>.json (or `out`).

    text  sample text for "gates" and "rows". Raises ConfigError when the folder holds no run, or "gates" and "rows" are
    asked of a model without memory.
    """
    choice("kind", kind, KINDS)
    cfg, corpus, built, reader = open_run(run)
    answer: dict[str, Any]
    if kind == "loss":
        loss = held_out_loss(built.model, corpus.validation_batches())
        answer = {"nats": loss.nats, "tokens": loss.tokens}
    elif kind == "lens":
        answer = logit_lens(built.model, corpus.validation_batches(), cfg.study.lens_tokens or None).to_dict()
    else:
        if built.handle is None:
            raise ConfigError(f"{kind}: the model in {run} has no memory")
        asked = replace(cfg, study=replace(cfg.study, text=text or cfg.study.text))
        found = look_into_memory(asked, corpus, built, reader)
        if kind not in found:
            raise ConfigError(f"gates: the memory in {run} has no gate")
        answer = found[kind]
    answer = {"run": str(run), "kind": kind, **answer}
    write_json(Path(out) if out else Path(run) / f"eval-{kind}.json", answer)
    return answer


def open_run(run: str) -> tuple[TrainConfig, Corpus, Built, WindowReader]:
    """Configuration, data, trained model and reader of a run folder. Raises ConfigError when it holds no run."""
    path = Path(run) / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        cfg: TrainConfig = from_dict(AdaptConfig if "model" in data else TrainConfig, data)
    except OSError as error:
        raise ConfigError(f"run: {run} holds no run ({path.name}: {error.strerror or error})") from error
    state = snapshots.read_state(run)
    if state is None:
        raise ConfigError(f"run: {run} holds no checkpoint")
    corpus = open_prepared(cfg.data, cfg.seed, state["data"])
    if isinstance(cfg, AdaptConfig):
        model = load_model(cfg)
        built = Built(model, put_into(cfg, model, corpus.tokenizer))
        snapshots.load(run, saved_part(cfg, built))
    else:
        built = assemble(cfg, corpus.vocab_size, corpus.tokenizer)
        snapshots.load(run, built.model)
    reader = corpus.reader()
    reader.load_state(state["reader"])
    return cfg, corpus, built, reader
