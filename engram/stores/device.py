"""Rows as one tensor, in any row format, on the module's device: HBM, or RAM on a machine without a GPU.

Shapes: R rows, n rows, U distinct rows, W row width, b bytes a row.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from engram.kernels.dispatch import gather_rows, on_kernels
from engram.stores.base import TableSpec
from engram.stores.formats import get_format

PLAIN_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Row formats that are kept as numbers [R, W]; the others are bytes [R, b]."""
CHUNK, CPU_CHUNK = 1 << 20, 1 << 16
"""Values that are made or converted at a time, so that the table is never there twice. Making one takes about 60 bytes
of temporaries, which fit a CPU's cache with the smaller number: twice as fast there; a GPU would wait for launches."""

_UNFILLED = ContextVar("engram_unfilled", default=False)


@contextmanager
def unfilled() -> Iterator[None]:
    """Tables in memory that are made inside begin as zeros: for a loader that writes every row, or drops the table.

    Normal initial values take 23 s a GB on one core.
    """
    token = _UNFILLED.set(True)
    try:
        yield
    finally:
        _UNFILLED.reset(token)


class DeviceStore(nn.Module):
    """Rows as one tensor on the module's device (HBM, or RAM on a machine without a GPU).

    format  row format, a name of `engram.stores.formats`.

    A buffer, not a parameter: it is in `state_dict()`, casts leave it alone, and a move from the meta device (or
    `to_empty`) gives the initial values again instead of uninitialised memory.
    """

    rows: Tensor

    kind = "device"
    restarts = 0  # moves that gave the initial values again

    def __init__(self, spec: TableSpec, format: str = "fp32") -> None:
        super().__init__()
        self.spec, self.codec = spec, get_format(format, spec.width)
        self.dtype = PLAIN_DTYPES.get(format, torch.uint8)
        self.plain = format in PLAIN_DTYPES
        self.shape = (spec.rows, spec.width if self.plain else self.codec.row_bytes)
        self._allocate(torch.get_default_device())

    @property
    def device(self) -> torch.device:
        return self.rows.device

    def _allocate(self, device: torch.device) -> None:
        # zeros come from the operating system untouched: a table costs nothing until its rows are used
        self.register_buffer("rows", torch.zeros(self.shape, dtype=self.dtype, device=device))
        self._fill()

    def _fill(self) -> None:
        """Write the initial values, a chunk of rows at a time; zeros are zero bytes in every format."""
        if self.spec.zeros or self.rows.is_meta or _UNFILLED.get():
            return
        step = max(1, (CPU_CHUNK if self.rows.device.type == "cpu" else CHUNK) // self.spec.width)
        for start in range(0, self.spec.rows, step):
            ids_n = torch.arange(start, min(start + step, self.spec.rows), device=self.rows.device)
            self.rows[start : start + len(ids_n)] = self._stored(self.spec.initial(ids_n))

    def _stored(self, values_UW: Tensor) -> Tensor:
        """Values fp32 [U, W] as the table keeps them."""
        return values_UW.to(self.dtype) if self.plain else self.codec.encode(values_UW)

    def fits(self, saved: Tensor) -> bool:
        """Whether saved rows can be loaded: values, or bytes of this table's format."""
        values = list(saved.shape) == [self.spec.rows, self.spec.width] and saved.is_floating_point()
        return values or (saved.dtype == self.dtype and tuple(saved.shape) == self.shape)

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
        """Copy saved rows in: values of any dtype (into the table's format), or bytes in that format.

        A table on the meta device becomes real first.
        """
        metadata, strict, missing, _, errors = args[:5]
        saved = state_dict.get(prefix + "rows")
        if saved is None:
            if strict:
                missing.append(prefix + "rows")
        elif not self.fits(saved):
            errors.append(
                f"{prefix}rows: saved {list(saved.shape)} {saved.dtype}, this table has {list(self.shape)} in format "
                f"{self.codec.name}, and takes values [{self.spec.rows}, {self.spec.width}]"
            )
        elif metadata.get("assign_to_params_buffers", False) and saved.dtype == self.dtype:
            self.rows = saved
        else:
            if self.rows.is_meta:
                self.rows = torch.empty(self.shape, dtype=self.dtype, device=saved.device)
            step = max(1, (CPU_CHUNK if self.rows.device.type == "cpu" else CHUNK) // self.spec.width)
            for start in range(0, self.spec.rows, step):
                part = saved[start : start + step]
                self.rows[start : start + step] = part if saved.dtype == self.dtype else self._stored(part.float())

    def gather(self, ids_n: Tensor, out: Tensor | None = None) -> Tensor:
        """Row numbers [n] -> values [n, W], fp32.

        A row outside the table raises IndexError on a CPU; a kernel gives NaN for it.
        """
        if self.kind == "device" and on_kernels(self.rows, ids_n):
            values_nW = gather_rows(self.rows, ids_n, self.codec.kind, self.spec.width)
            return values_nW if out is None else out.copy_(values_nW)
        if self.dtype == torch.float32:
            return torch.index_select(self.rows, 0, ids_n, out=out)
        rows_nb = self.rows.index_select(0, ids_n)
        if not self.plain:
            return self.codec.decode(rows_nb, out)
        return rows_nb.float() if out is None else out.copy_(rows_nb)

    def update(self, ids_U: Tensor, values_UW: Tensor) -> None:
        """Write the values of distinct rows, in place."""
        self.rows.index_copy_(0, ids_U, self._stored(values_UW))

    def read_range(self, start: int, stop: int) -> Tensor:
        """Rows start to stop - 1 exactly as they are stored: bytes of the row format, uint8 [n, b], on a CPU."""
        return self.rows[start:stop].detach().cpu().view(torch.uint8)

    @torch.no_grad()
    def write_range(self, start: int, bytes_nb: Tensor) -> None:
        """Put rows from `start` on to bytes [n, b] that `read_range` gave. Raises ValueError where they do not fit."""
        if bytes_nb.shape[1] != self.codec.row_bytes or not 0 <= start <= self.spec.rows - len(bytes_nb):
            raise ValueError(
                f"rows: bytes {list(bytes_nb.shape)} from row {start} on do not fit a table of {self.spec.rows} rows "
                f"of {self.codec.row_bytes} bytes"
            )
        self.rows[start : start + len(bytes_nb)].copy_(bytes_nb.view(self.dtype))

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
