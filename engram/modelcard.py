"""The `README.md` that is written beside a saved memory: Hub metadata, and what the files hold, from real numbers only.

text = card_text(facts)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from engram.config import EngramConfig

MARK = "<!-- written by engram; delete this line to keep your own text -->"
"""A card with this line is replaced at the next save, any other README is left alone."""
TAGS = ("engram", "n-gram-memory", "conditional-memory")
INTRODUCTION = (
    "Token ids are hashed to row numbers, rows are fetched from a table, gated by the hidden state and added to it. "
    "This is the memory alone: hash constants, projections and rows, without the base model."
)


@dataclass(frozen=True)
class CardFacts:
    """What a card says.

    tables      (layer, rows, width, number of files, bytes of those) of each table.
    files       (name, bytes) of every other file.
    base_model  name on the Hub, None where it is not known; base_type is its `model_type`.
    """

    cfg: EngramConfig
    tables: Sequence[tuple[int, int, int, int, int]]
    files: Sequence[tuple[str, int]]
    dense_parameters: int
    vocab_size: int
    token_map_sha256: str | None = None
    base_model: str | None = None
    base_type: str | None = None


def card_text(facts: CardFacts) -> str:
    """The whole card, metadata first."""
    metadata: dict[str, Any] = {"library_name": "engram", "tags": list(TAGS)}
    if facts.base_model is not None:
        metadata["base_model"] = facts.base_model
    cfg, tables = facts.cfg, facts.tables
    base = f"`{facts.base_model}`" if facts.base_model is not None else "the base model"
    kind = f" (model type `{facts.base_type}`)" if facts.base_type is not None else ""
    rows, values = sum(table[1] for table in tables), sum(table[1] * table[2] for table in tables)
    ids = f"{facts.vocab_size:,} classes of a token map, sha256 `{facts.token_map_sha256}`"
    everything = len(facts.files) + sum(table[3] for table in tables)
    total = sum(size for _, size in facts.files) + sum(table[4] for table in tables)
    lines = [
        "---",
        yaml.safe_dump(metadata, sort_keys=False).strip(),
        "---",
        MARK,
        "",
        "# Engram memory",
        "",
        INTRODUCTION,
        "",
        "```python",
        "import engram",
        "",
        f"handle = engram.load(model, folder)  # model: {facts.base_model or facts.base_type or 'the base'}",
        "```",
        "",
        f"- Base: {base}{kind}, hidden width {cfg.hidden_size}.",
        f"- Decoder blocks with memory (0-based): {', '.join(map(str, cfg.layers))}.",
        f"- N-gram orders {', '.join(map(str, cfg.orders))}, {cfg.heads} heads each, rows of {cfg.head_dim} values.",
        f"- Hashed ids: {ids if facts.token_map_sha256 is not None else f'{facts.vocab_size:,} raw ids'}.",
        f"- {rows:,} rows, {values:,} values stored as {cfg.row_dtype}; {facts.dense_parameters:,} dense parameters.",
        "",
        "| what | files | size |",
        "| :-- | --: | --: |",
        *[f"| `{name}` | 1 | {size_text(size)} |" for name, size in facts.files],
        *[
            f"| layer {layer}: {count:,} rows of {width} values | {files} | {size_text(size)} |"
            for layer, count, width, files, size in tables
        ],
        f"| together | {everything} | {size_text(total)} |",
        "",
    ]
    return "\n".join(lines)


def may_write(path: Path) -> bool:
    """Whether there is no card at `path`, or one of ours."""
    return not path.exists() or MARK in path.read_text(encoding="utf-8", errors="replace")


def size_text(size: int) -> str:
    """Bytes as a person reads them: "12.3 MB" (powers of 1000, like the Hub)."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
