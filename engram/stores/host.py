"""Rows in this machine's RAM: a mapping of our own on huge pages where the system grants them, page-locked if asked.

A `torch.empty(pin_memory=True)` of a large table rounds up to the next power of two; a mapping of our own does not, can
be advised to use 2 MiB pages, and is real only where rows were touched.

Shapes: R rows, n looked-up rows, U distinct rows, W row width.
"""

from __future__ import annotations

import logging
import mmap
import re
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from engram.kernels.dispatch import gather_rows, on_kernels, put_rows
from engram.stores.base import TableSpec
from engram.stores.device import DeviceStore
from engram.stores.formats import get_format
from engram.strict import ConfigError

REGISTER_CHUNK = 64 * 2**30  # bytes page-locked at a time: single larger requests fail on some drivers
SELF_TEST_ROWS = 64
log = logging.getLogger("engram")


class HostStore(DeviceStore):
    """Rows in pageable host memory, whatever device the model is on. Saved with the model, like the device store's.

    Raises ConfigError when the table is larger than this machine's memory.
    """

    kind = "host"

    def __init__(self, spec: TableSpec, format: str = "fp32") -> None:
        needed, there = spec.rows * get_format(format, spec.width).row_bytes, psutil.virtual_memory().total
        if needed > there:
            raise ConfigError(
                f"placement: a table of {spec.rows:,} x {spec.width} values needs {needed:,} bytes of host "
                f"memory, there are {there:,}; use placement 'disk', fewer rows, or narrower ones"
            )
        super().__init__(spec, format)

    def _allocate(self, device: torch.device) -> None:
        if device.type == "meta":
            super()._allocate(device)
            return
        self.register_buffer("rows", anonymous(*self.shape, self.dtype))
        self._fill()

    def _apply(self, fn: Any, recurse: bool = True) -> HostStore:
        """Moves of the model leave the rows where they are; a table on the meta device becomes real with the model."""
        if self.rows.is_meta:
            super()._apply(fn)
        return self

    def huge_page_bytes(self) -> int:
        """Bytes of the table that lie on 2 MiB pages right now, as the kernel counts them."""
        return huge_bytes(self.rows)

    def bytes_held(self) -> dict[str, int]:
        """Bytes in host memory."""
        return {self.kind: self.rows.numel() * self.rows.element_size()}


