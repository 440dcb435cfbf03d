"""N-grams of a text or of a stream of ids, as the hash sees them, and the rows they address.

    counts = count_ngrams(memory.layer(1).hash, batches)[2]       # distinct n-grams of one order
    rows_U = column_rows(memory.layer(1).hash, counts.windows_Uo, column=0)

Everything is read off the hash itself (its windows and its rows), so boundaries, fillers and token maps are the
memory's own. Two n-grams that map to the same classes are one n-gram here. Memory is proportional to the distinct
n-grams of the stream, never to the table.

Shapes: B batch, T time, N longest n-gram, o one order, C columns, P positions, U distinct n-grams.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.hashing import NgramHash
from engram.window import segments_from_positions

Batch = Mapping[str, Tensor]

BUFFER = 2**20
"""Positions collected before they are merged into the distinct n-grams: one sort a million positions."""

BLANK = "∅"
"""Shown for a slot that holds the filler: before the text, past a boundary, or an id outside the vocabulary."""


@dataclass(frozen=True)
class NgramCounts:
    """Distinct n-grams of one order in a token stream.

    windows_Uo  their classes, int64, newest first, as the hash sees them.
    counts_U    how often each occurred, int64.
    """

    order: int
    classes: int
    windows_Uo: np.ndarray
    counts_U: np.ndarray

    def of(self, windows_PN: np.ndarray) -> np.ndarray:
        """Windows of classes [P, N >= order] -> how often each position's n-gram occurred in the stream, int64 [P]."""
        known = len(self.windows_Uo)
        both = np.concatenate([self.windows_Uo, windows_PN[:, : self.order]])
        _, group, _ = _distinct(both, np.ones(len(both), dtype=np.int64), self.classes)
        counts = np.zeros(int(group.max(initial=-1)) + 1, dtype=np.int64)
        counts[group[:known]] = self.counts_U
        return counts[group[known:]]


def addresses(ngram_hash: NgramHash, ids: Sequence[int]) -> tuple[list[list[int | None]], Tensor, Tensor]:
    """T ids of one document -> their look-back slots [T][N] as ids, newest first, windows [T, N], rows [T, C].

    A slot is None where the filler stands.
    """
    ids_BT = torch.tensor([list(ids)], dtype=torch.int64, device=ngram_hash.sizes.device)
    with uncounted(ngram_hash):
        window_TN = ngram_hash.window(ids_BT)[0]
        rows_TC = ngram_hash.rows_of_window(window_TN[None])[0]
    slots_TN = [
        [None if value == ngram_hash.filler else ids[position - back] for back, value in enumerate(window)]
        for position, window in enumerate(window_TN.tolist())
    ]
    return slots_TN, window_TN, rows_TC


def count_ngrams(
    ngram_hash: NgramHash, batches: Iterable[Batch], max_tokens: int | None = None
) -> dict[int, NgramCounts]:
    """Batches with `input_ids` [B, T] and, if packed, `position_ids` -> order -> distinct n-grams with their counts.

    Stops after `max_tokens` positions. Raises ValueError when there is no position at all.
    """
    orders = ngram_hash.cfg.orders
    found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for window_PN in _buffers(windows_of(ngram_hash, batches, max_tokens)):
        for order in orders:
            windows_Po, ones_P = window_PN[:, :order], np.ones(len(window_PN), dtype=np.int64)
            if order in found:
                windows_Po = np.concatenate([found[order][0], windows_Po])
                ones_P = np.concatenate([found[order][1], ones_P])
            first_U, _, counts_U = _distinct(windows_Po, ones_P, ngram_hash.classes)
            found[order] = (windows_Po[first_U], counts_U)
    if not found:
        raise ValueError("batches: no token to count n-grams of")
    return {order: NgramCounts(order, ngram_hash.classes, *found[order]) for order in orders}


def windows_of(ngram_hash: NgramHash, batches: Iterable[Batch], max_tokens: int | None = None) -> Iterator[np.ndarray]:
    """Batches -> their windows of classes, one int64 array [B * T, N] a batch, at most `max_tokens` positions."""
    left = max_tokens
    for batch in batches:
        if left is not None and left <= 0:
            return
        positions = batch.get("position_ids")
        segments = None if positions is None else segments_from_positions(positions)
        with uncounted(ngram_hash):
            window_BTN = ngram_hash.window(batch["input_ids"], segment_ids=segments)
        window_PN = window_BTN.flatten(0, 1).cpu().numpy()[:left]
        if left is not None:
            left -= len(window_PN)
        if len(window_PN):
            yield window_PN


