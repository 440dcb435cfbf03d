"""From ids to row numbers to values in plain torch: the judge of kernels/rows.py, kernels/gather.py and kernels/cpu.py.

    rows_GBTC = hash_rows(ids_BT, constants)           # integers only, exact over the whole range of int64
    values_nW = gather_rows(table, ids_n, FP32, width)

Which rule belongs to which released family is said in engram/hashing.py; how rows become bytes in
engram/stores/formats.py. Here are the operations.

Shapes: B batch, T time, N longest n-gram, C columns of one layer, G layers hashed at once, K = G * C, E end-of-text
ids, R rows, n looked-up rows, W row width, b bytes of a row, L = 8 levels of a lut3 row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engram.kernels.reference import rowwise_adagrad, rowwise_adam

PLAIN, FP8, INT8, LUT3 = 0, 1, 2, 3
"""Row formats: PLAIN tables have a floating dtype; the others are bytes [R, b] (engram/stores/formats.py)."""

FP8_BLOCK = 32  # values that share one scale
LUT3_LEVELS = 8
GAMMA, MIX_1, MIX_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685  # splitmix64, as signed int64
RULES = ("rowwise_adam", "rowwise_adagrad", "sgd")


@dataclass(frozen=True)
class Rule:
    """How a row moves by its gradient (kernels/reference.py has the formulas of the names in RULES).

    keep        what decay leaves of the row before it moves: 1 - lr * weight decay.
    seed, step  what the rounding of bf16 rows is made from.
    """

    name: str
    lr: float
    beta2: float = 0.0
    eps: float = 0.0
    keep: float = 1.0
    seed: int = 0
    step: int = 0


@dataclass(frozen=True)
class HashConstants:
    """Everything that turns windows of ids into row numbers, for one layer or for several at once.

    multipliers_KN   one line per column; 0 beyond the column's order.
    sizes_K          rows of each column's head; offsets_K where they begin in the layer's table.
    reciprocals_K    floor(2^64 / size) as int64 bits; usable where `exact_reciprocal` (see `reciprocals`).
    eos_E            raw ids that close a text. class_of: raw id -> class, or None.
    orders, heads    C = len(orders) * heads columns a layer, order-major.
    limit            ids outside 0..limit-1 are hashed as `filler`.
    xor, narrow      products are combined by XOR (else by a sum); they are cut to 32 bits first.
    """

    multipliers_KN: Tensor
    sizes_K: Tensor
    offsets_K: Tensor
    reciprocals_K: Tensor
    eos_E: Tensor
    class_of: Tensor | None
    orders: tuple[int, ...]
    heads: int
    limit: int
    filler: int
    xor: bool
    narrow: bool
    exact_reciprocal: bool

    @property
    def columns(self) -> int:
        """C."""
        return len(self.orders) * self.heads

    @property
    def groups(self) -> int:
        """G."""
        return len(self.sizes_K) // self.columns


def stack(layers: Sequence[HashConstants]) -> HashConstants:
    """The constants of several layers that see the same windows, to be hashed at once."""
    first = layers[0]
    if len(layers) == 1:
        return first
    names = ("multipliers_KN", "sizes_K", "offsets_K", "reciprocals_K")
    joined: dict[str, Any] = {name: torch.cat([getattr(one, name) for one in layers]) for name in names}
    return replace(first, **joined, exact_reciprocal=all(one.exact_reciprocal for one in layers))


def reciprocals(sizes: Sequence[int], largest_mix: int) -> tuple[list[int], bool]:
    """floor(2^64 / size) as signed 64-bit integers, and whether remainders by them are exact.

    x - size * mulhi(x, reciprocal) is the remainder, or that plus one size, when 0 <= x < 2^63 and 2 <= size < 2^31;
    `largest_mix` is the largest x (2^63 or more where sums may wrap and become negative).
    """
    exact = largest_mix < 2**63 and all(2 <= size < 2**31 for size in sizes)
    values = [2**64 // size if exact else 0 for size in sizes]
    return [value - 2**64 if value >= 2**63 else value for value in values], exact


def look_back(
    canon_BT: Tensor,
    order: int,
    filler: int,
    barrier_BT: Tensor | None = None,
    dead_BT: Tensor | None = None,
    segment_BT: Tensor | None = None,
) -> Tensor:
    """Class ids [B, T] -> windows [B, T, order], int64, blocked slots filled with `filler` (engram/window.py).

    barrier_BT  True where a later position may not look (end of text, padding); the position itself keeps its window.
    dead_BT     True where the whole window is blocked, the current slot included, and nobody may look (image spans).
    segment_BT  number of the packed document of each position; a window never crosses from one to another.
    """
    slots = [canon_BT]
    open_BT = torch.ones_like(canon_BT, dtype=torch.bool)
    if dead_BT is not None:
        slots = [canon_BT.masked_fill(dead_BT, filler)]
        open_BT = ~dead_BT
        barrier_BT = dead_BT if barrier_BT is None else barrier_BT | dead_BT
    for back in range(1, order):
        open_BT = open_BT & shift(torch.ones_like(open_BT), back, False)
        if barrier_BT is not None:
            open_BT = open_BT & ~shift(barrier_BT, back, True)
        if segment_BT is not None:
            open_BT = open_BT & (shift(segment_BT, back, -1) == segment_BT)
        slots.append(torch.where(open_BT, shift(canon_BT, back, filler), filler))
    return torch.stack(slots, dim=-1)


def shift(values_BT: Tensor, back: int, fill: int | bool) -> Tensor:
    """Move every sequence `back` places to the right, [B, T] -> [B, T]; the first places hold `fill`."""
    length = values_BT.shape[1]
    back = min(back, length)
    head_Bs = values_BT.new_full((values_BT.shape[0], back), fill)
    return torch.cat([head_Bs, values_BT[:, : length - back]], dim=1)


def windows_of_ids(
    ids_BT: Tensor,
    constants: HashConstants,
    pad_BT: Tensor | None = None,
    dead_BT: Tensor | None = None,
    segment_BT: Tensor | None = None,
    skip: int = 0,
    masked: Tensor | None = None,
) -> Tensor:
    """Raw ids int64 [B, T] -> windows of classes [B, T - skip, N], int64.

    pad_BT   True at padding: hashed as filler, and a barrier for later positions; dead_BT, segment_BT: see `look_back`.
    skip     leading positions that are history: seen, and no windows of their own.
    masked   int64 scalar; the ids outside the vocabulary that were hashed as filler are added to it.
    """
    outside_BT = (ids_BT < 0) | (ids_BT >= constants.limit)
    if masked is not None:
        counted_BT = outside_BT if pad_BT is None else outside_BT & ~pad_BT
        masked += counted_BT[:, skip:].sum()
    canon_BT = ids_BT.masked_fill(outside_BT, 0)
    if constants.class_of is not None:
        canon_BT = constants.class_of[canon_BT]
    canon_BT = canon_BT.masked_fill(outside_BT if pad_BT is None else outside_BT | pad_BT, constants.filler)
    barrier_BT = pad_BT
    if len(constants.eos_E):
        eos_BT = torch.isin(ids_BT, constants.eos_E)
        barrier_BT = eos_BT if barrier_BT is None else barrier_BT | eos_BT
    longest = constants.orders[-1]
    return look_back(canon_BT, longest, constants.filler, barrier_BT, dead_BT, segment_BT)[:, skip:]


def rows_of_windows(window_BTN: Tensor, constants: HashConstants) -> Tensor:
    """Windows of classes [B, T, N] -> row numbers int64 [G, B, T, C], offsets included."""
    found = []
    for group in range(constants.groups):
        part = slice(group * constants.columns, (group + 1) * constants.columns)
        multipliers_CN = constants.multipliers_KN[part]
        if constants.xor:
            mixes = _xor(window_BTN, multipliers_CN[-1], constants)
        else:
            mixes = (window_BTN.unsqueeze(-2) * multipliers_CN).sum(dim=-1)
        found.append(torch.remainder(mixes, constants.sizes_K[part]) + constants.offsets_K[part])
    return torch.stack(found) if len(found) > 1 else found[0].unsqueeze(0)


def _xor(window_BTN: Tensor, multipliers_N: Tensor, constants: HashConstants) -> Tensor:
    products_BTN = window_BTN * multipliers_N
    if constants.narrow:
        products_BTN = products_BTN.to(torch.int32)
    mix_BT, mixes = products_BTN[..., 0], []
    for order in range(1, constants.orders[-1] + 1):
        if order > 1:
            mix_BT = mix_BT ^ products_BTN[..., order - 1]
        if order in constants.orders:
            mixes.append(mix_BT)
    return torch.stack(mixes, dim=-1).to(torch.int64).repeat_interleave(constants.heads, dim=-1)


def hash_rows(
    ids_BT: Tensor,
    constants: HashConstants,
    pad_BT: Tensor | None = None,
    dead_BT: Tensor | None = None,
    segment_BT: Tensor | None = None,
    skip: int = 0,
    masked: Tensor | None = None,
) -> Tensor:
    """Raw ids int64 [B, T] -> row numbers int64 [G, B, T - skip, C], offsets included; see `windows_of_ids`."""
    return rows_of_windows(windows_of_ids(ids_BT, constants, pad_BT, dead_BT, segment_BT, skip, masked), constants)


def gather_rows(table: Tensor, ids_n: Tensor, kind: int, width: int) -> Tensor:
    """Rows of a table ([R, W] floats, or [R, b] bytes of format `kind`) -> fp32 values [n, W].

    A negative row number gives zeros (a row that another shard holds), one past the table gives NaN: a kernel cannot
    raise, and zeros would be a silent wrong answer.
    """
    inside_n = (ids_n >= 0) & (ids_n < len(table))
    if not len(table):
        values_nW = torch.zeros(len(ids_n), width, device=table.device)
    else:
        values_nW = decode_rows(table.index_select(0, torch.where(inside_n, ids_n, 0).to(table.device)), kind, width)
    inside_n, past_n = inside_n.to(table.device), (ids_n >= len(table)).to(table.device)
    return values_nW.masked_fill(~inside_n.unsqueeze(-1), 0.0).masked_fill(past_n.unsqueeze(-1), torch.nan)


def decode_rows(rows_nb: Tensor, kind: int, width: int) -> Tensor:
    """Rows as they are stored -> fp32 values [n, W]; never a view of them."""
    if kind == PLAIN:
        return rows_nb.to(torch.float32, copy=True)
    if kind == FP8:
        blocks = -(-width // FP8_BLOCK)
        codes_nW = functional.pad(rows_nb[:, :width], (0, blocks * FP8_BLOCK - width)).contiguous()
        codes_nKb = codes_nW.view(torch.float8_e4m3fn).to(torch.float32).view(len(rows_nb), blocks, FP8_BLOCK)
        values_nKb = codes_nKb * power_of_two(rows_nb[:, width:]).unsqueeze(-1)
        return values_nKb.flatten(1)[:, :width].contiguous()
    if kind == INT8:
        scale_n1 = rows_nb[:, width : width + 4].clone(memory_format=torch.contiguous_format).view(torch.float32)
        return rows_nb[:, :width].view(torch.int8).to(torch.float32) * scale_n1
    levels_nL = rows_nb[:, :LUT3_LEVELS].view(torch.int8).to(torch.float32)
    codes_nW = unpack_codes(rows_nb[:, LUT3_LEVELS + 1 :], width)
    return levels_nL.gather(1, codes_nW) * power_of_two(rows_nb[:, LUT3_LEVELS : LUT3_LEVELS + 1])


def power_of_two(scale: Tensor) -> Tensor:
    """E8M0 bytes (or integers 0..255) -> 2^(scale - 127), fp32, exact; 0 is 2^-127 and 255 is NaN."""
    bits = scale.to(torch.int32)
    bits = torch.where(bits == 0, 1 << 22, torch.where(bits == 255, 0x7FC00000, bits << 23))
    return bits.to(torch.int32).view(torch.float32)


def unpack_codes(bytes_nB: Tensor, width: int) -> Tensor:
    """Bytes [n, ceil(3 W / 8)] -> 3-bit codes int64 [n, W]: code j in bits 3j..3j+2, lowest first."""
    padded_nB = functional.pad(bytes_nB, (0, -bytes_nB.shape[1] % 3)).to(torch.int64)
    word_n1 = (padded_nB.unflatten(1, (-1, 3)) << torch.tensor([0, 8, 16], device=bytes_nB.device)).sum(-1, True)
    codes_n8 = (word_n1 >> torch.arange(0, 24, 3, device=bytes_nB.device)) & 7
    return codes_n8.flatten(1)[:, :width]


def update_rows(table: Tensor, v_R: Tensor, ids_U: Tensor, grads_UW: Tensor, rule: Rule) -> None:
    """Move the distinct rows `ids_U` of `table` [R, W] (fp32 or bf16) by their summed gradients, in place.

    v_R  fp32, the row-wise state; left alone by "sgd".
    """
    values_UW = table.index_select(0, ids_U).float() * rule.keep
    if rule.name == "sgd":
        values_UW = values_UW - rule.lr * grads_UW
    else:
        v_U = v_R.index_select(0, ids_U)
        if rule.name == "rowwise_adam":
            values_UW, v_U = rowwise_adam(values_UW, grads_UW, v_U, rule.lr, rule.beta2, rule.eps)
        else:
            values_UW, v_U = rowwise_adagrad(values_UW, grads_UW, v_U, rule.lr, rule.eps)
        v_R.index_copy_(0, ids_U, v_U)
    if table.dtype == torch.bfloat16:
        values_UW = round_stochastic(values_UW, rule.seed, ids_U, rule.step)
    table.index_copy_(0, ids_U, values_UW.to(table.dtype))


def mix64(x: Tensor) -> Tensor:
    """splitmix64's output function on int64 tensors; `>>` is arithmetic, so the shifted-in sign bits are masked off."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * MIX_1
    x = (x ^ ((x >> 27) & (2**37 - 1))) * MIX_2
    return x ^ ((x >> 31) & (2**33 - 1))


