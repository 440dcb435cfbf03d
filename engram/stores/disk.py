"""Rows in one file on a disk, read and written in place; what a run did since its last checkpoint can be undone.

    store = DiskStore("rows.safetensors", spec, identity=digest)     # makes the file (sparse), or opens it
    values_nW = store.gather(ids_n); store.update(ids_U, values_UW)
    g = store.prepare_checkpoint(); ...write a checkpoint that holds g, rename it...; store.commit_checkpoint(g)
    store = DiskStore.open("rows.safetensors", generation=g)         # exactly as it was at checkpoint g

Opening a table always goes back to a checkpoint: updates after the last one are undone, also when the store was closed
in good order. `rowfile.py` has the file, `access.py` and `reading.py` the ways to its rows, `journal.py` the way back.

Shapes: n looked-up rows, U distinct rows, W row width, b bytes a row.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.stores.access import RowAccess
from engram.stores.base import TableSpec
from engram.stores.formats import get_format
from engram.stores.journal import FILE_HEADER, Checkpoints
from engram.stores.rowfile import PAGE, FileInfo, RowBits, check_same, create_file, open_file, read_info, refuse
from engram.strict import choice, require

BACKENDS = ("auto", "mapping", "io_uring", "aio", "threads")
_NO_ROWS = np.empty(0, dtype=np.int64)
log = logging.getLogger("engram")


class DiskStore:
    """Rows of one table in one file. Values go in and out as fp32 on the CPU, whatever the row format.

    identity    text that must be equal when the file is opened again (the digest of the memory it belongs to).
    format      row format, a name of `engram.stores.formats`; an untouched row has the initial value in that format.
    threads     of the pool, where neither io_uring nor kernel aio is permitted or asked for.
    cache_rows  most rows that `warm` keeps in RAM.
    backend     "auto", "mapping", "io_uring", "aio" or "threads".
    direct      False keeps to the page cache; True uses O_DIRECT where the file system has it.
    durable     True syncs the undo journal before rows are overwritten, and so survives a power cut between two
                checkpoints; without it only a kill of the process (a power cut may then damage the last checkpoint).
    generation  checkpoint to go back to; None is the last committed one.
    read_only   no update, any number of readers; refused while the table needs to be rolled back.
    reserve     take the disk space of all rows when the file is made.
    buffer_mb   most memory for pages in flight; larger batches go in pieces.
    Raises ConfigError when the file cannot be made, is another table, is damaged or open elsewhere; it is never
    replaced. A failing read or write raises RuntimeError naming store, file and row.
    """

    kind = "disk"

    def __init__(
        self,
        path: str | Path,
        spec: TableSpec,
        identity: str = "",
        format: str = "fp32",
        threads: int = 16,
        cache_rows: int = 0,
        *,
        backend: str = "auto",
        direct: bool = True,
        durable: bool = False,
        generation: int | None = None,
        read_only: bool = False,
        reserve: bool = False,
        buffer_mb: int = 64,
        timeout_s: float = 120.0,
    ) -> None:
        choice("backend", backend, BACKENDS)
        require(
            threads >= 1 and buffer_mb >= 1 and cache_rows >= 0, "threads, buffer_mb: give at least 1; cache_rows: 0"
        )
        self.path, self.spec, self.read_only = Path(path), spec, read_only
        self._fd = -1
        self._access: RowAccess | None = None
        self._checkpoints: Checkpoints | None = None
        self._rows = get_format(format, spec.width)
        self._even = self._rows.name == "fp32" and PAGE % self._rows.row_bytes == 0
        wanted = FileInfo(spec, format, self._rows.row_bytes, identity)
        if not os.path.exists(self.path):
            require(
                generation is None and not read_only,
                f"path: {path}: there is no table here to read or to go back with; name the file of the checkpoint",
            )
            create_file(self.path, wanted, reserve)
        self._chunk = max(1, (buffer_mb << 20) // (PAGE * wanted.layout.pages_per_row))
        self._cache_rows = cache_rows
        self._lock, self._pid = threading.RLock(), os.getpid()
        self._broken = ""
        try:
            self._open(wanted, durable, generation)
            self._rows_of_file.choose(backend, direct, threads, timeout_s)
        except BaseException:
            self._release()
            raise

    @classmethod
    def open(
        cls, path: str | Path, *, generation: int | None = None, identity: str | None = None, **options: Any
    ) -> DiskStore:
        """Open an existing table as it was at checkpoint `generation`; rows, width and format are the file's.

        identity  None takes the file's own. `options` are those of the constructor. Raises ConfigError as that does.
        """
        require(os.path.exists(path), f"path: {path}: there is no table here; name the file of the checkpoint")
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            refuse(path, error)
        try:
            info, _ = read_info(fd, path)
        finally:
            os.close(fd)
        own = info.identity if identity is None else identity
        return cls(path, info.spec, own, info.row_format, generation=generation, **options)

    def _open(self, wanted: FileInfo, durable: bool, generation: int | None) -> None:
        """Lock and check the file, and put it back to the checkpoint."""
        self._fd = open_file(self.path, self.read_only)
        info, start = read_info(self._fd, self.path)
        check_same(self.path, info, wanted)
        self._bits_offset = start + info.bits_offset
        self._touched, self._saved = RowBits(self.spec.rows), RowBits(self.spec.rows)
        self._touched.load(self._fd, self._bits_offset)
        self._access = RowAccess(self.path, self._fd, start, info.layout, self._touched, self.read_only)
        self._checkpoints = checkpoints = Checkpoints(self.path, self._fd, info, durable)
        if self.read_only:
            require(
                all(os.path.getsize(path) <= FILE_HEADER for _, path in checkpoints.live(generation)),
                f"path: {self.path}: holds updates after its last checkpoint; open it for writing once to undo them",
            )
        else:
            count = checkpoints.roll_back(generation, self._restore, self._settle)
            if count:
                log.info("disk store %s: %d rows put back to checkpoint %d", self.path, count, checkpoints.generation)
        self._cache_ids = np.empty(0, dtype=np.int64)
        self._cache = np.empty((0, self._rows.row_bytes), dtype=np.uint8)
        self._values = torch.empty(0, self.spec.width)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def generation(self) -> int:
        """The number that `prepare_checkpoint` gave last: updates are recorded against that state."""
        return self._use().generation

    @property
    def way(self) -> str:
        """How rows are reached, in words: "io_uring, depth 128, O_DIRECT" or "mapping, page cache"."""
        return self._rows_of_file.way

    @torch.no_grad()
    def gather(self, ids_n: Tensor, out: Tensor | None = None) -> Tensor:
        """Row numbers [n] -> values fp32 [n, W], into `out` where it is given; duplicates are read once.

        Raises IndexError outside the table, RuntimeError naming file and row when they cannot be read.
        """
        with self._lock:
            access, ids = self._rows_of_file, self._check_ids(ids_n)
            access.check(ids)
            if out is None:
                out = torch.empty(len(ids), self.spec.width)
            elif tuple(out.shape) != (len(ids), self.spec.width):
                raise ValueError(f"out: shape {list(out.shape)}, the rows are {[len(ids), self.spec.width]}")
            mapped = self._mapped()
            if mapped is not None and out.dtype == torch.float32 and out.device.type == "cpu":
                self._gather_mapped(mapped, ids, out)
                return out
            unique, inverse = np.unique(ids, return_inverse=True)
            values, place = self._fetch_all(unique)
            index = torch.from_numpy(inverse.reshape(-1) if place is None else place[inverse.reshape(-1)])
            if out.dtype == torch.float32 and out.device.type == "cpu":
                torch.index_select(values, 0, index, out=out)
            else:
                out.copy_(values.index_select(0, index))
            return out

    @torch.no_grad()
    def update(self, ids_U: Tensor, values_UW: Tensor) -> None:
        """Write the values of distinct rows; a later gather sees them. `open` undoes it until there is a checkpoint.

        Raises IndexError outside the table, ValueError for repeated rows, another shape or values the format does not
        hold (nothing is written then), RuntimeError when they cannot be written: the store is then of no more use, and
        opening it again goes back to the last checkpoint.
        """
        with self._lock:
            require(not self.read_only, f"disk store {self.path}: opened with read_only; it takes no updates")
            access, ids = self._rows_of_file, self._check_ids(ids_U)
            if tuple(values_UW.shape) != (len(ids), self.spec.width):
                raise ValueError(f"values: shape {list(values_UW.shape)}, the rows are {[len(ids), self.spec.width]}")
            order = np.argsort(ids, kind="stable")
            ids = ids[order]
            if (ids[1:] == ids[:-1]).any():
                row = int(ids[1:][ids[1:] == ids[:-1]][0])
                raise ValueError(f"disk store {self.path}: row {row} is given twice; sum or choose before the update")
            access.check(ids)
            bytes_Ub = self._rows.encode(values_UW.detach().cpu(), torch.as_tensor(ids_U).cpu()).numpy()[order]
            self._overwrite_all(ids, bytes_Ub)

    @torch.no_grad()
    def read_range(self, start: int, stop: int) -> Tensor:
        """Rows start to stop - 1 exactly as they are stored: bytes of the row format, uint8 [n, b].

        Rows that were never written have their initial values. Raises IndexError and RuntimeError as `gather` does.
        """
        with self._lock:
            access, ids = self._rows_of_file, self._check_ids(torch.arange(start, stop))
            bytes_nb = np.zeros((len(ids), self._rows.row_bytes), dtype=np.uint8)
            touched = self._touched.get(ids)
            there, fresh = np.flatnonzero(touched), np.flatnonzero(~touched)
            for first in range(0, len(there), self._chunk):
                part = there[first : first + self._chunk]
                bytes_nb[part] = access.read(ids[part])
            if len(fresh) and not self.spec.zeros:
                bytes_nb[fresh] = self._rows.encode(self.spec.initial(torch.from_numpy(ids[fresh]))).numpy()
            return torch.from_numpy(bytes_nb)

    def write_range(self, start: int, bytes_nb: Tensor) -> None:
        """Put rows from `start` on to bytes uint8 [n, b] that `read_range` gave; like `update` in all else.

        Rows of zeros leave the file sparse where that is what untouched rows are.
        """
        with self._lock:
            require(not self.read_only, f"disk store {self.path}: opened with read_only; it takes no updates")
            ids = self._check_ids(torch.arange(start, start + len(bytes_nb)))
            if tuple(bytes_nb.shape) != (len(ids), self._rows.row_bytes):
                raise ValueError(f"rows: {list(bytes_nb.shape)} bytes, the rows have {self._rows.row_bytes} each")
            new_nb = bytes_nb.numpy()
            if self.spec.zeros:
                needed = np.flatnonzero(new_nb.any(axis=1) | self._touched.get(ids))
                ids, new_nb = ids[needed], new_nb[needed]
            self._overwrite_all(ids, new_nb)

    def warm(self, ids: Tensor) -> int:
        """Row numbers, most wanted first -> how many of them are now kept in RAM (at most `cache_rows`).

        A static cache: nothing is evicted, updates go to the file and to it. A second call replaces it. Rows that
        were never touched need no reading, but get their place for when they are.
        """
        with self._lock:
            access, wanted = self._rows_of_file, self._check_ids(ids)
            _, first = np.unique(wanted, return_index=True)
            chosen = np.sort(wanted[np.sort(first)[: self._cache_rows]])
            access.check(chosen)
            self._cache_ids = np.empty(0, dtype=np.int64)
            cache = np.zeros((len(chosen), self._rows.row_bytes), dtype=np.uint8)
            for start in range(0, len(chosen), self._chunk):
                part = chosen[start : start + self._chunk]
                there = np.flatnonzero(self._touched.get(part))
                cache[start + there] = access.read(part[there])
            self._cache_ids, self._cache = chosen, cache
            return len(chosen)

    def bytes_held(self) -> dict[str, int]:
        """{"disk": bytes the file and its journal really use, "cpu": cache, buffers and bits (as far as reserved)}."""
        with self._lock:
            checkpoints, access = self._use(), self._rows_of_file
            bits = len(self._touched.bytes) + (0 if self.read_only else len(self._saved.bytes))
            cpu = self._cache.nbytes + access.buffer_bytes() + self._values.numel() * 4 + bits
            return {"disk": access.bytes_on_disk() + checkpoints.bytes_held(), "cpu": cpu}

    def rows_touched(self) -> int:
        """How many rows were ever written."""
        return self._touched.count()

    def flush(self) -> None:
        """Everything that was updated, and what undoes it, has reached the disk. Raises RuntimeError where it has not.

        The store is then of no more use: after a failed sync the system forgets what it could not write.
        """
        with self._lock:
            checkpoints = self._use()
            if self.read_only:
                return
            try:
                with self._rows_of_file.explained(_NO_ROWS):
                    checkpoints.sync()
                    self._settle()
            except BaseException as error:
                self._broken = f"a flush failed ({error!r})"
                raise
            self._rows_of_file.reconsider()

    def prepare_checkpoint(self) -> int:
        """Flush, and begin a generation -> its number, to be written into the caller's checkpoint.

        Until `commit_checkpoint` the table can go back to this state and to the committed one. Raises RuntimeError when
        something cannot be written; where only the new journal could not, the store goes on and it may be tried again.
        """
        with self._lock:
            require(not self.read_only, f"disk store {self.path}: opened with read_only; it has no checkpoints")
            self.flush()
            with self._rows_of_file.explained(_NO_ROWS):
                number = self._use().prepare()
            self._saved = RowBits(self.spec.rows)
            return number

    def commit_checkpoint(self, generation: int) -> None:
        """The caller's checkpoint that holds `generation` is in its place: the way to older ones is dropped.

        Raises ConfigError for a number that was not prepared, RuntimeError when the file cannot be written.
        """
        with self._lock, self._rows_of_file.explained(_NO_ROWS):
            self._use().commit(generation)

    def close(self) -> None:
        """Let go of file, lock, threads and memory. What was updated after the last checkpoint will be undone."""
        with self._lock:
            if self._checkpoints is not None and self._pid == os.getpid() and not (self._broken or self.read_only):
                self._checkpoints.close()
            self._release()

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            if self._pid == os.getpid():  # in a forked process the lock may be held by a thread that is not there
                self.close()

    @property
    def _rows_of_file(self) -> RowAccess:
        self._use()
        assert self._access is not None
        return self._access

    def _use(self) -> Checkpoints:
        """Raise RuntimeError unless the store can be used here and now."""
        if self._checkpoints is None:
            raise RuntimeError(f"disk store {self.path}: closed")
        if self._pid != os.getpid():
            raise RuntimeError(f"disk store {self.path}: opened by process {self._pid}; open it again in this one")
        if self._broken:
            raise RuntimeError(
                f"disk store {self.path}: {self._broken}; open it again to go back to the last checkpoint"
            )
        return self._checkpoints

    def _check_ids(self, ids_n: Tensor) -> np.ndarray:
        self._use()
        given = torch.as_tensor(ids_n)
        if given.is_floating_point() or given.dtype == torch.bool:
            raise TypeError(f"disk store {self.path}: row numbers are {given.dtype}; give integers")
        ids = np.ascontiguousarray(given.detach().cpu().numpy().reshape(-1).astype(np.int64, copy=False))
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self.spec.rows):
            row = int(ids[(ids < 0) | (ids >= self.spec.rows)][0])
            raise IndexError(f"disk store {self.path}: row {row} is outside the table of {self.spec.rows:,} rows")
        return ids

    def _mapped(self) -> Tensor | None:
        """All rows [R, W] as one fp32 tensor over the mapping, where the way and the layout allow it."""
        access = self._rows_of_file
        if access.mapped is None or self._rows.name != "fp32" or not access.layout.dense:
            return None
        return access.mapped.view(torch.float32).view(self.spec.rows, self.spec.width)

    def _gather_mapped(self, rows_RW: Tensor, ids: np.ndarray, out: Tensor) -> None:
        """A mapped row costs less than finding duplicates: all of them in one pass, untouched rows put in after."""
        fresh = np.flatnonzero(~self._touched.get(ids))
        if len(fresh) < len(ids):
            there = ids
            if len(fresh):  # reading a hole would fill the page cache with zeros: any touched row instead
                there = ids.copy()
                there[fresh] = ids[np.flatnonzero(self._touched.get(ids))[0]]
            self._rows_of_file.announce(there)
            torch.index_select(rows_RW, 0, torch.from_numpy(there), out=out)
        if len(fresh):
            out[torch.from_numpy(fresh)] = self._initial(ids[fresh])

    def _initial(self, ids: np.ndarray) -> Tensor:
        """Row numbers -> initial values, as the row format holds them."""
        values = self.spec.initial(torch.from_numpy(ids))
        return values if self._rows.name == "fp32" else self._rows.decode(self._rows.encode(values))

    def _fetch_all(self, ids: np.ndarray) -> tuple[Tensor, np.ndarray | None]:
        """Sorted distinct rows -> as `_fetch`; a piece at a time where they are many."""
        if len(ids) <= self._chunk:
            return self._fetch(ids)
        if len(ids) > len(self._values):
            self._values = torch.empty(len(ids), self.spec.width)
        for start in range(0, len(ids), self._chunk):
            part = ids[start : start + self._chunk]
            values, place = self._fetch(part)
            self._values[start : start + len(part)] = values if place is None else values[torch.from_numpy(place)]
        return self._values[: len(ids)], None

    def _fetch(self, ids: np.ndarray) -> tuple[Tensor, np.ndarray | None]:
        """Sorted distinct rows -> values [S, W], and which of them each row is [U]; None: one after another.

        Values are initial, from the cache, or from the file: where rows fill pages evenly and all come from the file,
        the pages themselves are handed out until the next call, which saves a copy of every row.
        """
        touched = self._touched.get(ids)
        there = np.flatnonzero(touched)
        if not len(there):
            return self._initial(ids), None
        wanted, access = ids[there], self._rows_of_file
        hit, slot = self._cached(wanted)
        if hit.any():
            bytes_tb = np.empty((len(wanted), self._rows.row_bytes), dtype=np.uint8)
            bytes_tb[hit] = self._cache[slot[hit]]
            bytes_tb[~hit] = access.read(wanted[~hit])
        elif self._even and len(there) == len(ids) and access.window is None:
            flat, places = access.locate(ids)
            rows = torch.from_numpy(flat.view(np.float32)).view(-1, self.spec.width)
            return rows, places // self._rows.row_bytes
        else:
            bytes_tb = access.read(wanted)
        if self._rows.name == "fp32":
            values = torch.from_numpy(bytes_tb.view(np.float32))
        else:
            values = self._rows.decode(torch.from_numpy(bytes_tb))
        if len(there) == len(ids):
            return values, None
        out, fresh = torch.empty(len(ids), self.spec.width), np.flatnonzero(~touched)
        out[torch.from_numpy(there)] = values
        out[torch.from_numpy(fresh)] = self._initial(ids[fresh])
        return out, None

    def _cached(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Row numbers -> which are in the cache, and where."""
        if not len(self._cache_ids):
            return np.zeros(len(ids), dtype=bool), np.zeros(len(ids), dtype=np.int64)
        slot = np.minimum(np.searchsorted(self._cache_ids, ids), len(self._cache_ids) - 1)
        return self._cache_ids[slot] == ids, slot

    def _overwrite_all(self, ids: np.ndarray, new_Ub: np.ndarray) -> None:
        """Sorted distinct rows and their bytes, a piece at a time; where one fails the store is of no more use."""
        for start in range(0, len(ids), self._chunk):
            part = slice(start, start + self._chunk)
            try:
                self._overwrite(ids[part], new_Ub[part])
            except BaseException as error:
                self._broken = f"an update failed ({error!r})"
                raise

    def _overwrite(self, ids: np.ndarray, new_Ub: np.ndarray) -> None:
        """Sorted distinct rows and their bytes: old bytes to the journal, then new ones to the file."""
        access, checkpoints = self._rows_of_file, self._use()
        touched, unsaved = self._touched.get(ids), ~self._saved.get(ids)
        keep = unsaved & touched
        old_tb = access.before(ids, keep)
        if unsaved.any():
            with access.explained(ids):
                checkpoints.record(ids[unsaved], touched[unsaved], old_tb)
            self._saved.set(ids[unsaved])
        access.write(ids, new_Ub)
        self._touched.set(ids[~touched])
        hit, slot = self._cached(ids)
        self._cache[slot[hit]] = new_Ub[hit]

    def _restore(self, ids_U: np.ndarray, touched_U: np.ndarray, old_tb: np.ndarray) -> None:
        """One record of an undo journal, written back; rows that were untouched become zeros again."""
        bytes_Ub = np.zeros((len(ids_U), self._rows.row_bytes), dtype=np.uint8)
        bytes_Ub[touched_U] = old_tb
        assert self._access is not None
        self._access.write_cached(ids_U, bytes_Ub)
        self._touched.set(ids_U[touched_U])
        self._touched.clear(ids_U[~touched_U])

    def _settle(self) -> None:
        """Bits and rows have reached the disk. The bits are only written here: until then the journal has them."""
        self._touched.store(self._fd, self._bits_offset)
        os.fsync(self._fd)

    def _release(self) -> None:
        if self._access is not None:
            self._access.close()
        self._access = self._checkpoints = None
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
