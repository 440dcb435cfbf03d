"""Windows of ids to row numbers in one kernel: every rule of kernels/reference_rows.py, for all layers at once.

    rows_GBTC = hash_rows(ids_BT, constants)

One lane computes one look-up: it reads its window of at most N ids, closes it at the start of the text, padding, end of
text, image spans and packed documents, multiplies, combines, and takes the remainder. Eager torch starts about 39
kernels for the same and is bound by their launches. All products are 64-bit and wrap as torch's do.

The remainder by a constant divisor is x - size * mulhi(x, floor(2^64 / size)), less one size where that is too large:
exact for 0 <= x < 2^63 and size < 2^31, and about half the instructions of `%`, which is a call. Otherwise `%` is used,
made non-negative: as on the GPU it truncates, torch's floors.

Shapes: see kernels/reference_rows.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engram.kernels.launch import INTERPRETED, NO_FUSION, check_count, on, power_of_two, tl, triton
from engram.kernels.reference_rows import HashConstants

BLOCK = 128  # look-ups a program: one a thread; two take more registers and spill on sm_90
WARPS = 4


@triton.jit
def row_numbers(
    n,
    live,
    ids,
    class_of,
    pad,
    dead,
    segment,
    eos,
    multipliers,
    sizes,
    reciprocals,
    offsets,
    per_group,
    length,
    skip,
    limit,
    filler,
    longest,
    C: tl.constexpr,
    N: tl.constexpr,
    E: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_PAD: tl.constexpr,
    HAS_DEAD: tl.constexpr,
    HAS_SEGMENT: tl.constexpr,
    XOR: tl.constexpr,
    NARROW: tl.constexpr,
    RECIPROCAL: tl.constexpr,
):
    """Look-ups n (int32, in the order G, B, T, C) -> row numbers int64, and whether their id was outside (no padding).

    longest = N, as an argument that is not known when the kernel is compiled.
    """
    within = n % per_group
    column = (n // per_group) * C + within % C
    token = within // C
    kept = length - skip
    t = token % kept + skip
    at = (token // kept).to(tl.int64) * length + t
    token_id = tl.load(ids + at, mask=live, other=0).to(tl.int64)
    outside = live & ((token_id < 0) | (token_id >= limit))
    unblocked = live
    if HAS_PAD:
        padded = tl.load(pad + at, mask=live, other=0) != 0
        outside = outside & (padded == 0)
    if HAS_DEAD:
        unblocked = unblocked & (tl.load(dead + at, mask=live, other=0) == 0)
    if HAS_SEGMENT:
        mine = tl.load(segment + at, mask=live, other=0)
    real = unblocked & (token_id >= 0) & (token_id < limit)
    if HAS_PAD:
        real = real & (padded == 0)
    mix = at * 0
    s = 0
    while s < longest:  # a loop of unknown length: unrolled, it would hold the loads of all slots in registers
        if HAS_MAP:
            token_id = tl.load(class_of + token_id, mask=real, other=0)
        product = tl.where(real, token_id, filler) * tl.load(multipliers + column * N + s, mask=live, other=0)
        if NARROW:
            product = product.to(tl.int32).to(tl.int64)
        if XOR:
            mix = mix ^ product
        else:
            mix = mix + product
        s += 1
        there = at - s
        unblocked = unblocked & (t >= s)
        token_id = tl.load(ids + there, mask=unblocked, other=0).to(tl.int64)
        if HAS_PAD:
            unblocked = unblocked & (tl.load(pad + there, mask=unblocked, other=1) == 0)
        if HAS_DEAD:
            unblocked = unblocked & (tl.load(dead + there, mask=unblocked, other=1) == 0)
        if HAS_SEGMENT:
            unblocked = unblocked & (tl.load(segment + there, mask=unblocked, other=0) == mine)
        for e in tl.static_range(E):
            unblocked = unblocked & (token_id != tl.load(eos + e))
        real = unblocked & (token_id >= 0) & (token_id < limit)
    size = tl.load(sizes + column, mask=live, other=1)
    if RECIPROCAL:
        reciprocal = tl.load(reciprocals + column, mask=live, other=0)
        quotient = tl.umulhi(mix.to(tl.uint64), reciprocal.to(tl.uint64)).to(tl.int64)
        rest = mix - quotient * size
        rest = tl.where(rest >= size, rest - size, rest)
    else:
        rest = mix % size
        rest = tl.where(rest < 0, rest + size, rest)
    return rest + tl.load(offsets + column, mask=live, other=0), outside


@triton.jit
def hash_rows_kernel(
    out,
    masked,
    ids,
    class_of,
    pad,
    dead,
    segment,
    eos,
    multipliers,
    sizes,
    reciprocals,
    offsets,
    total,
    per_group,
    length,
    skip,
    limit,
    filler,
    longest,
    C: tl.constexpr,
    N: tl.constexpr,
    E: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_PAD: tl.constexpr,
    HAS_DEAD: tl.constexpr,
    HAS_SEGMENT: tl.constexpr,
    XOR: tl.constexpr,
    NARROW: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row numbers of `total` look-ups; ids outside the vocabulary are counted once a token in `masked`."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = n < total
    # fmt: off
    row, outside = row_numbers(
        n, live, ids, class_of, pad, dead, segment, eos, multipliers, sizes, reciprocals, offsets,
        per_group, length, skip, limit, filler, longest,
        C, N, E, HAS_MAP, HAS_PAD, HAS_DEAD, HAS_SEGMENT, XOR, NARROW, RECIPROCAL,
    )
    # fmt: on
    tl.store(out + n.to(tl.int64), row, mask=live)
    if COUNT:
        once = outside & (n % C == 0) & (n < per_group)
        count = tl.sum(once.to(tl.int64), axis=0)
        if count > 0:
            tl.atomic_add(masked, count)


def pointers(
    ids_BT: Tensor,
    constants: HashConstants,
    pad_BT: Tensor | None,
    dead_BT: Tensor | None,
    segment_BT: Tensor | None,
) -> dict[str, Any]:
    """Tensor arguments of the hashing kernels by name; what is absent is stood in for by a tensor that is not read."""
    ids_BT = ids_BT.contiguous()
    given = {
        "ids": ids_BT,
        "class_of": ids_BT if constants.class_of is None else constants.class_of,
        "pad": ids_BT if pad_BT is None else _bytes(pad_BT),
        "dead": ids_BT if dead_BT is None else _bytes(dead_BT),
        "segment": ids_BT if segment_BT is None else segment_BT,
        "eos": constants.eos_E if len(constants.eos_E) else constants.sizes_K,
        "multipliers": constants.multipliers_KN,
        "sizes": constants.sizes_K,
        "reciprocals": constants.reciprocals_K,
        "offsets": constants.offsets_K,
    }
    return {name: tensor.contiguous() for name, tensor in given.items()}


def switches(
    constants: HashConstants, pad_BT: Tensor | None, dead_BT: Tensor | None, segment_BT: Tensor | None
) -> dict[str, Any]:
    """Compile-time arguments of the hashing kernels by name."""
    return {
        "C": constants.columns,
        "N": constants.orders[-1],
        "E": len(constants.eos_E),
        "HAS_MAP": constants.class_of is not None,
        "HAS_PAD": pad_BT is not None,
        "HAS_DEAD": dead_BT is not None,
        "HAS_SEGMENT": segment_BT is not None,
        "XOR": constants.xor,
        "NARROW": constants.narrow,
        "RECIPROCAL": constants.exact_reciprocal,
    }


def _bytes(flags_BT: Tensor) -> Tensor:
    return flags_BT.view(torch.uint8)


def hash_rows(
    ids_BT: Tensor,
    constants: HashConstants,
    pad_BT: Tensor | None = None,
    dead_BT: Tensor | None = None,
    segment_BT: Tensor | None = None,
    skip: int = 0,
    masked: Tensor | None = None,
) -> Tensor:
    """See kernels/reference_rows.py. Raises ValueError for 2^30 look-ups and more."""
    batch, length = ids_BT.shape
    shape = (constants.groups, batch, length - skip, constants.columns)
    out = torch.empty(shape, dtype=torch.int64, device=ids_BT.device)
    check_count("ids", out.numel())
    if not out.numel():
        return out
    block = power_of_two(min(out.numel(), 1 << 15)) if INTERPRETED else BLOCK
    with on(ids_BT):
        hash_rows_kernel[(triton.cdiv(out.numel(), block),)](
            out,
            out if masked is None else masked,
            **pointers(ids_BT, constants, pad_BT, dead_BT, segment_BT),
            total=out.numel(),
            per_group=out.numel() // constants.groups,
            length=length,
            skip=skip,
            limit=constants.limit,
            filler=constants.filler,
            longest=constants.orders[-1],
            **switches(constants, pad_BT, dead_BT, segment_BT),
            COUNT=masked is not None,
            BLOCK=block,
            num_warps=WARPS,
            **NO_FUSION,
        )
    return out
