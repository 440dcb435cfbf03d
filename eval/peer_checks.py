"""Correctness rows of `engram bench --peers`: the same computations asked of both sides, each green or red.

A check gets a `Kit`, which puts memory into a tiny Llama, and gives back a `Verdict`. The memory is filled as after
training: rows, value projections and convolution taps are drawn. The judge is always something that does not go the
checked way: the forward of the whole text without a cache, the single prompt, the search without a cache, integers.
Checks of decoding are computed twice, with the convolution and without, since one may be right and the other not.

Shapes: B batch, T time, C columns, M memory width, W row width.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engram import families
from engram.caches import CACHE_NAMES, cache_in
from engram.eval.peer_sides import PAD, Shape, Side, bare_model

CHECKED = Shape(64, 32, 2, 2, 64, (0, 1), (2, 3), heads=2, head_dim=8, rows=211)
TOLERANCE = 1e-5
"""Of the largest logit, fp32: what sums in another order differ by."""
TOUCHES = 1000
NEW_TOKENS = 24


@dataclass(frozen=True)
class Verdict:
    """Whether a check holds (None: the side offers no way to ask it), and what was found, in one line."""

    ok: bool | None
    found: str


class NotOffered(Exception):
    """A side has no way to express a check."""


@dataclass(frozen=True)
class Kit:
    """Makes the side that is checked."""

    side: type[Side]
    shape: Shape = CHECKED

    def fresh(self) -> Side:
        """Memory just attached."""
        return self.side(bare_model(self.shape), self.shape)

    def filled(self, taps: bool = True) -> Side:
        """Memory as after training; without `taps` its convolution is zero.

        Raises RuntimeError when it does not change the logits: every check would hold.
        """
        side = self.fresh()
        side.fill(taps)
        ids_BT = self.ids()
        if float((side.logits(ids_BT) - self.bare_logits(ids_BT)).abs().max()) < 0.01:
            raise RuntimeError(f"peers: the filled memory of {self.side.name} does not change the logits")
        return side

    def ids(self, batch: int = 2, length: int = 16, seed: int = 0) -> Tensor:
        """Token ids [B, T] without padding."""
        draw = torch.Generator().manual_seed(seed)
        return torch.randint(PAD + 2, self.shape.vocab_size, (batch, length), generator=draw)

    def bare_logits(self, ids_BT: Tensor, **kwargs: Any) -> Tensor:
        """Logits of the Llama without memory."""
        with torch.no_grad():
            found: Tensor = bare_model(self.shape)(input_ids=ids_BT, use_cache=False, **kwargs).logits
        return found


def run_checks(side: type[Side]) -> dict[str, dict[str, Any]]:
    """Name of the check -> verdict as plain data. What a check raises is a red verdict with the error's first line."""
    return {name: asdict(_verdict(check, Kit(side))) for name, check in CHECKS.items()}


