"""Positioned reads and writes of many pieces of one file at once: io_uring where it is permitted, else a thread pool.

    transfer = open_transfer("auto", threads=16)          # IoUring or ThreadPool, the same interface
    transfer.read(fd, offsets_k, lengths_k, buffer, starts_k)

Queue depth is everything: one thread reads 10 thousand pages a second where 128 requests in flight read 55 thousand
(a network-like virtual disk). io_uring needs one system call for a quarter of the depth; it is reached through ctypes
and numpy here, since no package is needed for three memory mappings and two system calls. Containers often forbid it:
`io_uring_works` asks once.

Shapes: k requests; request i moves lengths_k[i] bytes between byte offsets_k[i] of the file and byte starts_k[i] of a
buffer.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
import psutil

from engram.strict import ConfigError

DEPTH = 128  # requests in flight: 0.9 of what 256 gave, half the memory
BLOCK = 4  # requests a thread takes at a time
CHECK_S = 0.2  # how often a waiting caller looks whether the threads still live
_SETUP, _ENTER = 425, 426  # the same numbers on x86-64, arm64 and every newer architecture
_READ, _WRITE = 22, 23
_GETEVENTS, _EXT_ARG = 1, 8  # flags of enter
_NEEDED = 1 << 0 | 1 << 1 | 1 << 8  # features: one mapping for both rings, no dropped completions, waits with a timeout
_SQES_OFFSET = 0x10000000
_SQE = np.dtype(
    {
        "names": ["opcode", "fd", "off", "addr", "len", "user_data"],
        "formats": ["u1", "i4", "u8", "u8", "u4", "u8"],
        "offsets": [0, 4, 8, 16, 24, 32],
        "itemsize": 64,
    }
)
_CQE = np.dtype([("user_data", "u8"), ("res", "i4"), ("flags", "u4")])

Numbers = np.ndarray


class TransferError(OSError):
    """A request failed that begins at byte `place` of the file, for the reason in the message."""

    def __init__(self, place: int, reason: str) -> None:
        super().__init__(errno.EIO, f"{reason}, at byte {place:,}")
        self.place = place


class Transfer(Protocol):
    """Moves pieces of a file. Raises TransferError for the first piece that cannot be moved whole, and never hangs:
    a timeout is an error, too."""

    name: str

    def read(self, fd: int, offsets_k: Numbers, lengths_k: Numbers, buffer: Numbers, starts_k: Numbers) -> None:
        """File -> buffer (uint8)."""
        ...

    def write(self, fd: int, offsets_k: Numbers, lengths_k: Numbers, buffer: Numbers, starts_k: Numbers) -> None:
        """Buffer (uint8) -> file."""
        ...

    def close(self) -> None:
        """Let go of threads or rings."""
        ...


class PageBuffer:
    """Memory that starts on a page, as O_DIRECT wants it; reused, since fresh memory costs more than a copy."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, dtype=np.uint8)

    @property
    def size(self) -> int:
        return len(self._bytes)

    def take(self, size: int) -> np.ndarray:
        """The first `size` bytes, uint8; what was in them is undefined, and earlier results may share them."""
        if size > len(self._bytes):
            self._bytes = np.frombuffer(mmap.mmap(-1, max(size, 1 << 16)), dtype=np.uint8)
        return self._bytes[:size]


def move_whole(call: Callable[..., int], fd: int, offset: int, piece: memoryview) -> None:
    """One `os.preadv` or `os.pwritev` of a whole piece. Raises TransferError on an error or a short count."""
    what = "write" if call is os.pwritev else "read"
    try:
        count = call(fd, [piece], offset)
    except OSError as error:
        raise TransferError(offset, f"{what}: {error.strerror or error}") from error
    if count != len(piece):
        raise TransferError(offset, f"short {what} of {count:,} instead of {len(piece):,} bytes")


def write_inline(fd: int, offsets_k: Numbers, lengths_k: Numbers, buffer: Numbers, starts_k: Numbers) -> None:
    """`Transfer.write` in the calling thread: right for the page cache, where a write is a copy of memory."""
    view = buffer.data
    pieces = zip(offsets_k.tolist(), lengths_k.tolist(), starts_k.tolist(), strict=True)
    for offset, length, start in pieces:
        move_whole(os.pwritev, fd, offset, view[start : start + length])


