"""Rows as objects of study and editing: which rows an n-gram reads, who else reads them, and what stands in them.

    for address in handle.rows_for("The quick brown fox", tokenizer=tok, corpus=ids):
        print(address.text, address.rows, address.shared)
    edit = handle.edit((17, 4), value, layer=1)            # the rows of this bigram; edit.old undoes it
    handle.export_rows("bigrams", [(17, 4), (4, 9)])       # bigrams.safetensors and bigrams.json

An n-gram is what the hash sees: ids that a token map puts into one class are the same, and rows are shared with every
other n-gram that hashes to them. Edits go the way of the optimizer's updates, so rows fetched ahead are patched.

Shapes: T positions, N longest n-gram, o one order, C columns, H heads of one order, W row width, U distinct n-grams.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.config import ConfigError
from engram.hashing import NgramHash
from engram.layer import Engram
from engram.lookup import Batch, addresses, column_rows, count_ngrams, encode, first_id, ngram_text
from engram.memory import Memory
from engram.saving import replace_text
from engram.stores.formats import get_format
from engram.stores.tensors import Stream, write_tensors
from engram.strict import to_dict

MOST = 20
"""Other n-grams that are listed for a row, the commonest first."""


@dataclass(frozen=True)
class Ngram:
    """An n-gram of a corpus: ids, oldest first (None: the filler; else the first id of the class), and its count."""

    ids: tuple[int | None, ...]
    count: int
    text: str | None = None


@dataclass(frozen=True)
class Address:
    """What one position reads for one order.

    ids      the n-gram, oldest first; None where the filler stands (before the text, past a boundary, unknown ids).
    rows     its H row numbers, offsets included, one a head.
    shared   for each head the other n-grams of the corpus in that row (the commonest `most`), None without a corpus.
    sharing  for each head how many there are.
    """

    layer: int
    position: int
    order: int
    ids: tuple[int | None, ...]
    rows: tuple[int, ...]
    text: str | None = None
    shared: tuple[tuple[Ngram, ...], ...] | None = None
    sharing: tuple[int, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Edit:
    """What an edit did: `old` and `new` are the values [H, W] of the rows before and after it, as a forward reads them.

    changed  other n-grams of the corpus that read one of these rows (the commonest), None without a corpus.
    changes  how many there are.
    """

    layer: int
    order: int
    ids: tuple[int, ...]
    rows: tuple[int, ...]
    old: Tensor = field(repr=False)
    new: Tensor = field(repr=False)
    changed: tuple[Ngram, ...] | None = None
    changes: int | None = None


def rows_for(
    memory: Memory,
    text: str | Sequence[int] | Tensor,
    layer: int | None = None,
    corpus: Any = None,
    *,
    tokenizer: Any = None,
    most: int = MOST,
) -> list[Address]:
    """A text (with its tokenizer) or T ids -> for each layer, position and order the n-gram and its rows.

    layer   one layer; None is all of them.
    corpus  ids [T] or [B, T], a list of documents of ids, or a text: whose n-grams share the rows.
    The text is one document that starts at its first token. Raises ConfigError for a layer without memory, ValueError
    for a text without tokens or without a tokenizer, or ids that are none.
    """
    ids = _ids(text, tokenizer, "text")
    found = []
    for module in memory.modules_by_layer() if layer is None else [memory.layer(layer)]:
        hasher, heads = module.hash, module.cfg.heads
        slots_TN, window_TN, rows_TC = addresses(hasher, ids)
        others = None if corpus is None else _Corpus(hasher, corpus, tokenizer)
        windows, rows = window_TN.tolist(), rows_TC.tolist()
        for position in range(len(ids)):
            for index, order in enumerate(module.cfg.orders):
                first, slots = index * heads, slots_TN[position][:order]
                in_order = rows[position][first : first + heads]
                sharers = None
                if others is not None:
                    window = windows[position][:order]
                    sharers = [others.sharing(first + head, row, window) for head, row in enumerate(in_order)]
                address = Address(
                    layer=module.layer,
                    position=position,
                    order=order,
                    ids=tuple(slots[::-1]),
                    rows=tuple(in_order),
                    text=None if tokenizer is None else ngram_text(tokenizer, slots),
                    shared=None if others is None or sharers is None else tuple(others.shown(s, most) for s in sharers),
                    sharing=None if sharers is None else tuple(len(s.members_k) for s in sharers),
                )
                found.append(address)
    return found


def edit(
    memory: Memory,
    ngram: str | Sequence[int] | Tensor,
    value: Tensor,
    layer: int | None = None,
    *,
    corpus: Any = None,
    tokenizer: Any = None,
    most: int = MOST,
) -> Edit:
    """Write the rows that an n-gram reads in one layer -> what was there, and who else reads them.

    ngram  as many ids, oldest first, as one of the orders, or a text of as many tokens (with its tokenizer).
    value  the part of the memory vector that its order reads: [H * W], or a row for each head [H, W].
    layer  may be left out where there is only one.

    bf16 rows take the nearest value, fewer bits what their format holds; `new` is what is read afterwards. Writing
    `old` back gives the bits that were there (but for the last one where all rows have decayed: `table.scale` is not
    1). Rows of a file are flushed, but belong to the table's next checkpoint, as every update of them.
    Raises ConfigError for a layer without memory, ValueError, with nothing written, for an n-gram of another length or
    with ids that the hash does not see, values of another shape or that are no finite numbers; RuntimeError when the
    rows cannot be read or written.
    """
    module = _module(memory, layer)
    ids, window, first = _resolve(module, ngram, tokenizer)
    heads, width = module.cfg.heads, module.cfg.head_dim
    if not isinstance(value, Tensor) or tuple(value.shape) not in ((heads, width), (heads * width,)):
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"value: {shape}; an n-gram of order {len(ids)} reads {heads} rows of {width} values: give a tensor "
            f"[{heads}, {width}] or [{heads * width}]"
        )
    value_HW = value.detach().reshape(heads, width).to(torch.float32)
    others = None if corpus is None else _Corpus(module.hash, corpus, tokenizer)
    table, rows_H = module.table, _rows(module, window, first)
    codec = get_format(table.cfg.row_dtype, width)
    stored_HW = codec.decode(codec.encode(value_HW / table.scale))  # refuses what no row can hold
    if table.scale == 1:  # a bf16 table rounds at random, and fetches under way are patched before rows are rounded
        value_HW = stored_HW
    ids_H = rows_H.to(table.store.device)  # ascending, as a write wants them: each head has the next part of the table
    old_HW = table.read(ids_H).cpu().clone()
    table.write(ids_H, value_HW.to(table.store.device))
    table.flush()
    new_HW = table.read(ids_H).cpu().clone()
    rows, changed = rows_H.tolist(), None
    if others is not None:
        changed = others.together([others.sharing(first + head, row, window) for head, row in enumerate(rows)])
    return Edit(
        layer=module.layer,
        order=len(ids),
        ids=tuple(ids),
        rows=tuple(rows),
        old=old_HW,
        new=new_HW,
        changed=None if others is None or changed is None else others.shown(changed, most),
        changes=None if changed is None else len(changed.members_k),
    )


def export_rows(
    memory: Memory,
    path: str | Path,
    ngrams: Sequence[str | Sequence[int]],
    layer: int | None = None,
    *,
    tokenizer: Any = None,
) -> tuple[Path, Path]:
    """Values and row numbers of some n-grams -> `path`.safetensors and `path`.json, which replace what was there.

    The first holds, for each layer l and order o among them, "layer.l.order.o.values" fp32 [n, H, W] (as a forward
    reads them) and "layer.l.order.o.rows" int64 [n, H]; the second names each n-gram's place in them, the
    configuration, and the digest of the hash. Raises as `edit` does for the n-grams, OSError when a file cannot be
    written; the old files are then still there.
    """
    path = Path(path)
    path = path.with_suffix("") if path.suffix in (".safetensors", ".json") else path
    modules = memory.modules_by_layer() if layer is None else [memory.layer(layer)]
    values: dict[str, list[Tensor]] = {}
    entries = []
    for module in modules:
        for ngram in ngrams:
            ids, window, first = _resolve(module, ngram, tokenizer)
            rows_H = _rows(module, window, first)
            name = f"layer.{module.layer}.order.{len(ids)}"
            place = len(values.setdefault(f"{name}.rows", []))
            values[f"{name}.rows"].append(rows_H)
            values_HW = module.table.read(rows_H.to(module.table.store.device)).cpu().clone()
            values.setdefault(f"{name}.values", []).append(values_HW)
            text = None if tokenizer is None else ngram_text(tokenizer, list(ids[::-1]))
            about = {"layer": module.layer, "order": len(ids), "index": place, "ids": ids, "text": text}
            entries.append({**about, "rows": rows_H.tolist()})
    if not entries:
        raise ValueError("ngrams: the list is empty; give at least one n-gram")
    data, listing = path.with_name(f"{path.name}.safetensors"), path.with_name(f"{path.name}.json")
    aside = data.with_name(f"{data.name}.writing-{os.getpid()}")
    aside.unlink(missing_ok=True)
    try:
        write_tensors(aside, {name: Stream.of(torch.stack(held)) for name, held in values.items()}, {"format": "pt"})
        about = {
            "file": data.name,
            "config": to_dict(memory.cfg.replace(path=None)),
            "token_map_sha256": None if memory.token_map is None else memory.token_map.sha256,
            "identity": {str(module.layer): module.table.identity for module in modules},
            "ngrams": entries,
        }
        os.replace(aside, data)
    finally:
        aside.unlink(missing_ok=True)
    replace_text(listing, json.dumps(about, indent=1, ensure_ascii=False) + "\n")
    return data, listing


class EditsRows:
    """The part of a handle that looks rows up and changes them."""

    memory: Memory

    def rows_for(
        self, text: str | Sequence[int] | Tensor, layer: int | None = None, corpus: Any = None, **options: Any
    ) -> list[Address]:
        """N-grams of a text, their rows, and who shares them; see `engram.editing.rows_for`."""
        return rows_for(self.memory, text, layer, corpus, **options)

    def edit(
        self, ngram: str | Sequence[int] | Tensor, value: Tensor, layer: int | None = None, **options: Any
    ) -> Edit:
        """Write the rows that an n-gram reads; see `engram.editing.edit`."""
        return edit(self.memory, ngram, value, layer, **options)

    def export_rows(
        self, path: str | Path, ngrams: Sequence[str | Sequence[int]], layer: int | None = None, **options: Any
    ) -> tuple[Path, Path]:
        """Values of some n-grams into safetensors and JSON; see `engram.editing.export_rows`."""
        return export_rows(self.memory, path, ngrams, layer, **options)


# ---- internals ----


@dataclass(frozen=True)
class _Sharing:
    """N-grams of one order in a corpus, by their places among the distinct ones."""

    order: int
    members_k: np.ndarray


class _Corpus:
    """The distinct n-grams of a corpus by the rows that they read."""

    def __init__(self, ngram_hash: NgramHash, corpus: Any, tokenizer: Any) -> None:
        self.hash, self.tokenizer = ngram_hash, tokenizer
        self.counts = count_ngrams(ngram_hash, _batches(corpus, tokenizer))
        self._sorted: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def sharing(self, column: int, row: int, window: Sequence[int]) -> _Sharing:
        """N-grams in a row (offset included) of a column, but for the one of this window."""
        order = self.hash.cfg.orders[column // self.hash.cfg.heads]
        ngrams = self.counts[order]
        if column not in self._sorted:
            rows_U = column_rows(self.hash, ngrams.windows_Uo, column)
            by_row_U = np.argsort(rows_U, kind="stable")
            self._sorted[column] = (rows_U[by_row_U], by_row_U)
        rows_U, by_row_U = self._sorted[column]
        own = row - int(self.hash.offsets[column])
        members_k = by_row_U[np.searchsorted(rows_U, own) : np.searchsorted(rows_U, own, side="right")]
        other_k = (ngrams.windows_Uo[members_k] != np.asarray(window[:order])).any(axis=1)
        return _Sharing(order, members_k[other_k])

    def together(self, parts: Sequence[_Sharing]) -> _Sharing:
        """N-grams of one order in any of several rows."""
        return _Sharing(parts[0].order, np.unique(np.concatenate([part.members_k for part in parts])))

    def shown(self, sharing: _Sharing, most: int) -> tuple[Ngram, ...]:
        """The commonest of them, then those that came first."""
        ngrams, members_k = self.counts[sharing.order], sharing.members_k
        best_k = members_k[np.argsort(-ngrams.counts_U[members_k], kind="stable")][:most]
        return tuple(self._ngram(ngrams.windows_Uo[i].tolist(), int(ngrams.counts_U[i])) for i in best_k.tolist())

    def _ngram(self, window: list[int], count: int) -> Ngram:
        ids = [None if value == self.hash.filler else first_id(self.hash, value) for value in window]
        text = None if self.tokenizer is None else ngram_text(self.tokenizer, ids)
        return Ngram(tuple(ids[::-1]), count, text)


def _batches(corpus: Any, tokenizer: Any) -> Iterator[Batch]:
    """Documents of a corpus, each [B, T]."""
    if isinstance(corpus, Tensor) and corpus.ndim == 2:
        yield {"input_ids": corpus}
        return
    one = isinstance(corpus, (str, Tensor)) or (
        isinstance(corpus, Sequence) and all(isinstance(i, int) for i in corpus)
    )
    for document in [corpus] if one else corpus:
        yield {"input_ids": torch.tensor([_ids(document, tokenizer, "corpus")], dtype=torch.int64)}


def _ids(text: str | Sequence[int] | Tensor, tokenizer: Any, name: str) -> list[int]:
    """A text, a list or a tensor [T] (or [1, T]) -> ids. Raises ValueError."""
    if isinstance(text, str) and tokenizer is None:
        raise ValueError(f"{name}: {text[:40]!r} is text, which needs tokenizer=...; or give ids")
    if isinstance(text, Tensor):
        if text.is_floating_point() or text.dtype == torch.bool or text.numel() != text.shape[-1]:
            raise ValueError(f"{name}: {list(text.shape)} {text.dtype}; give integer ids [T]")
        text = text.reshape(-1).tolist()
    return encode(tokenizer, text)


def _module(memory: Memory, layer: int | None) -> Engram:
    if layer is None and len(memory.cfg.layers) > 1:
        raise ConfigError(f"layer: the memory has layers {list(memory.cfg.layers)}; say which one")
    return memory.layer(memory.cfg.layers[0] if layer is None else layer)


def _resolve(module: Engram, ngram: str | Sequence[int] | Tensor, tokenizer: Any) -> tuple[list[int], list[int], int]:
    """An n-gram -> its ids oldest first, its window of classes newest first, and the first column of its order."""
    ids, orders = _ids(ngram, tokenizer, "ngram"), module.cfg.orders
    if len(ids) not in orders:
        raise ValueError(f"ngram: {ids} has {len(ids)} ids; the orders of this memory are {list(orders)}")
    tmap = module.hash.token_map
    known = module.hash.vocab_size if tmap is None else len(tmap)
    strange = next((i for i in ids if not 0 <= i < known), None)
    if strange is not None:
        raise ValueError(f"ngram: id {strange} lies outside the vocabulary 0..{known - 1}")
    classes = ids if tmap is None else tmap.map[ids].tolist()
    window = addresses(module.hash, ids)[1][-1].tolist()[: len(ids)]
    if window[::-1] != classes:
        raise ValueError(
            f"ngram: {ids} is cut by an end of text (eos {list(module.cfg.eos)}): no position reads it whole"
        )
    return ids, window, orders.index(len(ids)) * module.cfg.heads


def _rows(module: Engram, window: Sequence[int], first: int) -> Tensor:
    """Window of classes, newest first -> its H row numbers on the CPU, offsets included."""
    windows_Uo = np.asarray([window], dtype=np.int64)
    columns = range(first, first + module.cfg.heads)
    offsets = module.hash.offsets.tolist()
    return torch.tensor([int(column_rows(module.hash, windows_Uo, column)[0]) + offsets[column] for column in columns])