def rounding_key(seed: int, step: int) -> int:
    """What the random bits of one step are made from, as signed int64."""
    start = torch.tensor([seed, step], dtype=torch.int64, device="cpu")
    return int(mix64(mix64(start[0] + GAMMA) + (start[1] + 1) * GAMMA))


def round_stochastic(values_UW: Tensor, seed: int, ids_U: Tensor, step: int) -> Tensor:
    """Values fp32 [U, W] of the rows `ids_U` -> bf16, up or down so that the mean over steps is the value.

    The 16 random bits of a value are a pure function of (seed, row, column, step): splitmix64 of splitmix64s, integers
    only, so the order of rows, the store and the device do not matter. A value that is a bf16 number already stays,
    NaN too.
    """
    width = values_UW.shape[1]
    key_U1 = mix64(rounding_key(seed, step) + (ids_U.to(torch.int64) + 1) * GAMMA).unsqueeze(1)
    word_G = torch.arange(1, -(-width // 4) + 1, dtype=torch.int64, device=values_UW.device)  # 4 columns a word
    words_UG = mix64(key_U1 + word_G * GAMMA)
    shift_4 = torch.arange(0, 64, 16, dtype=torch.int64, device=values_UW.device)
    random_UW = ((words_UG.unsqueeze(-1) >> shift_4) & 0xFFFF).flatten(1)[:, :width].to(torch.int32)
    bits_UW = (values_UW.contiguous().view(torch.int32) + random_UW) & ~0xFFFF  # sign and magnitude: away from zero
    rounded_UW = torch.where(values_UW.isnan(), values_UW, bits_UW.view(torch.float32))  # the sum turns NaN to -0
    return rounded_UW.to(torch.bfloat16)