class PinnedStore(HostStore):
    """Host rows that are page-locked, so that a GPU reads and writes them in place (unified virtual addressing).

    reader  the GPU whose kernels do so, the default device of the making (or the current GPU); None where no kernels
            are used, and rows go through the CPU.

    Where locking is refused (no CUDA device, a limit, a container) the rows stay pageable: `kind` is then "host", and
    one loud line says how many bytes were asked, how many were got, and what to change.
    """

    kind = "pinned"
    reader: torch.device | None = None

    @property
    def device(self) -> torch.device:
        """Where values come out and go in: on the GPU that reads the rows in place, else on the CPU."""
        return self.rows.device if self.reader is None else self.reader

    def _allocate(self, device: torch.device) -> None:
        super()._allocate(device)
        self._pin(device)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy's rows lie in memory of their own, which is not locked yet."""
        super().__setstate__(state)
        self._pin(self.reader or torch.device("cpu"))

    def _pin(self, device: torch.device) -> None:
        """Lock the rows for a model on `device`, or say loudly why not; then read some back."""
        self.kind, self.reader = "pinned", None
        if self.rows.is_meta:
            return
        asked, got, why = self.rows.numel() * self.rows.element_size(), 0, "there is no CUDA device"
        if torch.cuda.is_available():
            got, why = register(self.rows)
        if got < asked:
            self.kind = "host"
            log.warning(
                "pinned rows: %s bytes asked, %s got (%s); rows stay in pageable memory. Raise `ulimit -l` or the "
                "container's memory-lock limit, or set placement: host",
                f"{asked:,}", f"{got:,}", why,
            )  # fmt: skip
            return
        # before the memory is given back; not at exit, when the driver may be gone
        weakref.finalize(self, unregister, self.rows.data_ptr(), asked).atexit = False
        asked_for = device.index if device.type == "cuda" else None
        gpu = torch.device("cuda", torch.cuda.current_device() if asked_for is None else asked_for)
        self.reader = gpu if on_kernels(torch.empty(0, device=gpu)) else None
        self.self_test()

    def gather(self, ids_n: Tensor, out: Tensor | None = None) -> Tensor:
        """Row numbers [n] -> values [n, W], fp32: by few programs of a kernel on the GPU, or as a host store."""
        if self.reader is None:
            return super().gather(ids_n, out)
        values_nW = gather_rows(self.rows, ids_n, self.codec.kind, self.spec.width, background=True)
        return values_nW if out is None else out.copy_(values_nW)

    def update(self, ids_U: Tensor, values_UW: Tensor) -> None:
        """Write the values of distinct rows, over the link where a GPU has them."""
        if self.reader is None:
            super().update(ids_U, values_UW)
        else:
            put_rows(self.rows, ids_U, values_UW if self.plain else self._stored(values_UW))

    def flush(self) -> None:
        """The GPU has written what it was told to."""
        if self.reader is not None:
            torch.cuda.synchronize(self.reader)

    def self_test(self) -> None:
        """Read up to 64 rows back as a forward will, and compare. Raises RuntimeError naming a row that differs.

        In confidential-computing modes a GPU reads garbage from host memory without any error.
        """
        count = min(SELF_TEST_ROWS, self.spec.rows)  # integers: fp32 has no row numbers beyond 2^24
        ids = torch.arange(count, device="cpu") * (self.spec.rows - 1) // max(1, count - 1)
        there = super().gather(ids)
        back = self.gather(ids.to(self.device)).cpu()
        wrong = (back != there).any(dim=1).nonzero().flatten()
        if len(wrong):
            raise RuntimeError(f"pinned store: row {int(ids[wrong[0]])} came back different; use placement 'host'")


def anonymous(rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A zero-filled tensor [rows, width] in a private mapping, advised to use 2 MiB pages."""
    block = mmap.mmap(-1, max(1, dtype.itemsize * rows * width), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            block.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:  # a kernel without transparent huge pages: only speed is lost
            log.info("host rows: no huge pages (%s)", error)
    return torch.frombuffer(block, dtype=dtype, count=rows * width).view(rows, width)


def huge_bytes(tensor: Tensor) -> int:
    """Bytes of the mapping that holds `tensor` on transparent huge pages; 0 where the kernel does not tell."""
    address, inside, total = tensor.data_ptr(), False, 0
    try:
        lines = Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    for line in lines:
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            first, last = int(found[1], 16), int(found[2], 16)
            inside = first <= address < last
        elif inside and line.startswith("AnonHugePages:"):
            total += int(line.split()[1]) * 1024
    return total


def register(rows: Tensor) -> tuple[int, str]:
    """Page-lock the memory of `rows`, a chunk at a time -> (bytes locked, reason where that is not all).

    What was locked before a refusal is unlocked again, and the error is cleared.
    """
    runtime, size, done = torch.cuda.cudart(), rows.numel() * rows.element_size(), 0
    rows.view(-1)[:: 4096 // rows.element_size()] += (
        0  # every page is real first: locking faults them in one by one otherwise
    )
    while done < size:
        chunk = min(REGISTER_CHUNK, size - done)
        code = int(runtime.cudaHostRegister(rows.data_ptr() + done, chunk, 0))
        if code != 0:
            unregister(rows.data_ptr(), done)
            with suppress(RuntimeError, AssertionError):  # torch reports and so clears an old error at its next launch
                torch.zeros(1, device="cuda")
            return done, f"cudaHostRegister says {code}"
        done += chunk
    return done, ""


def unregister(address: int, size: int) -> None:
    """Unlock memory that was locked by `register`."""
    for start in range(0, size, REGISTER_CHUNK):
        torch.cuda.cudart().cudaHostUnregister(address + start)