def _verdict(check: Callable[[Kit], Verdict], kit: Kit) -> Verdict:
    try:
        return check(kit)
    except NotOffered as why:
        return Verdict(None, str(why))
    except Exception as error:
        return Verdict(False, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")


def _same(found: Tensor, judge: Tensor) -> tuple[bool, str]:
    """Logits against the judge's: equal up to rounding, and the largest difference."""
    error, scale = float((found - judge).abs().max()), float(judge.abs().max())
    return error <= TOLERANCE * max(1.0, scale), f"{error:.1e}"


def _decoding(check: Callable[[Kit, Side], tuple[bool, str]]) -> Callable[[Kit], Verdict]:
    """A check of decoding, with the convolution and without: the verdict is that of the whole memory."""

    def both(kit: Kit) -> Verdict:
        (ok, whole), (_, without) = (check(kit, kit.filled(taps)) for taps in (True, False))
        return Verdict(ok, f"{whole} ({without} without convolution)")

    return both


def fresh_is_silent(kit: Kit) -> Verdict:
    """A memory just attached leaves the logits bit-equal."""
    ids_BT = kit.ids()
    error = float((kit.fresh().logits(ids_BT) - kit.bare_logits(ids_BT)).abs().max())
    return Verdict(error == 0, f"largest difference {error:.1e}")


def rows_of_the_demo(kit: Kit) -> Verdict:
    """Row numbers are those that the paper's demo prints for a few canonical ids (engram/golden.json)."""
    facts = families.golden()["deepseek-demo"]
    pairs = [
        (kit.side.demo_rows(facts, layer)[0], torch.tensor(facts["by_layer"][str(layer)]["rows"]))
        for layer in facts["layers"]
    ]
    equal = sum(int((found_TC == judge_TC).sum()) for found_TC, judge_TC in pairs)
    every = sum(judge_TC.numel() for _, judge_TC in pairs)
    return Verdict(equal == every, f"{equal} of {every} row numbers")


def _cached_greedy(kit: Kit, side: Side) -> tuple[bool, str]:
    ids_BT = kit.ids(batch=1, length=9)
    out = side.generate(ids_BT, max_new_tokens=NEW_TOKENS)
    judge_BTV = side.logits(out.sequences)[:, ids_BT.shape[1] - 1 : -1]
    return _same(torch.stack(out.logits, dim=1), judge_BTV)


def _chunked_prompt(kit: Kit, side: Side) -> tuple[bool, str]:
    ids_BT, cache, pieces = kit.ids(), None, []
    name = next(name for name in CACHE_NAMES if name in inspect.signature(side.base.forward).parameters)
    for piece_BT in ids_BT.split([5, 4, 1, 6], dim=1):
        with torch.no_grad():
            out = side.model(input_ids=piece_BT, use_cache=True, **{name: cache})
        cache = cache_in(out)
        pieces.append(out.logits)
    return _same(torch.cat(pieces, dim=1), side.logits(ids_BT))


def _left_padded(kit: Kit, side: Side) -> tuple[bool, str]:
    lengths, longest = (5, 9, 12), 12
    prompts = [kit.ids(1, length, seed=length) for length in lengths]
    pads = [torch.full((1, longest - length), PAD) for length in lengths]
    ids_BT = torch.cat([torch.cat([pad, ids], dim=1) for pad, ids in zip(pads, prompts, strict=True)])
    mask_BT = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    positions_BT = (mask_BT.cumsum(-1) - 1).clamp_min(0)
    batch_BTV = side.logits(ids_BT, attention_mask=mask_BT.long(), position_ids=positions_BT)
    judge_BTV = torch.cat([side.logits(ids_1T)[0] for ids_1T in prompts])
    return _same(batch_BTV[mask_BT], judge_BTV)


def _beams(kit: Kit, side: Side) -> tuple[bool, str]:
    wanted = {"max_new_tokens": 16, "num_beams": 4, "num_return_sequences": 4, "output_scores": True}
    ids_BT = kit.ids(batch=2, length=9)
    found, judge = (side.generate(ids_BT, use_cache=use_cache, **wanted) for use_cache in (True, False))
    if found.sequences.shape != judge.sequences.shape:
        return False, "other lengths"
    equal = int((found.sequences == judge.sequences).all(dim=1).sum())
    close, error = _same(found.sequences_scores, judge.sequences_scores)
    return equal == len(judge.sequences) and close, f"{equal} of {len(judge.sequences)} beams, scores {error}"


def _assisted(kit: Kit, side: Side) -> tuple[bool, str]:
    ids_BT, draft = kit.ids(batch=1, length=9), bare_model(kit.shape)
    judge = side.generate(ids_BT, max_new_tokens=NEW_TOKENS, use_cache=False).sequences
    found = side.generate(ids_BT, max_new_tokens=NEW_TOKENS, assistant_model=draft).sequences
    shorter = min(found.shape[1], judge.shape[1])
    differing = (found[0, :shorter] != judge[0, :shorter]).nonzero()
    if not len(differing) and found.shape == judge.shape:
        return True, f"all {NEW_TOKENS} tokens"
    first = int(differing[0]) if len(differing) else shorter
    return False, f"the first {first - ids_BT.shape[1]} of {NEW_TOKENS} tokens"


def packed_do_not_leak(kit: Kit) -> Verdict:
    """The second of two packed documents computes as if it were alone.

    Packed as transformers isolates documents in attention: positions restart, no mask, no cache. Raises RuntimeError
    when the Llama without memory leaks, which would judge nothing.
    """
    first_BT, second_BT = kit.ids(1, 8, seed=1), kit.ids(1, 8, seed=2)
    ids_BT, positions_BT = torch.cat([first_BT, second_BT], dim=1), torch.arange(8).repeat(2)[None]
    host, _ = _same(kit.bare_logits(ids_BT, position_ids=positions_BT)[:, 8:], kit.bare_logits(second_BT))
    if not host:
        raise RuntimeError("peers: packed documents leak in the Llama itself")
    side = kit.filled()
    ok, error = _same(side.logits(ids_BT, position_ids=positions_BT)[:, 8:], side.logits(second_BT))
    return Verdict(ok, f"largest difference {error}")


def saved_is_loaded(kit: Kit) -> Verdict:
    """Saved, and loaded into another plain Llama: logits and every value of every table bit-equal."""
    side, ids_BT = kit.filled(), kit.ids()
    with tempfile.TemporaryDirectory() as folder:
        side.save(Path(folder) / "saved")
        again = kit.side.load(bare_model(kit.shape), kit.shape, Path(folder) / "saved")
        logits = torch.equal(again.logits(ids_BT), side.logits(ids_BT))
        rows = all(torch.equal(again.values(layer), side.values(layer)) for layer in kit.shape.layers)
    return Verdict(logits and rows, f"logits {_equal(logits)}, rows {_equal(rows)}")


def _equal(equal: bool) -> str:
    return "bit-equal" if equal else "differ"


def missing_rows_are_refused(kit: Kit) -> Verdict:
    """A saved memory whose largest file is gone is not loaded: an error, and no memory with rows of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "saved"
        kit.filled().save(folder)
        max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size).unlink()
        try:
            kit.side.load(bare_model(kit.shape), kit.shape, folder)
        except (OSError, ValueError, RuntimeError) as error:
            return Verdict(True, f"{type(error).__name__}")
    return Verdict(False, "loaded without its rows")


def cast_keeps_rows(kit: Kit) -> Verdict:
    """After `.to(torch.bfloat16)` the same rows are read."""
    side, ids_BT = kit.filled(), kit.ids()
    side.logits(ids_BT)
    before = {layer: rows_BTC.clone() for layer, rows_BTC in side.rows_read().items()}
    side.network.to(torch.bfloat16)
    side.logits(ids_BT)
    after = side.rows_read()
    equal = sum(int((after[layer] == rows_BTC).sum()) for layer, rows_BTC in before.items())
    every = sum(rows_BTC.numel() for rows_BTC in before.values())
    return Verdict(equal == every > 0, f"{equal} of {every} row numbers")


def sums_are_exact(kit: Kit) -> Verdict:
    """The gradient of a row that one batch looks up 1,000 times is the sum; of small integers, so it is exact in fp32.

    Judged by int64 sums.
    """
    side, shape = kit.filled(), kit.shape
    layer, columns, width = shape.layers[0], shape.columns, shape.head_dim
    rows_BTC = side.hash(kit.ids(1, 8))[layer][:, -1:].expand(1, TOUCHES, columns)
    draw = torch.Generator().manual_seed(3)
    upstream_BTM = torch.randint(-8, 9, (1, TOUCHES, columns * width), generator=draw)
    ids_U, sums_UW = side.row_gradient(layer, rows_BTC, upstream_BTM.float())
    judge_UW = upstream_BTM.sum(dim=(0, 1)).view(columns, width)
    order = rows_BTC[0, 0].argsort()
    same_rows = torch.equal(ids_U, rows_BTC[0, 0][order])
    exact = same_rows and torch.equal(sums_UW, judge_UW[order].float())
    return Verdict(exact, f"{len(ids_U)} rows of {TOUCHES} gradients, {'exact' if exact else 'not the sums'}")


def untouched_rows_stay(kit: Kit) -> Verdict:
    """Two training steps: each leaves every row bit-equal that its batch does not look up, and moves those it does."""
    side, layer = kit.filled(), kit.shape.layers[0]
    step = side.stepper(lr=1e-2)
    wrongly = moved = touched = 0
    for seed in (5, 6):
        ids_BT, before_RW = kit.ids(2, 12, seed), side.values(layer)
        step(side.batch(ids_BT))
        changed_R = (side.values(layer) != before_RW).any(dim=1)
        read_BTC = side.rows_read()[layer]
        changed, learning = _numbers(changed_R.nonzero()), _numbers(read_BTC[:, :-1])  # no loss at the last position
        wrongly += len(changed - _numbers(read_BTC))
        moved, touched = moved + len(changed & learning), touched + len(learning)
    return Verdict(wrongly == 0 and moved == touched, f"{moved} of {touched} rows that learn moved, {wrongly} others")


def _numbers(ids: Tensor) -> set[int]:
    return set(ids.flatten().tolist())


CHECKS: dict[str, Callable[[Kit], Verdict]] = {
    "row numbers are those of the paper's demo": rows_of_the_demo,
    "freshly attached, the logits are unchanged": fresh_is_silent,
    "cached greedy generation is the full forward": _decoding(_cached_greedy),
    "a prompt read in pieces is the full forward": _decoding(_chunked_prompt),
    "a left-padded batch is its single prompts": _decoding(_left_padded),
    "beam search is beam search without a cache": _decoding(_beams),
    "assisted decoding is greedy decoding": _decoding(_assisted),
    "packed documents do not leak": packed_do_not_leak,
    "saved and loaded, bit-equal": saved_is_loaded,
    "saved, a file is lost: loading is an error": missing_rows_are_refused,
    "cast to bf16, the same rows": cast_keeps_rows,
    "a row touched 1,000 times gets the exact sum": sums_are_exact,
    "a step leaves other rows as they are": untouched_rows_stay,
}
"""What is claimed -> its check."""
