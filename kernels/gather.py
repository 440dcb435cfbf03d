"""Rows of a table by number, or straight from token ids: gather, decoding and concatenation in one kernel.

    values_nW = gather_rows(table, ids_n, PLAIN, width)                  # table on the GPU, or pinned host memory
    values_nW, rows_n = hash_gather(ids_BT, constants, table, PLAIN, width)

The table may be on the GPU, or in page-locked host memory, which the GPU reads in place (unified virtual addressing):
the kernel gets the host tensor's pointer. Rows are fp32, bf16 or fp16, or bytes of fp8, int8 or lut3 (their decoding is
that of kernels/reference_rows.py, bit for bit). Values come out as [n, W]: the C rows of a token lie side by side.

A tile is 8 KiB of fp32 values: two to four 16-byte loads a thread, which is what keeps a link or HBM busy. Programs
are persistent: each takes tiles in turn, so that a cap on their number (16 for a gather in the background: 128 KiB in
flight, enough for PCIe 5) leaves the other processors to the layers that compute. Addresses are 64-bit.

Shapes: see kernels/reference_rows.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engram.kernels import reference_rows
from engram.kernels.launch import (
    INTERPRETED,
    NO_FUSION,
    at_most,
    check_count,
    on,
    power_of_two,
    processors,
    tl,
    triton,
)
from engram.kernels.reference_rows import FP8, INT8, LUT3, PLAIN, HashConstants
from engram.kernels.rows import pointers, row_numbers, switches

TILE_BYTES = 8192  # of fp32 values; a quarter where loads are narrow (odd widths, lut3), since each needs an address
FUSED_REGISTERS = 64
WARPS = 4
PER_PROCESSOR = 4  # programs on each streaming multiprocessor when nothing else runs
BACKGROUND = 16  # programs of a gather that runs beside the layers
WIDEST = 1024  # columns of a tile
FP8_TO_FP32 = tl.constexpr(2.0**120)  # moves E4M3's exponent bias 7 to fp32's 127, subnormals included


@triton.jit
def power(scale):
    """E8M0 bytes as int32 -> 2^(scale - 127), fp32."""
    bits = tl.where(scale == 0, 1 << 22, tl.where(scale == 255, 0x7FC00000, scale << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def copy_block(
    begin,
    start,
    to,
    live,
    within,
    past,
    row_scale,
    table,
    out,
    W: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_W: tl.constexpr,
    KIND: tl.constexpr,
):
    """Columns begin..begin + BLOCK_W - 1 of one tile."""
    w = begin + tl.arange(0, BLOCK_W)
    reads = within[:, None] & (w < W)[None, :]
    at = start[:, None] + w[None, :]
    if KIND == 0:
        values = tl.load(table + at, mask=reads, other=0.0).to(tl.float32)
    elif KIND == 1:
        code = tl.load(table + at, mask=reads, other=0).to(tl.int32)
        bits = ((code & 127) << 20) | ((code & 128) << 24)
        values = bits.to(tl.float32, bitcast=True) * FP8_TO_FP32
        values = tl.where((code & 127) == 127, float("nan"), values)
        scale = tl.load(table + start[:, None] + W + (w // 32)[None, :], mask=reads, other=0).to(tl.int32)
        values = values * power(scale)
    elif KIND == 2:
        code = tl.load(table + at, mask=reads, other=0).to(tl.int8, bitcast=True)
        values = code.to(tl.float32) * row_scale[:, None]
    else:
        first = (w * 3) // 8
        low = tl.load(table + start[:, None] + 9 + first[None, :], mask=reads, other=0).to(tl.int32)
        more = reads & (first + 10 < ROW)[None, :]
        high = tl.load(table + start[:, None] + 10 + first[None, :], mask=more, other=0).to(tl.int32)
        code = ((low | (high << 8)) >> ((w * 3) % 8)[None, :]) & 7
        level = tl.load(table + start[:, None] + code, mask=reads, other=0).to(tl.int8, bitcast=True)
        values = level.to(tl.float32) * row_scale[:, None]
    values = tl.where(past[:, None], float("nan"), tl.where(within[:, None], values, 0.0))
    fits = live[:, None] & (w < W)[None, :]
    tl.store(out + to[:, None] + w[None, :], values.to(out.dtype.element_ty), mask=fits)


@triton.jit
def copy_rows(
    row,
    n,
    live,
    table,
    out,
    held,
    width,
    W: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_W: tl.constexpr,
    KIND: tl.constexpr,
):
    """Values of table rows `row` to lines n of `out`; `held` rows are in the table, ROW elements each (width = W)."""
    within = live & (row >= 0) & (row < held)
    past = row >= held
    start = row * ROW
    to = n.to(tl.int64) * W
    row_scale = 1.0
    if KIND == 2:  # four bytes of an fp32 scale, which may lie at any address
        scale_bits = tl.load(table + start + W, mask=within, other=0).to(tl.int32)
        for b in tl.static_range(1, 4):
            scale_bits = scale_bits | (tl.load(table + start + W + b, mask=within, other=0).to(tl.int32) << (8 * b))
        row_scale = scale_bits.to(tl.float32, bitcast=True)
    if KIND == 3:
        row_scale = power(tl.load(table + start + 8, mask=within, other=0).to(tl.int32))
    if BLOCK_W >= W:
        copy_block(0, start, to, live, within, past, row_scale, table, out, W, ROW, BLOCK_W, KIND)
    else:  # a loop of unknown length: unrolled, it would hold the loads of the whole row in registers
        begin = 0
        while begin < width:
            copy_block(begin, start, to, live, within, past, row_scale, table, out, W, ROW, BLOCK_W, KIND)
            begin += BLOCK_W


@triton.jit
def gather_kernel(
    table,
    ids,
    out,
    held,
    total,
    width,
    W: tl.constexpr,
    ROW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    KIND: tl.constexpr,
):
    """Lines 0..total-1 of `out` are the rows `ids` of the table."""
    tile = tl.program_id(0)
    while tile * ROWS < total:
        n = tile * ROWS + tl.arange(0, ROWS)
        live = n < total
        row = tl.load(ids + n, mask=live, other=-1).to(tl.int64)
        copy_rows(row, n, live, table, out, held, width, W, ROW, BLOCK_W, KIND)
        tile += tl.num_programs(0)


@triton.jit
def hash_gather_kernel(
    table,
    rows_out,
    out,
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
    held,
    total,
    width,
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
    W: tl.constexpr,
    ROW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    KIND: tl.constexpr,
):
    """The row numbers of `total` look-ups of one layer, and lines 0..total-1 of `out`: their values."""
    tile = tl.program_id(0)
    while tile * ROWS < total:
        n = tile * ROWS + tl.arange(0, ROWS)
        live = n < total
        # fmt: off
        row, _ = row_numbers(
            n, live, ids, class_of, pad, dead, segment, eos, multipliers, sizes, reciprocals, offsets,
            total, length, skip, limit, filler, longest,
            C, N, E, HAS_MAP, HAS_PAD, HAS_DEAD, HAS_SEGMENT, XOR, NARROW, RECIPROCAL,
        )
        # fmt: on
        tl.store(rows_out + n, row, mask=live)
        copy_rows(row, n, live, table, out, held, width, W, ROW, BLOCK_W, KIND)
        tile += tl.num_programs(0)


@triton.jit
def put_kernel(
    table,
    ids,
    values,
    held,
    count,
    width,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Rows `ids` of the table become lines 0..count-1 of `values`."""
    tile = tl.program_id(0)
    while tile * ROWS < count:
        n = tile * ROWS + tl.arange(0, ROWS)
        live = n < count
        row = tl.load(ids + n, mask=live, other=-1)
        live = (row >= 0) & (row < held)  # others are not written: a kernel cannot raise
        begin = 0
        while begin < width:
            w = begin + tl.arange(0, BLOCK_W)
            fits = live[:, None] & (w < W)[None, :]
            value = tl.load(values + n.to(tl.int64)[:, None] * W + w[None, :], mask=fits, other=0)
            tl.store(table + row[:, None] * W + w[None, :], value.to(table.dtype.element_ty), mask=fits)
            begin += BLOCK_W
        tile += tl.num_programs(0)


