"""What a memory has to remember between two forwards of the same texts, so that decoding is the same function.

    state = memory.new_state()                       # in a model of one's own; inside a host the cache carries it
    memory.start(ids_BT, state=state)                # the first tokens, or the next ones
    x_BTD = x_BTD + memory(layer, x_BTD)

Two things: the ids so far, of which the hash looks back over the last N - 1, and for every layer with a convolution its
inputs so far, of which it looks back over the last (K - 1) * N. Both are kept whole as long as the host can roll its
own cache back by any number of tokens, and else (sliding windows past their size, recurrent layers) only as far as the
next forward looks, unless the host records its past to be rolled back.

What a forward adds is taken up at the next question, so that a recomputation inside its backward still sees the state
that it began with.

Shapes: B batch, T new positions, L positions so far, N longest n-gram, K taps, S residual streams, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

BLOCKED = -1
"""Padding in the ids so far; NgramHash takes negative ids of a history as blocked slots."""


class Columns:
    """A growing tensor [B, L, ...] in pieces whose lengths grow like powers of two: a column is copied log L times."""

    def __init__(self) -> None:
        self.pieces: list[Tensor] = []

    def __len__(self) -> int:
        return sum(piece.shape[1] for piece in self.pieces)

    def add(self, new_BT: Tensor) -> None:
        """Append columns."""
        self.pieces.append(new_BT)
        while len(self.pieces) > 1 and self.pieces[-1].shape[1] >= self.pieces[-2].shape[1]:
            last = self.pieces.pop()
            self.pieces[-1] = torch.cat([self.pieces[-1], last], dim=1)

    def last(self, count: int) -> list[Tensor]:
        """The last `count` columns, or all there are, in pieces."""
        found: list[Tensor] = []
        for piece in reversed(self.pieces):
            if count <= 0:
                break
            found.insert(0, piece[:, -count:])
            count -= piece.shape[1]
        return found

    def keep(self, count: int) -> None:
        """Forget all but the last `count` columns."""
        if len(self) > count:
            kept = self.last(count)
            self.pieces = [torch.cat(kept, dim=1)] if kept else []

    def drop(self, count: int) -> None:
        """Forget the last `count` columns."""
        while count > 0:
            piece = self.pieces.pop()
            if piece.shape[1] > count:
                self.pieces.append(piece[:, : piece.shape[1] - count])
            count -= piece.shape[1]

    def change(self, call: Callable[[Tensor], Tensor]) -> None:
        """Every piece through `call`, which may change the batch."""
        self.pieces = [call(piece) for piece in self.pieces]


class DecodeState:
    """The ids and convolution inputs of one batch of texts so far.

    owner  number of the memory that it belongs to (`Memory.number`).
    ids, taps   how many ids the hash, and how many columns the convolution of each layer looks back; 0 is none.
    free   whether the host can roll its cache back by any number of tokens; set by whoever knows.
    recording   whether everything is kept because somebody will roll back.
    """

    def __init__(self, owner: str, ids: int, taps: int) -> None:
        self.owner, self.ids, self.taps = owner, ids, taps
        self.free, self.recording = True, False
        self.reset()

    def reset(self) -> None:
        """Forget every text."""
        self.length = 0
        self._ids = Columns()
        self._inputs: dict[int, Columns] = {}
        self._new_ids: Tensor | None = None
        self._new: dict[int, Tensor] = {}

    @torch.compiler.disable
    def begin(self, ids_BT: Tensor, layers: tuple[int, ...]) -> None:
        """The forward of `ids_BT` (blocked ones negative) begins; each of `layers` will `put` its inputs."""
        self._new_ids = ids_BT
        self._inputs = self._inputs or {layer: Columns() for layer in layers}
        self._new = {}

    @torch.compiler.disable
    def before(self, layer: int, x_BTSD: Tensor) -> Tensor:
        """Inputs [B, taps, S, D] of the convolution before those of this forward, zeros where there are none."""
        pieces = self._inputs[layer].last(self.taps)
        missing = self.taps - sum(piece.shape[1] for piece in pieces)
        if missing:
            batch, _, *rest = x_BTSD.shape
            pieces.insert(0, x_BTSD.new_zeros(batch, missing, *rest))
        return pieces[0] if len(pieces) == 1 else torch.cat([piece.to(x_BTSD) for piece in pieces], dim=1)

    @torch.compiler.disable
    def put(self, layer: int, x_BTSD: Tensor) -> None:
        """The convolution's inputs of this forward. A recomputation puts them again."""
        # on a GPU the graph of a compiled step writes its outputs anew each time it runs
        self._new[layer] = x_BTSD.clone() if x_BTSD.is_cuda else x_BTSD

    @torch.compiler.disable
    def history(self, batch: int) -> Tensor | None:
        """The last ids [B, N - 1], blocked slots before the text; None at the beginning.

        Raises ValueError for another batch size.
        """
        self.settle()
        if not self.length:
            return None
        if not self.ids:  # unigrams alone: nothing is looked back at
            return None
        last_BL = torch.cat(self._ids.last(self.ids), dim=1)
        if len(last_BL) != batch:
            raise ValueError(f"ids: a batch of {batch} continues a cache of {len(last_BL)} texts")
        missing = self.ids - last_BL.shape[1]
        if missing:
            last_BL = torch.cat([last_BL.new_full((batch, missing), BLOCKED), last_BL], dim=1)
        return last_BL

    def settle(self) -> None:
        """Take up what the last forward added. Raises RuntimeError when it never reached one of its layers."""
        if self._new_ids is None:
            return
        missing = sorted(set(self._inputs) - set(self._new))
        if missing:
            raise RuntimeError(
                f"memory: the forward before this one did not reach layer(s) {missing}, so its cache is incomplete; "
                f"begin with a new cache"
            )
        self._ids.add(self._new_ids)
        self.length += self._new_ids.shape[1]
        for layer, new_BTSD in self._new.items():
            self._inputs[layer].add(new_BTSD)
        self._new_ids, self._new = None, {}
        self._trim()

    def crop(self, count: int) -> None:
        """Take the last `count` positions back. Raises RuntimeError when their past was not kept."""
        self.settle()
        count = min(count, self.length)
        for columns in self._all():
            kept = len(columns)
            wanted = self.ids if columns is self._ids else self.taps
            if kept < self.length and kept - count < wanted:
                raise RuntimeError(
                    f"memory: {count} tokens cannot be taken back, the past of only {kept - wanted} is there; call "
                    f"cache.activate_past_recording() before the forwards that are to be taken back"
                )
        for columns in self._all():
            columns.drop(count)
        self.length -= count
        self._trim(rolled_back=True)

    def change(self, call: Callable[[Tensor], Tensor]) -> None:
        """Reorder, repeat or select texts: `call` changes the first dimension."""
        self.settle()
        for columns in self._all():
            columns.change(call)

    def _all(self) -> Iterator[Columns]:
        yield self._ids
        yield from self._inputs.values()

    def _trim(self, rolled_back: bool = False) -> None:
        """Forget what no forward and no rolling back will ask for; ids are few bytes, and follow the same rule."""
        if self.free or (self.recording and not rolled_back):
            return
        self._ids.keep(self.ids)
        for columns in self._inputs.values():
            columns.keep(self.taps)
