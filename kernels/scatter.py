"""The backward and the update of rows: sort once, sum the gradients of each row, move the row in place.

    unique_U, sums_UW, first_U = sum_duplicates(ids_n, grads_nW)
    update_rows(table, v_R, ids_U, sums_UW, rule)                  # rows and their state change in place
    scatter_update(table, v_R, ids_n, grads_nW, rule)              # both at once; the host waits for nothing

No gradient of the table's size is made. The order of every sum is fixed, so the result is the same bits in every run:
one program owns a row and adds its gradients in the order of their occurrence, in tiles of four; the part of a segment
(one row's occurrences) beyond its first multiple of SPLIT places is added up by other programs first, so that a bigram
that fills the batch does not keep one program busy while the others wait. An atomic sum exists as an option
(`sum_atomic`): fp32, its order and so its last bits differ from run to run.

bf16 rows are rounded stochastically with the bits of kernels/reference_rows.py's `round_stochastic`. The table may lie
in pinned host memory, whose rows are then read and written over the link.

Shapes: n looked-up rows (with duplicates), U distinct rows, R rows of the table, W row width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engram.kernels.launch import INTERPRETED, NO_FUSION, at_most, check_count, on, power_of_two, tl, triton
from engram.kernels.reference_rows import GAMMA, MIX_1, MIX_2, RULES, Rule, rounding_key

SPLIT = 256  # places of a segment that one program adds up itself
REGISTERS = 64  # of the row kernel, at most: left alone, ptxas aims at 40 and spills on sm_80
ROWS = 4  # gradients that are in flight at once
SUM = 0  # RULE of the kernel: 0 sums only, else 1 + the place in RULES
_GAMMA, _M1, _M2 = tl.constexpr(GAMMA), tl.constexpr(MIX_1), tl.constexpr(MIX_2)


@triton.jit
def mix64(x):
    """splitmix64's output function on int64 (kernels/reference_rows.py: `mix64`)."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _M1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _M2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def add_up(first, last, order, grads, w, W: tl.constexpr, ROWS: tl.constexpr, SUMMED: tl.constexpr):
    """The sum of gradients at places first..last-1 of the sorted look-ups, fp32 [BLOCK_W]."""
    total = w * 0.0
    at = first
    while at < last:
        place = at + tl.arange(0, ROWS)
        live = place < last
        if SUMMED:
            source = place.to(tl.int64)
        else:
            source = tl.load(order + place, mask=live, other=0)
        reads = live[:, None] & (w < W)[None, :]
        values = tl.load(grads + source[:, None] * W + w[None, :], mask=reads, other=0.0).to(tl.float32)
        total += tl.sum(values, axis=0)
        at += ROWS
    return total