def encode(tokenizer: Any, text: str | Sequence[int]) -> list[int]:
    """Text -> ids through a transformers or a tokenizers tokenizer, no special tokens added; ids pass through.

    Raises ValueError when nothing comes out.
    """
    coded = tokenizer.encode(text, add_special_tokens=False) if isinstance(text, str) else text
    ids = [int(token) for token in getattr(coded, "ids", coded)]
    if not ids:
        raise ValueError(f"text: {text!r} has no tokens")
    return ids


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Ids -> text, special tokens kept."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))


@contextmanager
def uncounted(ngram_hash: NgramHash) -> Iterator[None]:
    """The hash counts the ids it masks for the run's statistics; looking at it must not add to them."""
    before: Tensor = ngram_hash.masked.clone()
    try:
        yield
    finally:
        ngram_hash.masked.copy_(before)


def columns_of(ngram_hash: NgramHash) -> list[dict[str, int]]:
    """Each column's index, order, head, table size and offset."""
    sizes, offsets, heads = ngram_hash.sizes.tolist(), ngram_hash.offsets.tolist(), ngram_hash.cfg.heads
    return [
        {
            "index": c,
            "order": ngram_hash.cfg.orders[c // heads],
            "head": c % heads,
            "size": sizes[c],
            "offset": offsets[c],
        }
        for c in range(len(sizes))
    ]


def column_rows(ngram_hash: NgramHash, windows_Uo: np.ndarray, column: int) -> np.ndarray:
    """Rows of one column, offset taken off. Slots past the order do not enter it, so any class fills them."""
    parts = []
    for start in range(0, len(windows_Uo), BUFFER):
        part = windows_Uo[start : start + BUFFER]
        window_PN = np.zeros((len(part), ngram_hash.cfg.max_order), dtype=np.int64)
        window_PN[:, : part.shape[1]] = part
        rows_BTC = ngram_hash.rows_of_window(torch.from_numpy(window_PN)[None].to(ngram_hash.sizes.device))
        parts.append((rows_BTC[0, :, column] - ngram_hash.offsets[column]).cpu().numpy())
    return np.concatenate(parts)


def _buffers(arrays: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    held: list[np.ndarray] = []
    size = 0
    for array in arrays:
        held.append(array)
        size += len(array)
        if size >= BUFFER:
            yield np.concatenate(held)
            held, size = [], 0
    if held:
        yield np.concatenate(held)


def _distinct(windows_Po: np.ndarray, weights_P: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Windows [P, o] -> (position of each distinct one [U], group of each position [P], summed weights [U])."""
    key_P, bound = windows_Po[:, 0].astype(np.int64), classes
    for slot_P in windows_Po.T[1:]:
        if bound * classes >= 2**63:  # ranks instead of values: exact for any order and vocabulary
            key_P = np.unique(key_P, return_inverse=True)[1].astype(np.int64)
            bound = int(key_P.max(initial=0)) + 1
        key_P = key_P * classes + slot_P
        bound *= classes
    _, first_U, group_P = np.unique(key_P, return_index=True, return_inverse=True)
    sums_U = np.zeros(len(first_U), dtype=np.int64)
    np.add.at(sums_U, group_P, weights_P)
    return first_U, group_P, sums_U


def ngram_text(tokenizer: Any, slots: Sequence[int | None]) -> str:
    """Ids newest first, None where the filler stands -> text, oldest first; ids side by side are decoded together."""
    text = ""
    run: list[int] = []
    for token in reversed(slots):
        if token is None:
            text, run = text + (decode(tokenizer, run) if run else "") + BLANK, []
        else:
            run.append(token)
    return text + (decode(tokenizer, run) if run else "")


def first_id(ngram_hash: NgramHash, value: int) -> int:
    """The first raw id of a class; the class itself where raw ids are hashed."""
    if ngram_hash.token_map is None:
        return value
    return int((ngram_hash.token_map.map == value).nonzero()[0])
