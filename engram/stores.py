"""Where rows live, behind one small interface: gather, update, bytes held.

    store = DeviceStore(rows=1_000_000, width=64, seed=0, std=0.02)
    values_nW = store.gather(ids_n); store.update(ids_U, values_UW)

Initial values are pure functions of (seed, row, column): splitmix64 of a counter and the sum of its eight bytes, scaled
(integers up to the last multiplication, so every device and every store gives the same bits; log and cos would not).

Shapes: n looked-up rows (with duplicates), U distinct rows, W row width.
"""

from __future__ import annotations

import random
from typing import Any, Protocol

import torch
from torch import Tensor, nn

BYTE_SUM_STD = (8 * (256**2 - 1) / 12) ** 0.5  # standard deviation of the sum of eight uniform bytes
INIT_CHUNK = 1 << 20  # values made at a time, so that initialising never doubles the table
_GAMMA, _M1, _M2 = -7046029254386353131, -4658895280553007687, -7723592293110705685  # splitmix64, as signed int64


class Store(Protocol):
    """What a table asks of the place where its rows live."""

    def gather(self, ids_n: Tensor) -> Tensor:
        """Row numbers [n] -> values [n, W], a tensor of their own."""

    def update(self, ids_U: Tensor, values_UW: Tensor) -> None:
        """Write the values of distinct rows."""

    def bytes_held(self) -> dict[str, int]:
        """Bytes by place, for example {"cpu": 4096}."""


def _mix(x: Tensor) -> Tensor:
    """splitmix64's output function on int64 tensors; `>>` is arithmetic, so the shifted-in sign bits are masked off."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _M1
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _M2
    return x ^ ((x >> 31) & (2**33 - 1))


def initial_rows(seed: int, ids_n: Tensor, width: int, std: float) -> Tensor:
    """Initial fp32 values [n, width] of rows `ids_n`: near-normal, mean 0, deviation `std`, |x| <= 4.9 std."""
    key = _mix(torch.tensor(seed, dtype=torch.int64, device=ids_n.device) + _GAMMA)
    column_W = torch.arange(width, dtype=torch.int64, device=ids_n.device)
    counter_nW = ids_n.to(torch.int64).unsqueeze(-1) * width + column_W
    bits_nW = _mix((counter_nW + 1) * _GAMMA + key)
    total_nW = torch.zeros_like(bits_nW)
    for shift in range(0, 64, 8):
        total_nW += (bits_nW >> shift) & 255
    return (2 * total_nW - 8 * 255).to(torch.float32) * (std / (2 * BYTE_SUM_STD))


class DeviceStore(nn.Module):
    """Rows as one fp32 tensor on the module's device (HBM, or RAM on a machine without a GPU).

    A buffer, not a parameter: it is in `state_dict()`, casts leave it alone, and a move from the meta device (or
    `to_empty`) gives the initial values again instead of uninitialised memory.
    """

    rows: Tensor

    def __init__(self, rows: int, width: int, seed: int, std: float, zeros: bool = False) -> None:
        super().__init__()
        self.count, self.width, self.seed, self.std, self.zeros = rows, width, seed, std, zeros
        self._allocate(torch.get_default_device())

    def _allocate(self, device: torch.device) -> None:
        # zeros come from the operating system untouched: a table costs nothing until its rows are used
        self.register_buffer("rows", torch.zeros(self.count, self.width, dtype=torch.float32, device=device))
        if self.zeros or self.rows.is_meta:
            return
        step = max(1, INIT_CHUNK // self.width)
        for start in range(0, self.count, step):
            ids = torch.arange(start, min(start + step, self.count), device=device)
            self.rows[start : start + len(ids)] = initial_rows(self.seed, ids, self.width, self.std)

    def _apply(self, fn: Any, recurse: bool = True) -> DeviceStore:
        """Follow moves and sharing, ignore dtypes; memory that a move would leave uninitialised is initialised again.

        What `fn` does is read off a probe: a number that no freed block can hold by chance, since it is new every time.
        """
        number = float(random.getrandbits(20))
        probe = torch.full((1,), number, device=self.rows.device)
        moved = fn(probe)
        if moved.is_meta or probe.is_meta or float(moved.to(torch.float32)) not in (number, _as_16_bit(number, moved)):
            self._allocate(moved.device)
        elif moved.dtype == probe.dtype:
            self.rows = fn(self.rows)
        else:
            self.rows = self.rows.to(moved.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Copy saved rows in as fp32, whatever their dtype; a table on the meta device becomes real first."""
        metadata, strict, missing, _, errors = args[:5]
        saved = state_dict.get(prefix + "rows")
        if saved is None:
            if strict:
                missing.append(prefix + "rows")
        elif list(saved.shape) != [self.count, self.width]:
            errors.append(f"{prefix}rows: saved {list(saved.shape)}, this table has [{self.count}, {self.width}]")
        elif metadata.get("assign_to_params_buffers", False) and saved.dtype == torch.float32:
            self.rows = saved
        else:
            if self.rows.is_meta:
                self.rows = torch.empty(self.count, self.width, dtype=torch.float32, device=saved.device)
            self.rows.copy_(saved)

    def gather(self, ids_n: Tensor) -> Tensor:
        """Row numbers [n] -> values [n, W], fp32. Raises IndexError for a row outside the table (CPU)."""
        return self.rows.index_select(0, ids_n)

    def update(self, ids_U: Tensor, values_UW: Tensor) -> None:
        """Write the values of distinct rows, in place."""
        self.rows.index_copy_(0, ids_U, values_UW.to(self.rows.dtype))

    def bytes_held(self) -> dict[str, int]:
        """Bytes by device type."""
        return {self.rows.device.type: self.rows.numel() * self.rows.element_size()}

    def extra_repr(self) -> str:
        return f"rows={self.count}, width={self.width}, init={'zeros' if self.zeros else f'normal({self.std})'}"


def _as_16_bit(number: float, like: Tensor) -> float:
    """`number` as the dtype of `like` rounds it: a cast is a move, too."""
    return float(torch.tensor(number).to(like.dtype).float())
