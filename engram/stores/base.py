"""What every store has in common: its interface, and initial values that are the same bits in each of them.

Initial values are pure functions of (seed, row, column): splitmix64 of a counter and the sum of its eight bytes, scaled
(integers up to the last multiplication, so every device and every store gives the same bits; log and cos would not).

Shapes: R rows, n looked-up rows (with duplicates), U distinct rows, W row width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engram.kernels.dispatch import GAMMA, mix64

BYTE_SUM_STD = (8 * (256**2 - 1) / 12) ** 0.5  # standard deviation of the sum of eight uniform bytes


@dataclass(frozen=True)
class TableSpec:
    """What a store has to hold: R rows of W values, and their initial values (zeros, or near-normal)."""

    rows: int
    width: int
    seed: int = 0
    std: float = 0.02
    zeros: bool = False

    def initial(self, ids_n: Tensor) -> Tensor:
        """Initial fp32 values [n, W] of the rows `ids_n`."""
        if self.zeros:
            return torch.zeros(len(ids_n), self.width, device=ids_n.device)
        return initial_rows(self.seed, ids_n, self.width, self.std)


class Store(Protocol):
    """Where the rows of one table live. Values go in and out as fp32, on `device`, whatever the place and format.

    kind    "device", "host", "pinned" or "disk".
    device  where `gather` puts values and `update` takes them from.
    """

    kind: str
    spec: TableSpec

    @property
    def device(self) -> torch.device: ...

    def gather(self, ids_n: Tensor, out: Tensor | None = None) -> Tensor:
        """Row numbers [n] -> values [n, W], into `out` where it is given. Raises IndexError outside the table."""
        ...

    def update(self, ids_U: Tensor, values_UW: Tensor) -> None:
        """Write the values of distinct rows. Ordered: a later gather sees it."""
        ...

    def bytes_held(self) -> dict[str, int]:
        """Bytes by place, for example {"cpu": 4096}."""
        ...

    def flush(self) -> None:
        """Everything that was updated has reached its place."""
        ...

    def close(self) -> None:
        """Let go of memory, files and threads. Nothing may be asked of the store afterwards."""
        ...


def initial_rows(seed: int, ids_n: Tensor, width: int, std: float) -> Tensor:
    """Initial fp32 values [n, width] of rows `ids_n`: near-normal, mean 0, deviation `std`, |x| <= 4.9 std."""
    key = mix64(torch.tensor(seed, dtype=torch.int64, device=ids_n.device) + GAMMA)
    column_W = torch.arange(width, dtype=torch.int64, device=ids_n.device)
    counter_nW = ids_n.to(torch.int64).unsqueeze(-1) * width + column_W
    bits_nW = mix64((counter_nW + 1) * GAMMA + key)
    total_nW = torch.zeros_like(bits_nW)
    for shift in range(0, 64, 8):
        total_nW += (bits_nW >> shift) & 255
    return (2 * total_nW - 8 * 255).to(torch.float32) * (std / (2 * BYTE_SUM_STD))
