"""What a finished run is asked: held-out loss, the logit lens, gates, rows, and n-gram models of the same tokens.

    metrics = examine(cfg, corpus, built, reader)

Every answer is plain data in the shape of eval/report.py.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import numpy as np

from engram.eval import ngrams
from engram.eval.gates import gate_sample, gate_summary
from engram.eval.lens import logit_lens
from engram.eval.loss import held_out_loss
from engram.eval.report import write_json
from engram.eval.rows import count_ngrams, row_usage, text_rows
from engram.train.assembly import Built
from engram.train.data import Corpus
from engram.train.recipe import TrainConfig
from engram.train.windows import WindowReader, make_batch

CLEAR_MARGIN = 0.1
"""Nats by which a model must beat the trigram model of its own tokens; below it has learnt little more than n-grams."""
SAMPLE_TOKENS = 96


def examine(cfg: TrainConfig, corpus: Corpus, built: Built, reader: WindowReader) -> dict[str, Any]:
    """Metrics of a trained model, as plain data in the shape of eval/report.py."""
    loss = held_out_loss(built.model, corpus.validation_batches())
    metrics: dict[str, Any] = {"loss": loss.nats, "loss_tokens": loss.tokens, "tags": []}
    if cfg.study.ngrams:
        metrics["baselines"] = baselines(corpus, reader)
        if loss.nats > metrics["baselines"]["trigram"] - CLEAR_MARGIN:
            metrics["tags"].append("short-training")
    if cfg.study.lens_tokens:
        metrics["lens"] = logit_lens(built.model, corpus.validation_batches(), cfg.study.lens_tokens).to_dict()
    if built.handle is not None:
        metrics["memory_layers"] = list(built.handle.memory.cfg.layers)
        if cfg.study.gate_tokens:
            metrics.update(look_into_memory(cfg, corpus, built, reader))
    return metrics


def look_into_memory(cfg: TrainConfig, corpus: Corpus, built: Built, reader: WindowReader) -> dict[str, Any]:
    """Gates and rows of a memory over a sample text, and over the tokens it was trained on."""
    handle, limit = built.handle, cfg.study.gate_tokens
    assert handle is not None
    sample = cfg.study.text or sample_ids(corpus)
    first = handle.memory.layer(handle.memory.cfg.layers[0])
    seen = [make_batch(reader.consumed_windows()[: max(1, 1_000_000 // cfg.data.seq_len)], corpus.eot)]
    found: dict[str, Any] = {
        "rows": {
            "text": text_rows(first.hash, corpus.tokenizer, sample),
            "usage": [
                row_usage(handle.memory.layer(layer).hash, seen, corpus.tokenizer).to_dict()
                for layer in handle.memory.cfg.layers
            ],
        }
    }
    if handle.memory.cfg.gate != "none":
        counts = count_ngrams(first.hash, seen)
        summary = gate_summary(built.model, handle, corpus.validation_batches(), counts, limit)
        found["gates"] = {
            "sample": gate_sample(built.model, handle, corpus.tokenizer, sample, SAMPLE_TOKENS),
            "summary": summary["layers"],
        }
    return found


def sample_ids(corpus: Corpus, tokens: int = SAMPLE_TOKENS) -> list[int]:
    """The head of the held-out document of median length: real text that no model was trained on."""
    offsets = np.asarray(corpus.validation.offsets)
    lengths = np.diff(np.append(offsets, len(corpus.validation)) if offsets[-1] != len(corpus.validation) else offsets)
    middle = int(np.argsort(lengths, kind="stable")[len(lengths) // 2])
    start = int(offsets[middle])
    return [int(i) for i in corpus.validation.tokens[start : start + min(tokens, int(lengths[middle]))]]


def baselines(corpus: Corpus, reader: WindowReader) -> dict[str, float]:
    """Held-out loss of unigram and Kneser-Ney bigram and trigram models of exactly the tokens the run consumed.

    Every arm of a seed consumes the same tokens, so the answer is kept beside the token shards.
    """
    key = {"version": 1, "consumed": reader.consumed_sha256, "data": corpus.description["key"]}
    key["validation"] = corpus.description["validation_tokens"]
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = corpus.folder / f"ngrams-{name}.json"
    if path.is_file():
        return {str(k): float(v) for k, v in json.loads(path.read_text(encoding="utf-8")).items()}
    models = ngrams.fit(reader.consumed_windows(), corpus.vocab_size, corpus.eot)
    totals, count = {"unigram": 0.0, "bigram": 0.0, "trigram": 0.0}, 0
    for batch in corpus.validation_batches():
        size = batch["labels"].numel()
        losses = models.loss(batch["input_ids"], batch["labels"], batch["position_ids"])
        totals = {order: totals[order] + size * losses[order] for order in totals}
        count += size
    found = {order: total / count for order, total in totals.items()}
    try:
        write_json(path, found)
    except OSError as error:  # a shared cache that is read-only: only the next run's time is lost
        print(f"engram: n-gram losses are not cached ({error})", file=sys.stderr)
    return found
