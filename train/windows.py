"""Windows of a token stream: training batches in a seeded order, validation batches spread over all of the text.

Shapes: B batch, T = seq_len, U = T + 1 tokens of a window, N tokens of a stream, K windows.
A batch is {"input_ids", "labels", "position_ids"}, each int64 [B, T]: labels are the next tokens (already shifted),
position ids restart at 0 at the window's first token and at every EOT, which is how packed documents are told apart.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from engram.strict import require
from engram.train.tokens import TokenShards

Batch = dict[str, torch.Tensor]


def position_ids(ids_BT: np.ndarray, eot: int) -> np.ndarray:
    """int64 [B, T]: distance to the last EOT at or before each token, or to the start of the window."""
    at_T = np.arange(ids_BT.shape[1], dtype=np.int64)
    start_BT = np.where(ids_BT == eot, at_T, 0)
    return at_T - np.maximum.accumulate(start_BT, axis=1)


def make_batch(tokens_BU: np.ndarray, eot: int) -> Batch:
    """A batch of int64 tensors [B, T] from windows of T + 1 tokens."""
    tokens_BU = tokens_BU.astype(np.int64)
    ids_BT = tokens_BU[:, :-1]
    return {
        "input_ids": torch.from_numpy(ids_BT.copy()),
        "labels": torch.from_numpy(tokens_BU[:, 1:].copy()),
        "position_ids": torch.from_numpy(position_ids(ids_BT, eot)),
    }


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer; uint64 in and out."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permuted(index_K: np.ndarray, n: int, seed: int, epoch: int = 0) -> np.ndarray:
    """int64 [K]: where a seeded permutation of 0..n-1 sends these indices.

    Eight Feistel rounds keyed by splitmix64, walking the cycle until the value is below n. Integers only, so the
    order never depends on a library's version, and any index can be had without the others: a reader's state is one
    number, whatever the size of the corpus.
    """
    half = np.uint64(max(1, (max(n - 1, 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        key = _mix(np.array([seed % 2**64], dtype=np.uint64) + golden)
        key = _mix((key ^ np.uint64(epoch)) + golden)
        keys = _mix(key + golden * np.arange(1, 9, dtype=np.uint64))

        def cross(x: np.ndarray) -> np.ndarray:
            left, right = x >> half, x & mask
            for k in keys:
                left, right = right, left ^ (_mix(right ^ k) & mask)
            return (left << half) | right

        out = cross(np.asarray(index_K).astype(np.uint64))
        while (outside := np.flatnonzero(out >= np.uint64(n))).size:
            out[outside] = cross(out[outside])
    return out.astype(np.int64)


def _gather(tokens: np.ndarray, starts_K: np.ndarray, width: int) -> np.ndarray:
    return np.asarray(tokens[starts_K[:, None] + np.arange(width, dtype=np.int64)])


def validation_starts(total: int, seq_len: int, tokens: int) -> np.ndarray:
    """int64 [K]: starts of the validation windows, spread evenly over a stream of `total` tokens, none overlapping.

    K = tokens // seq_len, or as many as there are. Slices in stored order instead differed by 0.1 nats.
    Raises ConfigError if there is not one window.
    """
    available = (total - 1) // seq_len
    require(
        available >= 1,
        f"seq_len: {seq_len} needs {seq_len + 1} validation tokens, there are {total}; "
        "give more validation text, a larger holdout, or a smaller seq_len",
    )
    count = max(1, min(available, tokens // seq_len))
    if count == 1:
        return np.array([(total - 1 - seq_len) // 2], dtype=np.int64)
    return np.arange(count, dtype=np.int64) * (total - 1 - seq_len) // (count - 1)


def validation_batches(shards: TokenShards, seq_len: int, batch_size: int, tokens: int) -> Iterator[Batch]:
    """The same evenly spread windows each time, `tokens` predicted tokens in all; the last batch may be smaller."""
    starts = validation_starts(len(shards), seq_len, tokens)
    for first in range(0, len(starts), batch_size):
        yield make_batch(_gather(shards.tokens, starts[first : first + batch_size], seq_len + 1), shards.eot)


class WindowReader:
    """Training batches [B, T]: windows of T + 1 tokens (stride T) over all of `shards`, in a seeded order.

    The order of the windows depends on seed, seq_len and data alone, not on batch size, ranks or model. With
    `world_size` ranks, each step takes world_size * batch_size windows and each rank its share; `state()` is the same
    on all but for the digest. Incomplete last batches are dropped. Raises ConfigError if there is not one batch.
    """

    def __init__(
        self,
        shards: TokenShards,
        seq_len: int,
        batch_size: int,
        seed: int = 0,
        *,
        epochs: int = 1,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        require(0 <= rank < world_size, f"rank: {rank} must lie in 0..{world_size - 1}")
        for name, value in (("seq_len", seq_len), ("batch_size", batch_size), ("epochs", epochs)):
            require(value >= 1, f"{name}: {value} must be at least 1")
        self.shards, self.seq_len, self.batch_size, self.seed = shards, seq_len, batch_size, seed
        self.epochs, self.rank, self.world_size = epochs, rank, world_size
        self.windows = (len(shards) - 1) // seq_len
        """K, windows of one epoch."""
        step = batch_size * world_size
        require(
            self.windows * epochs >= step,
            f"source: {len(shards)} training tokens give {self.windows} windows of seq_len {seq_len}, fewer than one "
            f"batch of {step}; use more text, a smaller batch_size or a smaller seq_len",
        )
        self.cursor = 0
        """Windows consumed by all ranks together."""
        self.consumed_sha256 = hashlib.sha256(b"").hexdigest()
        """Chained digest of every token this rank has consumed, as int64 windows [B, U]."""
        self._ahead: np.ndarray | None = None
        self._epoch_said = 0

    def __len__(self) -> int:
        """Batches in all epochs together."""
        return self.windows * self.epochs // (self.batch_size * self.world_size)

    def __iter__(self) -> WindowReader:
        return self

    def __next__(self) -> Batch:
        """The next batch. Raises StopIteration when the epochs are used up."""
        tokens_BU = self._load()
        if tokens_BU is None:
            raise StopIteration
        self._ahead = None
        self.cursor += self.batch_size * self.world_size
        raw = np.ascontiguousarray(tokens_BU, dtype="<i8").tobytes()
        self.consumed_sha256 = hashlib.sha256(bytes.fromhex(self.consumed_sha256) + raw).hexdigest()
        epoch = (self.cursor - 1) // self.windows
        if epoch > self._epoch_said:
            self._epoch_said = epoch
            say(
                f"WARNING: the training data repeats: epoch {epoch + 1} of {self.epochs} begins "
                f"({self.windows} windows of {self.seq_len} tokens each); losses are no longer single-epoch"
            )
        return make_batch(tokens_BU, self.shards.eot)

    def peek(self) -> Batch | None:
        """The batch that `next` will give, without consuming it: `state()` does not change. None at the end."""
        tokens_BU = self._load()
        return None if tokens_BU is None else make_batch(tokens_BU, self.shards.eot)

    def consumed_windows(self) -> np.ndarray:
        """[K, U] the different windows consumed so far by all ranks, in order, in the shards' integer type."""
        return _gather(self.shards.tokens, self._starts(np.arange(min(self.cursor, self.windows))), self.seq_len + 1)

    def state(self) -> dict[str, Any]:
        """Plain JSON data from which `load_state` continues exactly."""
        return {
            "cursor": self.cursor,
            "consumed_sha256": self.consumed_sha256,
            "data_sha256": self.shards.sha256,
            "seq_len": self.seq_len,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "rank": self.rank,
            "world_size": self.world_size,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raises ConfigError if it belongs to other data or another order."""
        own = self.state()
        require(set(state) == set(own), f"reader state: expected the keys {sorted(own)}, got {sorted(state)}")
        for name in own.keys() - {"cursor", "consumed_sha256"}:
            require(
                state[name] == own[name],
                f"{name}: the saved reader state has {state[name]!r}, this run has {own[name]!r}; a resumed run must "
                "read the same data in the same order",
            )
        cursor = state["cursor"]
        require(isinstance(cursor, int) and cursor >= 0, f"reader state: cursor {cursor!r} is no number of windows")
        self.cursor, self.consumed_sha256, self._ahead = cursor, str(state["consumed_sha256"]), None
        self._epoch_said = max(0, (cursor - 1) // self.windows)

    def _starts(self, index_K: np.ndarray) -> np.ndarray:
        """First tokens of consecutive windows of the order, epochs one after another."""
        out = np.empty(len(index_K), dtype=np.int64)
        epoch_K = index_K // self.windows
        for epoch in np.unique(epoch_K):
            here = epoch_K == epoch
            out[here] = permuted(index_K[here] % self.windows, self.windows, self.seed, int(epoch))
        return out * self.seq_len

    def _load(self) -> np.ndarray | None:
        step = self.batch_size * self.world_size
        if self._ahead is None and self.cursor + step <= self.windows * self.epochs:
            index_B = self.cursor + self.rank * self.batch_size + np.arange(self.batch_size, dtype=np.int64)
            self._ahead = _gather(self.shards.tokens, self._starts(index_B), self.seq_len + 1)
        return self._ahead


def say(line: str) -> None:
    """Print one line about the data on standard error, where it cannot disturb `--json` output."""
    print(f"engram data: {line}", file=sys.stderr, flush=True)