class _Job:
    """The requests of one call, handed out in blocks; the caller waits until no thread works on it any more."""

    def __init__(self, fd: int, call: Callable[..., int], pieces: list[tuple[int, int, int]], view: memoryview) -> None:
        self.fd, self.call, self.pieces, self.view = fd, call, pieces, view
        self.blocks = itertools.count(0, BLOCK)
        self.left, self.active = len(pieces), 0
        self.failed: BaseException | None = None
        self.done = threading.Event()
        self._lock = threading.Lock()

    def work(self) -> None:
        """Run blocks of requests until none is left or one has failed; what fails is kept for the caller."""
        count, failed = 0, None
        with self._lock:
            self.active += 1
        try:
            while self.failed is None and (first := next(self.blocks)) < len(self.pieces):
                block = self.pieces[first : first + BLOCK]
                for offset, length, start in block:
                    move_whole(self.call, self.fd, offset, self.view[start : start + length])
                count += len(block)
        except BaseException as error:
            failed = error
            if not isinstance(error, Exception):
                raise
        finally:
            with self._lock:
                self.active, self.left = self.active - 1, self.left - count
                self.failed = self.failed or failed
                if self.active == 0 and (self.left == 0 or self.failed is not None):
                    self.done.set()

    def fail(self, error: BaseException) -> None:
        """No further block is begun."""
        with self._lock:
            self.failed = self.failed or error


def _serve(jobs: queue.SimpleQueue[_Job | None]) -> None:
    """A worker's life. It holds no reference to the pool, so that a forgotten pool can end."""
    while (job := jobs.get()) is not None:
        try:
            job.work()
        except BaseException:
            return  # the caller has it from the job, and finds this thread dead


