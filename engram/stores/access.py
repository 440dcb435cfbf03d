"""The way to the rows of one file: by pages with O_DIRECT, or through the page cache; one of them at a time.

    access = RowAccess(path, fd, start, layout, touched, row_bytes=256)
    access.choose("auto", direct=True); bytes_nb = access.read(ids_n)
    old_tb = access.before(ids_U, keep_U); ...journal...; access.write(ids_U, new_Ub)

Never both at once, so that a read sees the write before it:

    direct   O_DIRECT reads and writes of whole pages. To write a row its page is read, changed and written; the pages
             of the latest two calls are still there (a step gathers the rows of the next one, and then updates its
             own), and pages without a touched row are known to be zero: an update costs one write a page.
    cached   everything through the page cache: reads by mapping or positioned reads, row-sized positioned writes (by
             kernel aio where it is permitted, which does many of them in one system call: one by one from Python they
             took 1.7 times as long, and a third of the speed of the thread that computes meanwhile). A
             mapping reads a row 10-20 times cheaper than a system call, but only when the file fits the cache: "auto"
             takes it while the space the file really uses is below half of the memory that is free. Rows are never
             written through the mapping: a full disk would be a signal that kills, not an error.

Row numbers are sorted and distinct throughout. Shapes: n rows, U rows to be written, b bytes a row, p pages.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engram.stores.queues import open_transfer
from engram.stores.reading import PageBuffer, Transfer, TransferError, free_memory, write_inline
from engram.stores.rowfile import PAGE, Layout, RowBits
from engram.strict import ConfigError

RUN_PAGES = 32  # pages next to each other that one request moves
KEPT_CALLS = 2  # whose pages are kept
INLINE_WRITES = 64  # fewer than these do not pay for a queue
log = logging.getLogger("engram")


class RowAccess:
    """Rows of an open file, as bytes. Every failure is a RuntimeError naming file and row.

    fd       of the file, through the page cache; its lock is the caller's.
    start    byte at which the row data begins, a multiple of a page.
    touched  one bit a row; rows without it are zeros in the file and are never asked for by `read`.
    way      what runs, in words.
    window   the mapped row data as bytes, and `mapped` the same as a uint8 tensor, where the way is a mapping.
    """

    def __init__(
        self, path: Path, fd: int, start: int, layout: Layout, touched: RowBits, read_only: bool = False
    ) -> None:
        self.path, self.fd, self.layout = path, fd, layout
        self.way = "not chosen yet"
        self.window: np.ndarray | None = None
        self.mapped: Tensor | None = None
        self._mapping: mmap.mmap | None = None
        self._announced = RowBits(1)
        self._start, self._touched, self._read_only = start, touched, read_only
        self._transfer: Transfer | None = None
        self._writer: Transfer | None = None
        self._direct_fd = -1
        self._options = ("auto", True, 16, 120.0)
        status = os.fstat(fd)
        self._same = (status.st_dev, status.st_ino, status.st_size)
        self._kept: list[tuple[np.ndarray, PageBuffer]] = []  # sorted pages and their bytes, as the file has them
        self._spare = PageBuffer()

    def choose(self, backend: str = "auto", direct: bool = True, threads: int = 16, timeout_s: float = 120.0) -> None:
        """Pick the way, and say once which one runs. Raises ConfigError where the one asked for is not permitted."""
        self._options = (backend, direct, threads, timeout_s)
        self.window = self.mapped = self._mapping = None
        mapped = (backend == "mapping" or (backend == "auto" and self.fits_the_cache())) and self._map(backend)
        if not mapped:
            self._direct_fd = self._open_direct() if direct else -1
            self._transfer = open_transfer(backend, self._direct_fd >= 0, threads, timeout_s)
        if self._direct_fd < 0:
            with contextlib.suppress(ConfigError):  # without it rows are written one by one
                if not self._read_only:
                    self._writer = self._writer or open_transfer("aio", False, timeout_s=timeout_s)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)
        name = "mapping" if self._transfer is None else self._transfer.name
        self.way = f"{name}, {'O_DIRECT' if self._direct_fd >= 0 else 'page cache'}"
        log.info("disk store %s: %s; %s bytes on disk", self.path, self.way, f"{self.bytes_on_disk():,}")

    def reconsider(self) -> None:
        """After a flush: a mapped file that has outgrown the page cache is read with O_DIRECT from now on."""
        if self.window is not None and self._options[0] == "auto" and not self.fits_the_cache():
            self.choose(*self._options)

    def fits_the_cache(self) -> bool:
        """Whether the space that the file really uses is below half of the memory that is free."""
        return self.bytes_on_disk() <= free_memory() // 2

    def bytes_on_disk(self) -> int:
        """Bytes that the file really uses; a sparse file uses less than its size."""
        return os.fstat(self.fd).st_blocks * 512

    def buffer_bytes(self) -> int:
        """Bytes of the page buffers."""
        return self._spare.size + sum(buffer.size for _, buffer in self._kept)

    def _map(self, backend: str) -> bool:
        """Map the row data, with random advice (the read-ahead of one device was 8 MiB a row) -> whether it worked.

        Raises ConfigError where it did not and "mapping" was asked for.
        """
        try:
            mapping = mmap.mmap(
                self.fd, self._same[2], access=mmap.ACCESS_READ if self._read_only else mmap.ACCESS_WRITE
            )
        except (OSError, ValueError, OverflowError) as error:
            if backend == "mapping":
                raise ConfigError(
                    f"backend: 'mapping' of {self._same[2]:,} bytes is refused ({error}); raise the limit of address "
                    f"space (ulimit -v), or use 'auto'"
                ) from error
            log.warning("disk store %s: no mapping here (%s)", self.path, error)
            return False
        if hasattr(mmap, "MADV_RANDOM"):
            mapping.madvise(mmap.MADV_RANDOM)
            self._mapping, self._announced = mapping, RowBits(self._same[2] // PAGE)
        self.window = np.frombuffer(mapping, np.uint8, self.layout.data_bytes, self._start)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that memory is read-only: nobody writes through the tensor
            self.mapped = torch.from_numpy(self.window)
        return True

    def announce(self, ids_n: np.ndarray) -> None:
        """Before rows (in any order) are read through the mapping: pages asked for the first time are all requested at
        once, since one fault after the other reads a cold file at a quarter of that speed."""
        if self._mapping is None:
            return
        pages = self.layout.offsets(ids_n) // PAGE
        fresh = np.unique(pages[~self._announced.get(pages)])
        self._announced.set(fresh)
        for page in fresh.tolist():
            self._mapping.madvise(mmap.MADV_WILLNEED, self._start + page * PAGE, self.layout.pages_per_row * PAGE)

    def _open_direct(self) -> int:
        """A second descriptor with O_DIRECT, or -1 where the file system refuses a page through it."""
        fd = -1
        try:
            fd = os.open(self.path, (os.O_RDONLY if self._read_only else os.O_RDWR) | os.O_CLOEXEC | os.O_DIRECT)
            status, page = os.fstat(fd), PageBuffer().take(PAGE).data
            if (status.st_dev, status.st_ino) == self._same[:2] and os.preadv(fd, [page], 0) == PAGE:
                os.fsync(fd)  # nothing of this file is left dirty in the page cache
                return fd
            raise OSError(errno.EINVAL, "a page could not be read")
        except (OSError, AttributeError) as error:
            if fd >= 0:
                os.close(fd)
            log.warning("disk store %s: no O_DIRECT here (%s): reading through the page cache", self.path, error)
            return -1

    def check(self, ids: np.ndarray) -> None:
        """The file is still the one that was opened, whole: a mapping of one cut short would kill the process."""
        with self.explained(ids):
            status = os.fstat(self.fd)
            if status.st_nlink == 0:
                raise OSError(errno.ENOENT, "the file was removed or replaced while it was open")
            if (status.st_dev, status.st_ino, status.st_size) != self._same:
                raise OSError(errno.EIO, f"the file has {status.st_size:,} bytes, it had {self._same[2]:,}")

    @contextlib.contextmanager
    def explained(self, ids: np.ndarray) -> Iterator[None]:
        """Errors of the system, as RuntimeError naming file and row; `ids` are the rows that were wanted, or none."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            self.forget()
            raise RuntimeError(f"disk store {self.path}: {self._row_of(error, ids)}{error}") from error
        except BaseException:
            self.forget()
            raise

    def _row_of(self, error: Exception, ids: np.ndarray) -> str:
        if len(ids) == 0:
            return ""
        if isinstance(error, TransferError):  # the first wanted row that the failed piece of the file holds
            ends = self.layout.offsets(ids) + self._start + self.layout.row_bytes
            return f"row {int(ids[min(int(np.searchsorted(ends, error.place, side='right')), len(ids) - 1)])}: "
        return f"row {int(ids[0])}: " if len(ids) == 1 else f"row {int(ids[0])} or another of {len(ids)}: "

    def read(self, ids_n: np.ndarray) -> np.ndarray:
        """Touched rows [n] -> their bytes [n, b] in the file."""
        if not len(ids_n):
            return np.empty((0, self.layout.row_bytes), dtype=np.uint8)
        flat, places_n = self.locate(ids_n)
        return _windows(flat, self.layout.row_bytes)[places_n]

    def locate(self, ids_n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Touched rows [n], at least one -> bytes that hold them until the next call, and where each row begins."""
        if self.window is not None:
            self.announce(ids_n)
            return self.window, self.layout.offsets(ids_n)
        pages, places_n = self._pages_of(ids_n)
        return self._load(pages, ids_n), places_n

    def before(self, ids_U: np.ndarray, keep_U: np.ndarray) -> np.ndarray:
        """Rows about to be written -> the bytes [t, b] of those marked in `keep_U` (touched ones)."""
        if self._direct_fd < 0:
            return self.read(ids_U[keep_U])
        pages, places = self._pages_of(ids_U)
        return _windows(self._load(pages, ids_U, blank=True), self.layout.row_bytes)[places[keep_U]]

    def write(self, ids_U: np.ndarray, new_Ub: np.ndarray) -> None:
        """Rows [U] and their bytes [U, b] -> the file."""
        if self._direct_fd < 0:
            self.write_cached(ids_U, new_Ub)
            return
        pages, places = self._pages_of(ids_U)
        buffer = self._load(pages, ids_U, blank=True)
        _windows(buffer, self.layout.row_bytes)[places] = new_Ub
        assert self._transfer is not None
        with self.explained(ids_U):
            self._transfer.write(self._direct_fd, *self._runs(pages, buffer, np.arange(len(pages)) * PAGE))
        for kept, other in self._kept:  # the same page, kept for another call
            pages_of_other = other.take(len(kept) * PAGE)
            if pages_of_other.ctypes.data != buffer.ctypes.data:
                there, place = _among(kept, pages)
                pages_of_other.reshape(-1, PAGE)[place] = buffer.reshape(-1, PAGE)[there]

    def _pages_of(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sorted rows -> the pages they lie on (distinct, counted from the row data), and each row's place in them."""
        offsets = self.layout.offsets(ids)
        first = offsets // PAGE
        if self.layout.pages_per_row == 1:
            pages = first[np.diff(first, prepend=-1) > 0]
        else:
            pages = np.unique(first[:, None] + np.arange(self.layout.pages_per_row))
        return pages, np.searchsorted(pages, first) * PAGE + offsets % PAGE

    def _load(self, pages: np.ndarray, ids: np.ndarray, blank: bool = False) -> np.ndarray:
        """Pages -> their bytes, one after another. With O_DIRECT those of the latest calls are not read again.

        blank  do not read pages without a touched row: they are zero.
        """
        direct = self._direct_fd >= 0
        for kept, there in self._kept:
            if np.array_equal(pages, kept):
                return there.take(len(pages) * PAGE)
        spare = self._spare
        buffer = spare.take(len(pages) * PAGE)
        view = buffer.reshape(-1, PAGE)
        missing = np.arange(len(pages))
        for kept, other in self._kept:
            same, place = _among(kept, pages[missing])
            view[missing[same]] = other.take(len(kept) * PAGE).reshape(-1, PAGE)[place]
            missing = np.delete(missing, same)
        if blank and len(missing):
            written = np.zeros(len(missing), dtype=bool)
            for rows in self.layout.rows_on(pages[missing]):
                written |= self._touched.get(rows)
            view[missing[~written]] = 0
            missing = missing[written]
        if len(missing):
            assert self._transfer is not None
            fd = self._direct_fd if direct else self.fd
            with self.explained(ids):
                self._transfer.read(fd, *self._runs(pages[missing], buffer, missing * PAGE))
        if direct:
            oldest = self._kept.pop(0)[1] if len(self._kept) == KEPT_CALLS else PageBuffer()
            self._kept.append((pages, spare))
            self._spare = oldest
        return buffer

    def _runs(
        self, pages: np.ndarray, buffer: np.ndarray, starts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Sorted pages and their places in a buffer -> requests; neighbours in both are one, up to RUN_PAGES."""
        breaks = np.ones(len(pages), dtype=bool)
        breaks[1:] = (pages[1:] - pages[:-1] != 1) | (starts[1:] - starts[:-1] != PAGE)
        begins = np.flatnonzero(breaks)
        inside = np.arange(len(pages)) - np.repeat(begins, np.diff(begins, append=len(pages)))
        begins = np.flatnonzero(inside % RUN_PAGES == 0)
        lengths = np.diff(begins, append=len(pages)) * PAGE
        return pages[begins] * PAGE + self._start, lengths, buffer, starts[begins]

    def write_cached(self, ids: np.ndarray, bytes_Ub: np.ndarray) -> None:
        """Sorted distinct rows and their bytes -> the file, through the page cache."""
        length = self.layout.row_bytes
        offsets = self.layout.offsets(ids)
        begins = np.flatnonzero(np.diff(offsets, prepend=-1 - length) != length)
        lengths = np.diff(begins, append=len(ids)) * length
        with self.explained(ids):
            flat = np.ascontiguousarray(bytes_Ub).reshape(-1)
            write = write_inline if self._writer is None or len(begins) < INLINE_WRITES else self._writer.write
            write(self.fd, offsets[begins] + self._start, lengths, flat, begins * length)

    def forget(self) -> None:
        """Drop the page buffers: after a failure a late request may still write into them."""
        self._spare, self._kept = PageBuffer(), []

    def close(self) -> None:
        """Let go of threads, ring, mapping and the descriptor with O_DIRECT."""
        for transfer in (self._transfer, self._writer):
            if transfer is not None:
                transfer.close()
        self._transfer = self._writer = self.window = self.mapped = self._mapping = None
        if self._direct_fd >= 0:
            os.close(self._direct_fd)
        self._direct_fd = -1


def _windows(flat: np.ndarray, length: int) -> np.ndarray:
    """Bytes [N] -> a view [N - length + 1, length] whose row i is the `length` bytes from byte i on."""
    return np.lib.stride_tricks.as_strided(flat, (len(flat) - length + 1, length), (1, 1))


def _among(sorted_k: np.ndarray, wanted_m: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which of the wanted numbers are in `sorted_k` (positions in `wanted_m`), and where they are there."""
    place_m = np.minimum(np.searchsorted(sorted_k, wanted_m), len(sorted_k) - 1)
    found = np.flatnonzero(sorted_k[place_m] == wanted_m)
    return found, place_m[found]
