"""Where the memory's rows come from: n-grams of a text with their rows, and how a token stream uses a table.

    text_rows(handle.memory.layer(1).hash, tokenizer, "The quick brown fox")
    row_usage(handle.memory.layer(1).hash, batches, tokenizer)

Everything is read off the hash itself (its windows and its rows), so boundaries, fillers and token maps are the
memory's own. Two n-grams that map to the same classes are one n-gram here; two that share a row are a collision. Memory
is proportional to the distinct n-grams of the stream, never to the table.

Shapes: B batch, T time, N longest n-gram, o one order, C columns, P positions, U distinct n-grams.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from engram.eval.loss import Batch
from engram.hashing import NgramHash
from engram.lookup import (
    BLANK,
    NgramCounts,
    addresses,
    column_rows,
    columns_of,
    count_ngrams,
    decode,
    encode,
    first_id,
    ngram_text,
    windows_of,
)

__all__ = [
    "BLANK",
    "HeadUsage",
    "NgramCounts",
    "RowUsage",
    "count_ngrams",
    "decode",
    "encode",
    "row_usage",
    "text_rows",
    "windows_of",
]


@dataclass(frozen=True)
class HeadUsage:
    """How one column's table of `size` rows was used.

    reads          tokens that read it.
    touched        distinct rows read; `share` = touched / size.
    expected       share an ideal hash would touch with as many distinct n-grams, 1 - (1 - 1/size)^ngrams.
    ngrams         distinct n-grams read.
    most_ngrams    most distinct n-grams on one row.
    collided       share of the distinct n-grams that share their row with another one.
    collided_reads share of the reads that hit such a row.
    heaviest       share of the reads on the most read row.
    top            the most read rows: row (offset included), reads, distinct n-grams, and the commonest of them.
    """

    order: int
    head: int
    size: int
    reads: int
    touched: int
    share: float
    expected: float
    ngrams: int
    most_ngrams: int
    collided: float
    collided_reads: float
    heaviest: float
    top: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class RowUsage:
    """How a token stream used the rows of one layer: totals over all its tables, then one entry a column."""

    layer: int
    tokens: int
    rows: int
    touched: int
    share: float
    heads: tuple[HeadUsage, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {**asdict(self), "heads": [asdict(head) for head in self.heads]}


def text_rows(ngram_hash: NgramHash, tokenizer: Any, text: str | Sequence[int]) -> dict[str, Any]:
    """A text (or its T ids) -> for each position its token, its n-gram of each order as text, and its C row numbers.

    Returns plain data: `layer`, `ids` [T], `tokens` [T], `columns` [C] of order, head, size and offset, `ngrams`
    {order: [T]}, `rows` [T][C] with head offsets included. The text is one document that starts at its first token.
    Raises ValueError for a text without tokens.
    """
    ids = encode(tokenizer, text)
    slots_TN, _, rows_TC = addresses(ngram_hash, ids)
    return {
        "layer": ngram_hash.layer,
        "ids": ids,
        "tokens": [decode(tokenizer, [token]) for token in ids],
        "columns": columns_of(ngram_hash),
        "ngrams": {str(o): [ngram_text(tokenizer, slots[:o]) for slots in slots_TN] for o in ngram_hash.cfg.orders},
        "rows": rows_TC.tolist(),
    }


def row_usage(
    ngram_hash: NgramHash,
    batches: Iterable[Batch],
    tokenizer: Any = None,
    *,
    top: int = 5,
    max_tokens: int | None = 2_000_000,
) -> RowUsage:
    """Hash and batches -> share of rows touched, load, collisions and the `top` most read rows of each column.

    With a tokenizer the n-grams of the top rows are text, without one lists of classes, oldest first.
    """
    counts = count_ngrams(ngram_hash, batches, max_tokens)
    offsets = ngram_hash.offsets.tolist()
    heads = []
    for column in columns_of(ngram_hash):
        ngrams = counts[column["order"]]
        rows_U = column_rows(ngram_hash, ngrams.windows_Uo, column["index"])
        row_R, group_U, ngrams_R = np.unique(rows_U, return_inverse=True, return_counts=True)
        reads_R = np.bincount(group_U, weights=ngrams.counts_U, minlength=len(row_R)).astype(np.int64)
        reads, shared_R = int(reads_R.sum()), ngrams_R > 1
        best_R = np.lexsort((row_R, -reads_R))[:top]
        heads.append(
            HeadUsage(
                order=column["order"],
                head=column["head"],
                size=column["size"],
                reads=reads,
                touched=len(row_R),
                share=len(row_R) / column["size"],
                expected=float(-np.expm1(len(rows_U) * np.log1p(-1 / column["size"]))) if column["size"] > 1 else 1.0,
                ngrams=len(rows_U),
                most_ngrams=int(ngrams_R.max()),
                collided=float(ngrams_R[shared_R].sum() / len(rows_U)),
                collided_reads=float(reads_R[shared_R].sum() / reads),
                heaviest=float(reads_R.max() / reads),
                top=[
                    {
                        "row": int(row_R[r]) + offsets[column["index"]],
                        "reads": int(reads_R[r]),
                        "ngrams": int(ngrams_R[r]),
                        "examples": _examples(ngram_hash, tokenizer, ngrams, np.flatnonzero(group_U == r)),
                    }
                    for r in best_R.tolist()
                ],
            )
        )
    touched, total = sum(head.touched for head in heads), sum(head.size for head in heads)
    return RowUsage(ngram_hash.layer, heads[0].reads, total, touched, touched / total, tuple(heads))


# ---- internals ----


def _examples(ngram_hash: NgramHash, tokenizer: Any, ngrams: NgramCounts, members_U: np.ndarray) -> list[Any]:
    """The three commonest n-grams of a row, oldest token first, each with its count."""
    best = members_U[np.argsort(-ngrams.counts_U[members_U], kind="stable")][:3]
    out = []
    for index in best.tolist():
        classes = ngrams.windows_Uo[index].tolist()
        text: Any = classes[::-1]
        if tokenizer is not None:
            raw = [None if value == ngram_hash.filler else first_id(ngram_hash, value) for value in classes]
            text = ngram_text(tokenizer, raw)
        out.append([text, int(ngrams.counts_U[index])])
    return out
