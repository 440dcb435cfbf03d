"""Texts of a few words and the data configuration for them, for the tests of data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from engram.train.data import DataConfig

WORDS = "memory table row gate hash token value key model layer seed prime order head bucket norm".split()  # noqa: SIM905


def small_texts(count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, size=int(rng.integers(5, 60)))) + f".\nend {i}\n" for i in range(count)]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": t, "id": i}) + "\n" for i, t in enumerate(texts)), encoding="utf-8")
    return path


def small_config(folder: Path, **changes: Any) -> DataConfig:
    plain = {"vocab_size": 300, "seq_len": 16, "batch_size": 4, "holdout": 0.2, "validation_tokens": 256}
    return DataConfig(**{**plain, "cache_dir": str(folder / "cache"), **changes})
