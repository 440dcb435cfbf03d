"""How the values of a row are laid out as bytes: fp32, bf16, fp8 with block scales, int8, and 3-bit table look-ups.

    rows = get_format("fp8_e4m3", 256)                # 264 bytes a row: the row of DeepSeek-V4.1, bit for bit
    bytes_UB = rows.encode(values_UW)                 # uint8; all bytes of a row, scales included, lie together
    values_UW = rows.decode(bytes_UB)                 # fp32

Every format is deterministic and canonical: what `encode` writes, `encode(decode(...))` writes again, byte for byte,
and a row of zeros is a row of zero bytes (so the holes of a sparse file are zero rows). docs/formats.md has layouts,
reasons and measured errors. Multi-byte numbers are little-endian.

`round_stochastic` is how trained bf16 rows are rounded: by bits that depend on (seed, row, column, step) alone.

Shapes: U distinct rows, n rows, W row width, B bytes of a row, K blocks of 32 values, L = 8 levels of a table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from engram.kernels import dispatch
from engram.kernels.dispatch import FP8, INT8, LUT3, PLAIN, decode_rows, power_of_two
from engram.strict import choice, require

LARGEST = 2.0**127
"""Largest magnitude that every format but fp32 accepts: beyond it some of them would round to infinity."""

BLOCK = 32  # values that share one fp8 scale
LEVELS = 8  # values of a lut3 table
LLOYD_STEPS = 8  # from 8 to 32 steps the error of normal rows of 256 values falls by 0.6 %
LUT3_CHUNK = 1 << 18  # values encoded at a time: lut3 needs about 60 bytes of temporaries a value
NORMAL_LEVELS = (-2.152, -1.344, -0.756, -0.2451, 0.2451, 0.756, 1.344, 2.152)  # Lloyd-Max, 8 levels, unit normal


class RowFormat(ABC):
    """One way to write rows of `width` values as `row_bytes` bytes each.

    name       the configuration's `row_dtype`; kind is its number in kernels/.
    row_bytes  all bytes of one row.
    """

    name: ClassVar[str]
    kind: ClassVar[int] = PLAIN
    largest: ClassVar[float] = LARGEST
    width: int
    row_bytes: int

    def __init__(self, width: int, row_bytes: int) -> None:
        self.width, self.row_bytes = width, row_bytes

    def encode(self, values_UW: Tensor, ids_U: Tensor | None = None) -> Tensor:
        """Values [U, W], any float dtype -> bytes uint8 [U, B], on the same device.

        Raises ValueError naming the row (its number in `ids_U` where given, else its place) when it holds NaN,
        infinity, or a magnitude above 2^127 (fp32: above the largest fp32).
        """
        if values_UW.ndim != 2 or values_UW.shape[1] != self.width or not values_UW.is_floating_point():
            raise ValueError(
                f"{self.name}: values {list(values_UW.shape)} {values_UW.dtype} do not fit; "
                f"expected floats of shape [rows, {self.width}]"
            )
        values_UW = values_UW.detach().to(torch.float32)
        _refuse(self.name, values_UW, self.largest, ids_U)
        return self._encode(values_UW.contiguous())

    def decode(self, bytes_nB: Tensor, out: Tensor | None = None) -> Tensor:
        """Bytes uint8 [n, B] -> values fp32 [n, W], into `out` where given; never a view of the bytes."""
        if bytes_nB.ndim != 2 or bytes_nB.shape[1] != self.row_bytes or bytes_nB.dtype != torch.uint8:
            raise ValueError(
                f"{self.name}: bytes {list(bytes_nB.shape)} {bytes_nB.dtype} do not fit; "
                f"expected uint8 of shape [rows, {self.row_bytes}]"
            )
        values_nW = self._decode(bytes_nB)
        return values_nW if out is None else out.copy_(values_nW)

    def broken_rows(self, bytes_nB: Tensor) -> Tensor:
        """Bytes uint8 [n, B] -> places int64 [m] of the rows that hold NaN or infinity, for loaders of other files."""
        return (~self.decode(bytes_nB).isfinite().all(dim=1)).nonzero().squeeze(1)

    @abstractmethod
    def _encode(self, values_UW: Tensor) -> Tensor: ...

    @abstractmethod
    def _decode(self, bytes_nB: Tensor) -> Tensor: ...

    def __repr__(self) -> str:
        return f"{type(self).__name__}(width={self.width}, row_bytes={self.row_bytes})"


class Fp32Rows(RowFormat):
    """4 bytes a value, exact."""

    name = "fp32"
    largest = torch.finfo(torch.float32).max

    def __init__(self, width: int) -> None:
        super().__init__(width, 4 * width)

    def _encode(self, values_UW: Tensor) -> Tensor:
        return values_UW.clone().view(torch.uint8)

    def _decode(self, bytes_nB: Tensor) -> Tensor:
        return bytes_nB.clone(memory_format=torch.contiguous_format).view(torch.float32)


class Bf16Rows(RowFormat):
    """2 bytes a value, rounded to nearest even."""

    name = "bf16"

    def __init__(self, width: int) -> None:
        super().__init__(width, 2 * width)

    def _encode(self, values_UW: Tensor) -> Tensor:
        return values_UW.to(torch.bfloat16).view(torch.uint8)

    def _decode(self, bytes_nB: Tensor) -> Tensor:
        return bytes_nB.clone(memory_format=torch.contiguous_format).view(torch.bfloat16).to(torch.float32)


class Fp8Rows(RowFormat):
    """W codes FP8 E4M3, then one scale byte E8M0 per 32 values: value = code * 2^(scale - 127), in fp32.

    The last block is shorter where W is no multiple of 32. The scale is the smallest power of two at which the block's
    largest magnitude, rounded to E4M3's four significant bits, is at most 448: nothing saturates, and a block that was
    decoded gets its own scale back. Written scales lie in 1..247; 0 stands for a block whose codes are all zero.
    Read: 0 is 2^-127 (OCP's definition; SGLang and NeMo agree, vLLM reads 0.0), 255 is NaN (OCP, NeMo).
    """

    name = "fp8_e4m3"
    kind = FP8

    def __init__(self, width: int) -> None:
        self.blocks = -(-width // BLOCK)
        super().__init__(width, width + self.blocks)

    def _encode(self, values_UW: Tensor) -> Tensor:
        rows = len(values_UW)
        padded_UW = functional.pad(values_UW, (0, self.blocks * BLOCK - self.width))
        values_UKb = padded_UW.view(rows, self.blocks, BLOCK)
        power_UK = fp8_power(values_UKb.abs().amax(dim=-1))
        scaled_UKb = values_UKb * power_of_two(127 - power_UK).unsqueeze(-1)
        codes_UKb = scaled_UKb.to(torch.float8_e4m3fn).view(torch.uint8)
        empty_UK = ((codes_UKb & 127) == 0).all(dim=-1)
        scales_UK = (power_UK + 127).masked_fill(empty_UK, 0).to(torch.uint8)
        codes_UW = codes_UKb.reshape(rows, self.blocks * BLOCK)[:, : self.width]
        return torch.cat([codes_UW, scales_UK], dim=1)

    def _decode(self, bytes_nB: Tensor) -> Tensor:
        return decode_rows(bytes_nB, FP8, self.width)


class Int8Rows(RowFormat):
    """W codes int8 in -127..127, then one fp32 scale a row: value = code * scale.

    The scale is max|x| / 127 cut to 16 significant bits (at least 2^-126), so that every code * scale is exact in fp32
    and a decoded row gets its own scale back; with a bf16 scale it would not, or codes would overflow.
    """

    name = "int8"
    kind = INT8

    def __init__(self, width: int) -> None:
        super().__init__(width, width + 4)

    def _encode(self, values_UW: Tensor) -> Tensor:
        largest_U1 = values_UW.abs().amax(dim=1, keepdim=True)
        scale_U1 = ((largest_U1 / 127).view(torch.int32) & ~0xFF).view(torch.float32).clamp(min=2.0**-126)
        codes_UW = torch.round(values_UW / scale_U1).to(torch.int8)
        scale_U1 = scale_U1.masked_fill((codes_UW == 0).all(dim=1, keepdim=True), 0.0)
        return torch.cat([codes_UW.view(torch.uint8), scale_U1.view(torch.uint8)], dim=1)

    def _decode(self, bytes_nB: Tensor) -> Tensor:
        return decode_rows(bytes_nB, INT8, self.width)


class Lut3Rows(RowFormat):
    """8 int8 levels, one scale byte E8M0, then a 3-bit code a value: value = level[code] * 2^(scale - 127).

    3 + 72 / W bits a value. Levels ascend; unused ones repeat the largest. Code j fills bits 3j..3j+2 of the packed
    bytes, lowest bit first. A row with at most eight distinct values keeps them (to the precision of int8); other rows
    take the best of three starts of eight Lloyd iterations. The scale puts the largest level into 64..127.
    """

    name = "lut3"
    kind = LUT3

    def __init__(self, width: int) -> None:
        super().__init__(width, LEVELS + 1 + -(-3 * width // 8))

    def _encode(self, values_UW: Tensor) -> Tensor:
        if not len(values_UW):
            return torch.zeros(0, self.row_bytes, dtype=torch.uint8, device=values_UW.device)
        step = max(1, LUT3_CHUNK // self.width)
        return torch.cat([self._encode_chunk(chunk_UW) for chunk_UW in values_UW.split(step)])

    def _encode_chunk(self, values_UW: Tensor) -> Tensor:
        levels_UL = _levels(values_UW)
        power_U1 = _int8_power(levels_UL.abs().amax(dim=1, keepdim=True))
        to_units_U1 = power_of_two(127 - power_U1)
        table_UL = torch.round(levels_UL * to_units_U1)
        units_UW = table_UL.gather(1, _nearest(table_UL, values_UW * to_units_U1))
        # rounding may have left levels unused or equal: what follows depends on the decoded values alone
        largest_U1 = units_UW.abs().amax(dim=1, keepdim=True)
        shift_U1 = (power_U1 - _int8_power(largest_U1 * power_of_two(power_U1 + 127))).clamp(min=0)
        units_UW = units_UW * power_of_two(127 + shift_U1)
        table_UL, codes_UW = _distinct(units_UW.sort(dim=1).values), units_UW
        codes_UW = torch.searchsorted(table_UL, codes_UW.contiguous())
        scale_U1 = (power_U1 - shift_U1 + 127).masked_fill(largest_U1 == 0, 0).to(torch.uint8)
        return torch.cat([table_UL.to(torch.int8).view(torch.uint8), scale_U1, _pack(codes_UW)], dim=1)

    def _decode(self, bytes_nB: Tensor) -> Tensor:
        return decode_rows(bytes_nB, LUT3, self.width)


FORMATS: dict[str, type[Fp32Rows | Bf16Rows | Fp8Rows | Int8Rows | Lut3Rows]] = {
    rows.name: rows for rows in (Fp32Rows, Bf16Rows, Fp8Rows, Int8Rows, Lut3Rows)
}
"""The configuration's `row_dtype` -> its format."""


def get_format(name: str, width: int) -> RowFormat:
    """The format called `name` for rows of `width` values. Raises ConfigError for another name or a width below 1."""
    choice("row_dtype", name, tuple(FORMATS))
    require(width >= 1, f"head_dim: {width} must be at least 1 for rows of format {name}")
    return FORMATS[name](width)


def relative_errors(values_UW: Tensor, rows: RowFormat) -> Tensor:
    """RMS error over RMS value of each row [U], fp32, after encoding and decoding; 0 for a row of zeros."""
    values_UW = values_UW.to(torch.float32)
    error_U = (rows.decode(rows.encode(values_UW)) - values_UW).double().square().mean(dim=1)
    power_U = values_UW.double().square().mean(dim=1)
    return torch.where(power_U > 0, error_U / power_U.clamp(min=1e-300), 0.0).sqrt().float()


def round_stochastic(values_UW: Tensor, seed: int, ids_U: Tensor, step: int) -> Tensor:
    """Values fp32 [U, W] of the rows `ids_U` -> bf16 [U, W], up or down so that the mean over steps is the value.

    The 16 random bits of a value are a pure function of (seed, row, column, step): splitmix64 of splitmix64s, integers
    only, so the order of rows, the store and the device do not matter. A value that is a bf16 number already stays.
    Raises ValueError naming the row for NaN, infinity or a magnitude above 2^127.
    """
    if values_UW.ndim != 2 or values_UW.dtype != torch.float32 or ids_U.shape != values_UW.shape[:1]:
        raise ValueError(
            f"round_stochastic: values {list(values_UW.shape)} {values_UW.dtype} and ids {list(ids_U.shape)}; "
            "expected fp32 [rows, width] and one row number each"
        )
    _refuse("round_stochastic", values_UW, LARGEST, ids_U)
    return dispatch.round_stochastic(values_UW, seed, ids_U, step)


def _refuse(name: str, values_UW: Tensor, largest: float, ids_U: Tensor | None) -> None:
    """Raise ValueError for the first row with a value that is not a number of at most `largest`."""
    fine_UW = values_UW.abs() <= largest  # false for NaN
    if bool(fine_UW.all()):
        return
    place, column = (int(i) for i in (~fine_UW).nonzero()[0])
    row = place if ids_U is None else int(ids_U[place])
    raise ValueError(
        f"{name}: row {row} holds {float(values_UW[place, column])} in column {column}; "
        f"rows must be finite and at most {largest:.6g}"
    )


def fp8_power(largest: Tensor) -> Tensor:
    """Largest magnitudes fp32 -> smallest k >= -126, int32, so that they round to at most 448 * 2^k in E4M3."""
    bits = largest.contiguous().view(torch.int32)
    rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20  # exponent and three bits of the significand, nearest even
    return ((rounded >> 3) - 127 - 8 + ((rounded & 7) == 7).to(torch.int32)).clamp(min=-126)


def _int8_power(largest: Tensor) -> Tensor:
    """Largest magnitudes fp32 -> smallest k >= -126, int32, so that they round to at most 127 * 2^k."""
    bits = largest.contiguous().view(torch.int32)
    return ((bits >> 23) - 127 - 6 + ((bits & 0x7FFFFF) >= 0x7F0000).to(torch.int32)).clamp(min=-126)


def _distinct(sorted_UW: Tensor) -> Tensor:
    """Rows ascending [U, W] -> their first eight distinct values [U, L]; where there are fewer the last is repeated."""
    rank_UW = functional.pad((sorted_UW.diff(dim=1) != 0).cumsum(dim=1), (1, 0)).clamp(max=LEVELS - 1)
    found_UL = sorted_UW[:, -1:].expand(-1, LEVELS).contiguous()
    return found_UL.scatter_reduce(1, rank_UW, sorted_UW, reduce="amin", include_self=True)


def _levels(values_UW: Tensor) -> Tensor:
    """Values [U, W] -> eight ascending levels [U, L], fp32: the distinct values where they suffice, else Lloyd's."""
    sorted_UW = values_UW.sort(dim=1).values
    exact_UL = _distinct(sorted_UW)
    few_U1 = (sorted_UW.diff(dim=1) != 0).sum(dim=1, keepdim=True) < LEVELS
    if bool(few_U1.all()):
        return exact_UL
    sorted_UW = sorted_UW.double()
    place_L = ((torch.arange(LEVELS, device=values_UW.device) + 0.5) * values_UW.shape[1] / LEVELS).long()
    share_L = (torch.arange(LEVELS, dtype=torch.float64, device=values_UW.device) + 0.5) / LEVELS
    normal_L = torch.tensor(NORMAL_LEVELS, dtype=torch.float64, device=values_UW.device)
    low_U1, high_U1 = sorted_UW[:, :1], sorted_UW[:, -1:]
    starts = (
        sorted_UW[:, place_L],  # quantiles: the best start with outliers
        low_U1 + (high_U1 - low_U1) * share_L,  # the range in equal parts: with flat distributions and short rows
        sorted_UW.mean(dim=1, keepdim=True) + sorted_UW.std(dim=1, keepdim=True) * normal_L,
    )
    best_UL, least_U1 = exact_UL.double(), torch.full_like(low_U1, torch.inf)
    for start_UL in starts:
        level_UL = _lloyd(sorted_UW, start_UL)
        chosen_UW = level_UL.gather(1, _nearest(level_UL, sorted_UW))
        error_U1 = (sorted_UW - chosen_UW).square().sum(dim=1, keepdim=True)
        best_UL = torch.where(error_U1 < least_U1, level_UL, best_UL)
        least_U1 = torch.minimum(error_U1, least_U1)
    return torch.where(few_U1, exact_UL, best_UL.float())


def _lloyd(sorted_UW: Tensor, level_UL: Tensor) -> Tensor:
    """Lloyd's iterations of all rows at once: on sorted values a cell is a range, and its mean a difference of sums."""
    rows, width = sorted_UW.shape
    total_UW = functional.pad(sorted_UW.cumsum(dim=1), (1, 0))
    zero_U1 = torch.zeros(rows, 1, dtype=torch.int64, device=sorted_UW.device)
    for _ in range(LLOYD_STEPS):
        border_U7 = ((level_UL[:, 1:] + level_UL[:, :-1]) / 2).contiguous()
        edge_U9 = torch.cat([zero_U1, torch.searchsorted(sorted_UW, border_U7), zero_U1 + width], dim=1)
        count_UL = edge_U9.diff(dim=1)
        mean_UL = total_UW.gather(1, edge_U9).diff(dim=1) / count_UL.clamp(min=1)
        level_UL = torch.where(count_UL > 0, mean_UL, level_UL)
    return level_UL


def _nearest(levels_UL: Tensor, values_UW: Tensor) -> Tensor:
    """Ascending levels [U, L], values [U, W] -> the number of the nearest level [U, W]; a tie takes the lower one."""
    border_U7 = ((levels_UL[:, 1:] + levels_UL[:, :-1]) / 2).contiguous()
    return torch.searchsorted(border_U7, values_UW.contiguous())


def _pack(codes_UW: Tensor) -> Tensor:
    """Codes 0..7 [U, W] -> bytes [U, ceil(3 W / 8)]: eight codes fill three bytes, lowest bits first."""
    width = codes_UW.shape[1]
    codes_U8 = functional.pad(codes_UW, (0, -width % 8)).unflatten(1, (-1, 8))
    shift_8 = torch.arange(0, 24, 3, device=codes_UW.device)
    word_U1 = (codes_U8 << shift_8).sum(dim=-1, keepdim=True)
    bytes_U3 = (word_U1 >> torch.tensor([0, 8, 16], device=codes_UW.device)) & 255
    return bytes_U3.flatten(1)[:, : -(-3 * width // 8)].to(torch.uint8)