@triton.jit
def partial_kernel(
    order,
    number,
    starts,
    grads,
    partial,
    total,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Sums of places b * SPLIT.. that belong to a long segment which began before them -> partial[b]."""
    block = tl.program_id(0)
    first = block * SPLIT
    u = tl.load(number + first)
    start = tl.load(starts + u)
    end = tl.load(starts + u + 1)
    if (start < first) & (end - start > SPLIT):
        w = tl.arange(0, BLOCK_W)
        last = tl.minimum(end, first + SPLIT)
        value = add_up(first, last, order, grads, w, W, ROWS, False)
        tl.store(partial + block.to(tl.int64) * W + w, value, mask=w < W)


@triton.jit
def rows_kernel(
    table,
    v,
    ids,
    order,
    starts,
    grads,
    partial,
    rows,
    count,
    total,
    lr,
    beta2,
    eps,
    keep,
    key,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    RULE: tl.constexpr,
    SUMMED: tl.constexpr,
    ROUND: tl.constexpr,
):
    """One row a step: its update in `table` and `v`, or with RULE 0 the sum of its gradients, into line u of `table`.

    ids are sorted and may repeat; starts[u] is the place where distinct row u of at most `count` begins, `total` for
    those that do not exist. SUMMED: ids are distinct and grads their sums.
    """
    u = tl.program_id(0)
    w = tl.arange(0, BLOCK_W)
    while u < count:
        if SUMMED:
            start = u
            end = u + 1
        else:
            start = tl.load(starts + u)
            end = tl.load(starts + u + 1)
        if start < total:
            own = end
            if SUMMED == 0:
                border = (start // SPLIT + 1) * SPLIT
                if end - start > SPLIT:
                    own = tl.minimum(end, border)
            grad = add_up(start, own, order, grads, w, W, ROWS, SUMMED)
            if SUMMED == 0:
                block = own // SPLIT
                while block * SPLIT < tl.where(own < end, end, 0):
                    grad += tl.load(partial + block.to(tl.int64) * W + w, mask=w < W, other=0.0)
                    block += 1
            if RULE == 0:
                tl.store(table + u.to(tl.int64) * W + w, grad, mask=w < W)
            else:
                row = tl.load(ids + start)
                held = (row >= 0) & (row < rows)  # others are not written: a kernel cannot raise
                lanes = row + w * 0  # a block: Triton 3.9 takes no scalar in a block's mask
                inside = (w < W) & (lanes >= 0) & (lanes < rows)
                at = table + row * W + w
                value = tl.load(at, mask=inside, other=0.0).to(tl.float32) * keep
                if RULE == 3:
                    value -= lr * grad
                else:
                    square = tl.sum(grad * grad, axis=0) / W
                    before = tl.load(v + row, mask=held, other=0.0)
                    if RULE == 1:
                        after = tl.where(before == 0.0, square, beta2 * before + (1.0 - beta2) * square)
                    else:
                        after = before + square
                    tl.store(v + row, after, mask=held)
                    value -= lr * grad / (tl.sqrt(after) + eps)
                if ROUND:
                    word = mix64(mix64(key + (row + 1) * _GAMMA) + (w // 4 + 1).to(tl.int64) * _GAMMA)
                    random = ((word >> ((w % 4) * 16).to(tl.int64)) & 0xFFFF).to(tl.int32)
                    bits = (value.to(tl.int32, bitcast=True) + random) & -65536
                    value = tl.where(value == value, bits.to(tl.float32, bitcast=True), value)  # NaN would be -0
                tl.store(at, value.to(table.dtype.element_ty), mask=inside)
        u += tl.num_programs(0)


@triton.jit
def atomic_kernel(number, grads, sums, total, W: tl.constexpr, BLOCK_W: tl.constexpr, ROWS: tl.constexpr):
    """Adds gradient i to sums[number[i]], in no fixed order."""
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = place < total
    w = tl.arange(0, BLOCK_W)
    to = tl.load(number + place, mask=live, other=0)
    reads = live[:, None] & (w < W)[None, :]
    source = place.to(tl.int64)[:, None] * W + w[None, :]
    values = tl.load(grads + source, mask=reads, other=0.0).to(tl.float32)
    tl.atomic_add(sums + to[:, None] * W + w[None, :], values, mask=reads, sem="relaxed")


@dataclass(frozen=True)
class Segments:
    """Sorted look-ups: ids_n ascending, order_n where each came from, number_n the distinct row it belongs to.

    starts  [n + 1] the place where each distinct row begins; n for those that do not exist.
    """

    ids_n: Tensor
    order_n: Tensor
    number_n: Tensor
    starts: Tensor


def segments(ids_n: Tensor) -> Segments:
    """Sort look-ups once; nothing here waits for the GPU."""
    count = len(ids_n)
    sorted_n, order_n = torch.sort(ids_n, stable=True)
    head_n = torch.ones_like(sorted_n, dtype=torch.bool)
    head_n[1:] = sorted_n[1:] != sorted_n[:-1]
    number_n = head_n.cumsum(0) - 1
    starts = torch.full((count + 1,), count, dtype=torch.int64, device=ids_n.device)
    place_n = torch.arange(count, device=ids_n.device)
    starts.scatter_(0, torch.where(head_n, number_n, count), torch.where(head_n, place_n, count))
    return Segments(sorted_n, order_n, number_n, starts)


def layout(width: int) -> dict[str, int]:
    """Compile-time block and warps for rows of `width` values: a whole row is in registers, for its mean square."""
    block = power_of_two(width)
    return {"BLOCK_W": block, "num_warps": min(16, max(1, block // 128))}


def _partial(found: Segments, grads_nW: Tensor) -> Tensor:
    """Sums of the blocks of long segments that are not their first; other lines are left as they are."""
    count, width = grads_nW.shape
    partial = torch.empty(-(-count // SPLIT), width, device=grads_nW.device)
    with on(grads_nW):
        partial_kernel[(len(partial),)](
            found.order_n,
            found.number_n,
            found.starts,
            grads_nW,
            partial,
            total=count,
            W=width,
            ROWS=ROWS,
            SPLIT=SPLIT,
            **layout(width),
            **NO_FUSION,
        )
    return partial


def _launch(
    found: Segments, grads: Tensor, table: Tensor, v: Tensor, count: int, rule: Rule | None, summed: bool = False
) -> None:
    """Start the row kernel for up to `count` distinct rows; `table` takes the sums where there is no rule."""
    if not count:
        return
    partial = table if summed or len(grads) <= SPLIT else _partial(found, grads)
    how = rule or Rule("sgd", lr=0.0)
    with on(grads):
        rows_kernel[(min(count, 64) if INTERPRETED else count,)](
            table,
            v,
            found.ids_n,
            found.order_n,
            found.starts,
            grads,
            partial,
            rows=len(table),
            count=count,
            total=len(grads),
            lr=how.lr,
            beta2=how.beta2,
            eps=how.eps,
            keep=how.keep,
            key=rounding_key(how.seed, how.step),
            W=grads.shape[1],
            ROWS=1 if summed else ROWS,
            SPLIT=SPLIT,
            RULE=SUM if rule is None else 1 + RULES.index(rule.name),
            SUMMED=summed,
            ROUND=table.dtype == torch.bfloat16,
            **layout(grads.shape[1]),
            **NO_FUSION,
            **at_most(REGISTERS),
        )


def sum_duplicates(ids_n: Tensor, grads_nW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See kernels/reference.py; sums are fp32. Waits for the GPU once, to know the number of distinct rows."""
    check_count("rows", len(ids_n))
    if not len(ids_n):
        return ids_n, grads_nW.float(), ids_n
    found = segments(ids_n)
    distinct = int(found.number_n[-1]) + 1
    sums_UW = torch.empty(distinct, grads_nW.shape[1], device=grads_nW.device)
    _launch(found, grads_nW.contiguous(), sums_UW, sums_UW, distinct, None)
    first_U = found.starts[:distinct]
    return found.ids_n[first_U], sums_UW, found.order_n[first_U]


def scatter_update(table: Tensor, v_R: Tensor, ids_n: Tensor, grads_nW: Tensor, rule: Rule) -> None:
    """Sum the gradients of each looked-up row and move it, in place; the host waits for nothing.

    table  [R, W] fp32 or bf16 (rounded stochastically), on the GPU or in pinned host memory; v_R fp32, the rows' state.
    Gradients of row numbers outside the table go nowhere.
    """
    check_count("rows", len(ids_n))
    _launch(segments(ids_n), grads_nW.contiguous(), table, v_R, len(ids_n), rule)


def update_rows(table: Tensor, v_R: Tensor, ids_U: Tensor, grads_UW: Tensor, rule: Rule) -> None:
    """Move distinct rows by their summed gradients, in place; see `scatter_update`."""
    check_count("rows", len(ids_U))
    found = Segments(ids_U.contiguous(), ids_U, ids_U, ids_U)
    _launch(found, grads_UW.contiguous(), table, v_R, len(ids_U), rule, summed=True)


def sum_atomic(number_n: Tensor, grads_nW: Tensor, distinct: int) -> Tensor:
    """Gradients [n, W] and the distinct row each belongs to -> fp32 sums [U, W]; not the same bits in every run."""
    sums_UW = torch.zeros(distinct, grads_nW.shape[1], device=grads_nW.device)
    count, width = grads_nW.shape
    if count:
        rows = power_of_two(min(count, (1 << 18) // power_of_two(width))) if INTERPRETED else 16
        with on(grads_nW):
            atomic_kernel[(triton.cdiv(count, rows),)](
                number_n, grads_nW.contiguous(), sums_UW, count, W=width, ROWS=rows, **layout(width), **NO_FUSION
            )
    return sums_UW