@dataclass(frozen=True)
class Tile:
    """What one step of a program reads: `rows` rows, `block` columns of them at a time."""

    rows: int
    block: int


def tile(width: int, item_bytes: int, count: int, programs: int, narrow: bool = False) -> Tile:
    """The tile for rows of `width` values of `item_bytes`, when `count` rows are read by up to `programs` programs.

    narrow  values are read one by one.

    A block of columns is a power of two; among those that leave at most a tenth of their lanes idle the largest is
    taken (160 = 5 x 32, 1280 = 5 x 256), else the one that leaves fewest. Few look-ups (decoding) are spread over the
    processors, down to two rows a program: there latency counts, not bytes in flight.
    """
    blocks = [1 << power for power in range(4, WIDEST.bit_length())]
    idle = {block: -(-width // block) * block / width for block in blocks}
    good = [block for block in blocks if idle[block] <= 1.1]
    block = min(max(good) if good else min(blocks, key=lambda b: (idle[b], -b)), WIDEST)
    if INTERPRETED:
        return Tile(power_of_two(min(count, 4096)), block)
    values = TILE_BYTES // 16 if narrow or width * item_bytes % 16 else TILE_BYTES // 4
    rows = max(2, values // block)
    while rows > 2 and -(-count // rows) < programs:
        rows = max(2, rows // 4)
    return Tile(rows, block)


def _row_elements(table: Tensor, kind: int, width: int) -> int:
    """Elements of the table between two rows. Raises ValueError when table, format and width do not fit."""
    expected = row_bytes(kind, width)
    floats = (torch.float32, torch.bfloat16, torch.float16)
    fits = table.dtype in floats if kind == PLAIN else table.dtype == torch.uint8
    if table.ndim != 2 or table.shape[1] != expected or not fits or not table.is_contiguous():
        raise ValueError(
            f"table: {table.dtype} {list(table.shape)} does not hold rows of {width} values in format {kind}; expected "
            f"contiguous {'floats' if kind == PLAIN else 'bytes'} [rows, {expected}]"
        )
    return expected


def row_bytes(kind: int, width: int) -> int:
    """Elements of one stored row: values of a PLAIN table, bytes of the other formats."""
    extra = {PLAIN: 0, FP8: -(-width // reference_rows.FP8_BLOCK), INT8: 4, LUT3: reference_rows.LUT3_LEVELS + 1}[kind]
    return extra + (-(-3 * width // 8) if kind == LUT3 else width)


def _programs(device: torch.device, count: int, rows: int, cap: int | None) -> int:
    return min(-(-count // rows), PER_PROCESSOR * processors(device) if cap is None else cap)


def gather_rows(
    table: Tensor,
    ids_n: Tensor,
    kind: int,
    width: int,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    programs: int | None = None,
) -> Tensor:
    """Rows `ids_n` of a table on the GPU or in pinned host memory -> values [n, W] on the device of the ids.

    out        written in place of a new tensor; dtype: of a new one (fp32 or bf16).
    programs   at most so many run at once; None fills the GPU, BACKGROUND leaves it to others.
    Negative numbers give zeros, those past the table NaN. Raises ValueError for a table that does not fit, and for 2^30
    look-ups and more.
    """
    row = _row_elements(table, kind, width)
    count = len(ids_n)
    check_count("rows", count)
    if out is None:
        out = torch.empty(count, width, dtype=dtype, device=ids_n.device)
    if not count:
        return out
    cap = PER_PROCESSOR * processors(ids_n.device) if programs is None else programs
    shape = tile(width, table.element_size(), count, cap, narrow=kind == LUT3)
    with on(ids_n):
        gather_kernel[(_programs(ids_n.device, count, shape.rows, programs),)](
            table,
            ids_n.contiguous(),
            out,
            held=len(table),
            total=count,
            width=width,
            W=width,
            ROW=row,
            ROWS=shape.rows,
            BLOCK_W=shape.block,
            KIND=kind,
            num_warps=WARPS,
            **NO_FUSION,
        )
    return out


def hash_gather(
    ids_BT: Tensor,
    constants: HashConstants,
    table: Tensor,
    kind: int,
    width: int,
    pad_BT: Tensor | None = None,
    dead_BT: Tensor | None = None,
    segment_BT: Tensor | None = None,
    skip: int = 0,
    dtype: torch.dtype = torch.float32,
    programs: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Raw ids int64 [B, T] of one layer -> memory [B, T - skip, C * W] and row numbers int64 [B, T - skip, C].

    Arguments as in `gather_rows` and kernels/reference_rows.py's `hash_rows`; raises what they raise.
    """
    if constants.groups != 1:
        raise ValueError(f"constants: {constants.groups} layers; one table belongs to one layer")
    row, columns = _row_elements(table, kind, width), constants.columns
    batch, length = ids_BT.shape
    rows_BTC = torch.empty(batch, length - skip, columns, dtype=torch.int64, device=ids_BT.device)
    out = torch.empty(batch, length - skip, columns * width, dtype=dtype, device=ids_BT.device)
    count = rows_BTC.numel()
    check_count("ids", count)
    if not count:
        return out, rows_BTC
    cap = PER_PROCESSOR * processors(ids_BT.device) if programs is None else programs
    shape = tile(width, table.element_size(), count, cap, narrow=kind == LUT3)
    with on(ids_BT):
        hash_gather_kernel[(_programs(ids_BT.device, count, shape.rows, programs),)](
            table,
            rows_BTC,
            out,
            **pointers(ids_BT, constants, pad_BT, dead_BT, segment_BT),
            held=len(table),
            total=count,
            width=width,
            length=length,
            skip=skip,
            limit=constants.limit,
            filler=constants.filler,
            longest=constants.orders[-1],
            **switches(constants, pad_BT, dead_BT, segment_BT),
            W=width,
            ROW=row,
            ROWS=shape.rows,
            BLOCK_W=shape.block,
            KIND=kind,
            num_warps=WARPS,
            **NO_FUSION,
            **at_most(FUSED_REGISTERS),
        )
    return out, rows_BTC


def put_rows(table: Tensor, ids_U: Tensor, values_UW: Tensor) -> None:
    """Write values [U, W] (or rows as bytes) over the distinct rows `ids_U` of a table on the GPU or in pinned memory.

    Row numbers outside the table are left out. Raises ValueError for values that are not as wide as the table.
    """
    width = values_UW.shape[1]
    if table.ndim != 2 or table.shape[1] != width or not table.is_contiguous():
        raise ValueError(f"values: {list(values_UW.shape)} do not fit the table {list(table.shape)}, or it has gaps")
    count = len(ids_U)
    check_count("rows", count)
    if not count:
        return
    shape = tile(width, table.element_size(), count, PER_PROCESSOR * processors(ids_U.device))
    with on(ids_U):
        put_kernel[(_programs(ids_U.device, count, shape.rows, None),)](
            table,
            ids_U.contiguous(),
            values_UW.contiguous(),
            held=len(table),
            count=count,
            width=width,
            W=width,
            ROWS=shape.rows,
            BLOCK_W=shape.block,
            num_warps=WARPS,
            **NO_FUSION,
        )
