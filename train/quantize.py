"""Store the rows of a trained run in fewer bits, and say what that costs: `engram quantize RUN --format fp8_e4m3`.

    engram quantize runs/smoke-0 --format lut3 --out runs/smoke-0/lut3

Writes one row file a layer, which a memory with `placement: disk`, this `path` and this `row_dtype` reads. The report
has the error of each row (relative RMS: its quantiles) and the held-out loss before and after, from the file written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from engram.eval.loss import held_out_loss
from engram.eval.report import write_json
from engram.hashing import NgramHash
from engram.prefetch import Fetcher
from engram.stores import DeferredDiskStore
from engram.stores.formats import FORMATS, get_format, relative_errors
from engram.strict import ConfigError, choice, require
from engram.table import Table
from engram.train.evaluate import open_run

CHUNK = 65_536
"""Rows converted at a time."""
QUANTILES = (0.05, 0.5, 0.95, 1.0)


def convert_run(run: str, format: str, out: str | None = None) -> dict[str, Any]:
    """A finished run and a row format -> report; row files and quantized.json in `out` (default RUN/<format>).

    Raises ConfigError for an unknown format, a run without memory, or a folder that holds row files already.
    """
    choice("format", format, tuple(FORMATS))
    _, corpus, built, _ = open_run(run)
    if built.handle is None:
        raise ConfigError(f"run: the model in {run} has no memory")
    folder = Path(out) if out else Path(run) / format
    before = held_out_loss(built.model, corpus.validation_batches())
    layers = {}
    for module in built.handle.memory.modules_by_layer():
        layers[str(module.layer)] = _convert(module.table, module.hash, format, folder)
    after = held_out_loss(built.model, corpus.validation_batches())
    built.handle.memory.close()
    report = {
        "run": str(run),
        "format": format,
        "out": str(folder),
        "layers": layers,
        "loss_before": before.nats,
        "loss_after": after.nats,
        "difference": after.nats - before.nats,
        "tokens": after.tokens,
    }
    write_json(folder / "quantized.json", report)
    return report


def _convert(table: Table, ngram_hash: NgramHash, format: str, folder: Path) -> dict[str, Any]:
    """Write one table in `format` and put the file in its place -> what it costs, as plain data."""
    spec, codec = table.store.spec, get_format(format, table.store.spec.width)
    path = folder / f"layer-{table.layer}.safetensors"
    store = DeferredDiskStore(path, spec, ngram_hash.identity, format=format)
    require(not store.exists(), f"out: {path} exists; choose another folder")
    errors = []
    for start in range(0, spec.rows, CHUNK):
        ids = torch.arange(start, min(start + CHUNK, spec.rows))
        values = table.stored(ids)  # the scale stays with the run's state, which also has the projections
        store.update(ids, values)
        errors.append(relative_errors(values, codec))
    store.commit_checkpoint(store.prepare_checkpoint())
    held = table.store.bytes_held()
    table.close()
    del table.store
    table.trainable = False
    table.store, table.fetcher = store, Fetcher(store, f"memory layer {table.layer}")
    known = torch.cat(errors)
    known = known[known.isfinite()]  # a row of zeros has no relative error
    return {
        "rows": spec.rows,
        "row_bytes": codec.row_bytes,
        "bits_per_value": 8 * codec.row_bytes / spec.width,
        "bytes_before": sum(held.values()),
        "bytes_after": spec.rows * codec.row_bytes,
        "error": {f"q{100 * q:g}": float(known.quantile(q)) for q in QUANTILES} if len(known) else None,
    }
