"""Rows as one tensor, fp32 or bf16, on the module's device: HBM, or RAM on a machine without a GPU."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from engram.kernels.dispatch import PLAIN, gather_rows, on_kernels
from engram.stores.base import TableSpec, fill


class DeviceStore(nn.Module):
    """Rows as one tensor on the module's device (HBM, or RAM on a machine without a GPU), kept as fp32 or bf16.

    A buffer, not a parameter: it is in `state_dict()`, casts leave it alone, and a move from the meta device (or
    `to_empty`) gives the initial values again instead of uninitialised memory.
    """

    rows: Tensor

    kind = "device"
    restarts = 0  # moves that gave the initial values again

    def __init__(self, spec: TableSpec, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.spec, self.dtype = spec, dtype
        self._allocate(torch.get_default_device())

    @property
    def device(self) -> torch.device:
        return self.rows.device

    def _allocate(self, device: torch.device) -> None:
        # zeros come from the operating system untouched: a table costs nothing until its rows are used
        self.register_buffer("rows", torch.zeros(self.spec.rows, self.spec.width, dtype=self.dtype, device=device))
        if not (self.spec.zeros or self.rows.is_meta):
            fill(self.rows, self.spec)

    def _apply(self, fn: Any, recurse: bool = True) -> DeviceStore:
        """Follow moves and sharing, ignore dtypes; memory that a move would leave uninitialised is initialised again.

        What `fn` does is read off a probe: a number that no freed block can hold by chance, since it is new every time.
        """
        number = float(random.getrandbits(20))
        probe = torch.full((1,), number, device=self.rows.device)
        moved = fn(probe)
        if moved.is_meta or probe.is_meta or float(moved.to(torch.float32)) not in (number, _as_16_bit(number, moved)):
            self._allocate(moved.device)
            self.restarts += 1
        elif moved.dtype == probe.dtype == self.dtype:
            self.rows = fn(self.rows)
        else:
            self.rows = self.rows.to(moved.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Copy saved rows in, whatever their dtype; a table on the meta device becomes real first."""
        metadata, strict, missing, _, errors = args[:5]
        saved = state_dict.get(prefix + "rows")
        if saved is None:
            if strict:
                missing.append(prefix + "rows")
        elif list(saved.shape) != [self.spec.rows, self.spec.width]:
            errors.append(
                f"{prefix}rows: saved {list(saved.shape)}, this table has [{self.spec.rows}, {self.spec.width}]"
            )
        elif metadata.get("assign_to_params_buffers", False) and saved.dtype == self.dtype:
            self.rows = saved
        else:
            if self.rows.is_meta:
                self.rows = torch.empty(self.spec.rows, self.spec.width, dtype=self.dtype, device=saved.device)
            self.rows.copy_(saved)

    def gather(self, ids_n: Tensor, out: Tensor | None = None) -> Tensor:
        """Row numbers [n] -> values [n, W], fp32.

        A row outside the table raises IndexError on a CPU; a kernel gives NaN for it.
        """
        if self.kind == "device" and on_kernels(self.rows, ids_n):
            values_nW = gather_rows(self.rows, ids_n, PLAIN, self.spec.width)
            return values_nW if out is None else out.copy_(values_nW)
        if self.dtype == torch.float32:
            return torch.index_select(self.rows, 0, ids_n, out=out)
        values_nW = self.rows.index_select(0, ids_n)
        return values_nW.float() if out is None else out.copy_(values_nW)

    def update(self, ids_U: Tensor, values_UW: Tensor) -> None:
        """Write the values of distinct rows, in place."""
        self.rows.index_copy_(0, ids_U, values_UW.to(self.rows.dtype))

    def bytes_held(self) -> dict[str, int]:
        """Bytes by device type."""
        return {self.rows.device.type: self.rows.numel() * self.rows.element_size()}

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        """Nothing to let go of: the tensor belongs to the module."""

    def extra_repr(self) -> str:
        return f"{self.spec}"


def _as_16_bit(number: float, like: Tensor) -> float:
    """`number` as the dtype of `like` rounds it: a cast is a move, too."""
    return float(torch.tensor(number).to(like.dtype).float())