class ThreadPool:
    """`threads` threads with one positioned read or write each: 39 of 55 thousand pages a second at 16 threads."""

    def __init__(self, threads: int = 16, timeout_s: float = 120.0) -> None:
        self.name = f"{threads} threads"
        self.timeout_s = timeout_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_serve, args=(self._jobs,), name=f"engram-disk-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def read(self, fd: int, offsets_k: Numbers, lengths_k: Numbers, buffer: Numbers, starts_k: Numbers) -> None:
        """See `Transfer.read`. Raises RuntimeError when a thread has died."""
        self._run(os.preadv, fd, offsets_k, lengths_k, buffer, starts_k)

    def write(self, fd: int, offsets_k: Numbers, lengths_k: Numbers, buffer: Numbers, starts_k: Numbers) -> None:
        """See `Transfer.write`. Raises RuntimeError when a thread has died."""
        self._run(os.pwritev, fd, offsets_k, lengths_k, buffer, starts_k)

    def _run(
        self,
        call: Callable[..., int],
        fd: int,
        offsets_k: Numbers,
        lengths_k: Numbers,
        buffer: Numbers,
        starts_k: Numbers,
    ) -> None:
        pieces = list(zip(offsets_k.tolist(), lengths_k.tolist(), starts_k.tolist(), strict=True))
        if not pieces:
            return
        self._check_alive()
        job = _Job(fd, call, pieces, buffer.data)
        for _ in range(min(len(self._threads), -(-len(pieces) // BLOCK))):
            self._jobs.put(job)
        deadline = time.monotonic() + self.timeout_s
        try:
            while not job.done.wait(CHECK_S):
                self._check_alive()
                if time.monotonic() > deadline:
                    raise TransferError(int(offsets_k[0]), f"no answer within {self.timeout_s:g} s")
        except BaseException as error:
            job.fail(error)
            job.done.wait(CHECK_S)  # threads that are inside a request
            raise
        if isinstance(job.failed, Exception):
            raise job.failed
        if job.failed is not None:
            raise RuntimeError(f"a thread of the disk store has died of {job.failed!r}") from job.failed

    def _check_alive(self) -> None:
        dead = [thread.name for thread in self._threads if not thread.is_alive()]
        if dead or not self._threads:
            raise RuntimeError(f"threads of the disk store have died: {', '.join(dead) or 'the pool is closed'}")

    def close(self) -> None:
        """End the threads after the work that was given to them."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=CHECK_S)
        self._threads = []


class IoUring:
    """One io_uring of `depth` requests. Raises OSError where the kernel refuses one or lacks what is used (5.11)."""

    def __init__(self, depth: int = DEPTH, timeout_s: float = 120.0) -> None:
        self.name = f"io_uring, depth {depth}"
        self.depth, self.timeout_s = depth, timeout_s
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._barrier = threading.Lock()
        self._lost: list[Numbers] = []
        self._closed, self._fd = False, -1
        self._open()

    def _open(self) -> None:
        params = np.zeros(30, dtype=np.uint32)  # struct io_uring_params; the indices below are its fields
        self._fd = int(self._call(_SETUP, self.depth, ctypes.c_void_p(params.ctypes.data)))
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), f"io_uring: {os.strerror(ctypes.get_errno())}")
        if int(params[5]) & _NEEDED != _NEEDED:
            self.close()
            raise OSError(errno.ENOSYS, "io_uring: this kernel is older than 5.11")
        entries, completions = int(params[0]), int(params[1])
        ring_bytes = max(int(params[16]) + 4 * entries, int(params[25]) + 16 * completions)
        both = mmap.PROT_READ | mmap.PROT_WRITE
        ring = mmap.mmap(self._fd, ring_bytes, mmap.MAP_SHARED, both, offset=0)
        sqes = mmap.mmap(self._fd, 64 * entries, mmap.MAP_SHARED, both, offset=_SQES_OFFSET)

        def words(index: int, count: int = 1) -> Numbers:
            return np.frombuffer(ring, np.uint32, count, int(params[index]))

        self._sq_head, self._sq_tail, self._sq_mask = words(10), words(11), int(words(12)[0])
        self._cq_head, self._cq_tail, self._cq_mask = words(20), words(21), int(words(22)[0])
        self._cqes = np.frombuffer(ring, _CQE, completions, int(params[25]))
        self._sqes = np.frombuffer(sqes, _SQE, entries)
        words(16, entries)[:] = np.arange(entries)  # slot i of the ring is always entry i

    def read(self, fd: int, offsets_k: Numbers, lengths_k: Numbers, buffer: Numbers, starts_k: Numbers) -> None:
        """See `Transfer.read`."""
        self._run(_READ, fd, offsets_k, lengths_k, buffer, starts_k)

    def write(self, fd: int, offsets_k: Numbers, lengths_k: Numbers, buffer: Numbers, starts_k: Numbers) -> None:
        """See `Transfer.write`."""
        self._run(_WRITE, fd, offsets_k, lengths_k, buffer, starts_k)

    def _run(
        self, opcode: int, fd: int, offsets_k: Numbers, lengths_k: Numbers, buffer: Numbers, starts_k: Numbers
    ) -> None:
        if self._closed:
            raise RuntimeError("the ring of the disk store is closed")
        if self._fd < 0:
            self._open()
        try:
            results = self._pump(opcode, fd, offsets_k, lengths_k, buffer, starts_k)
        except BaseException:  # requests may be under way: their ring and buffer are never used again
            self._lost.append(buffer)
            os.close(self._fd)
            self._fd = -1
            raise
        what, call = ("read", os.preadv) if opcode == _READ else ("write", os.pwritev)
        for index in np.flatnonzero(results != lengths_k).tolist():
            offset, start, result = int(offsets_k[index]), int(starts_k[index]), int(results[index])
            if result < 0 and -result not in (errno.EAGAIN, errno.EINTR):
                raise TransferError(offset, f"{what}: {os.strerror(-result)}")
            # the kernel may stop half way (a signal): once more, whole, and then a short count is an error
            move_whole(call, fd, offset, buffer.data[start : start + int(lengths_k[index])])

    def _pump(
        self, opcode: int, fd: int, offsets_k: Numbers, lengths_k: Numbers, buffer: Numbers, starts_k: Numbers
    ) -> Numbers:
        """Keep up to `depth` requests in flight until all have completed -> their results [k]."""
        total, given, done = len(offsets_k), 0, 0
        results = np.empty(total, dtype=np.int64)
        addresses_k = starts_k + buffer.ctypes.data
        deadline = time.monotonic() + self.timeout_s
        while done < total:
            count = min(self.depth - (given - done), total - given)
            if count:
                tail, entries, part = int(self._sq_tail[0]), self._sqes, slice(given, given + count)
                slot = (tail + np.arange(count)) & self._sq_mask
                entries["opcode"][slot], entries["fd"][slot] = opcode, fd
                entries["off"][slot], entries["len"][slot] = offsets_k[part], lengths_k[part]
                entries["addr"][slot], entries["user_data"][slot] = addresses_k[part], np.arange(given, given + count)
                self._sq_tail[0] = (tail + count) & 0xFFFFFFFF
                given += count
            self._submit(min(max(1, self.depth // 4), total - done))
            found = self._reap()
            results[found["user_data"].astype(np.int64)] = found["res"]
            done += len(found)
            if done < total and time.monotonic() > deadline:
                raise TransferError(int(offsets_k[0]), f"no answer within {self.timeout_s:g} s")
        return results

    def _submit(self, wanted: int) -> None:
        """Hand over what stands in the ring and wait for `wanted` completions, or a second."""
        waiting = (int(self._sq_tail[0]) - int(self._sq_head[0])) & 0xFFFFFFFF
        second = np.array([1, 0], dtype=np.int64)
        argument = np.array([0, 0, second.ctypes.data], dtype=np.uint64)  # no signal mask; a timeout
        pointer, size = ctypes.c_void_p(argument.ctypes.data), ctypes.c_size_t(argument.nbytes)
        result = self._call(_ENTER, self._fd, waiting, wanted, _GETEVENTS | _EXT_ARG, pointer, size)
        if result < 0 and ctypes.get_errno() not in (errno.EINTR, errno.ETIME, errno.EAGAIN, errno.EBUSY):
            raise OSError(ctypes.get_errno(), f"io_uring: {os.strerror(ctypes.get_errno())}")

    def _reap(self) -> Numbers:
        """Completions that have arrived, taken off the ring."""
        head, tail = int(self._cq_head[0]), int(self._cq_tail[0])
        with self._barrier:  # on weakly ordered processors the entries must be read after the tail
            found = self._cqes[(head + np.arange((tail - head) & 0xFFFFFFFF)) & self._cq_mask]
        with self._barrier:
            self._cq_head[0] = tail
        return found

    def close(self) -> None:
        """Close the ring; its memory goes with the last view."""
        self._closed = True
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@lru_cache(maxsize=1)
def io_uring_works() -> bool:
    """Whether this process may use io_uring: asked once by reading a page of this file's source through one."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        ring = IoUring(4, timeout_s=2.0)
    except (OSError, ValueError, AttributeError):
        return False
    try:
        raw = Path(__file__).read_bytes()[:64]
        fd = os.open(__file__, os.O_RDONLY | os.O_CLOEXEC)
        buffer = np.zeros(64, dtype=np.uint8)
        try:
            ring.read(fd, np.array([0]), np.array([len(raw)]), buffer, np.array([0]))
        finally:
            os.close(fd)
        return buffer.tobytes() == raw
    except OSError:
        return False
    finally:
        ring.close()


def open_transfer(kind: str, threads: int = 16, timeout_s: float = 120.0) -> Transfer:
    """ "io_uring", "threads" or "auto" -> the transfer. Raises ConfigError for io_uring where it is not permitted."""
    if kind == "io_uring" and not io_uring_works():
        raise ConfigError("backend: 'io_uring' is not permitted on this machine; use 'auto' or 'threads'")
    if kind != "threads" and io_uring_works():
        return IoUring(timeout_s=timeout_s)
    return ThreadPool(threads, timeout_s)


def free_memory() -> int:
    """Bytes that the page cache may grow by: what the system has available, and what a container's limit allows."""
    free = int(psutil.virtual_memory().available)
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            free = min(free, int(Path(limit).read_text()))
        except (OSError, ValueError):  # no such limit, or "max"
            continue
    return free
