"""Positioned reads and writes of many pieces of one file at once: what every way shares, and a pool of threads.

    pool = ThreadPool(16)
    pool.read(fd, offsets_k, lengths_k, buffer, starts_k)

`queues.py` has the faster ways, where the kernel permits them.

Shapes: k requests; request i moves lengths_k[i] bytes between byte offsets_k[i] of the file and byte starts_k[i] of a
buffer.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import psutil

BLOCK = 4  # requests a thread takes at a time
CHECK_S = 0.2  # how often a waiting caller looks whether the threads still live
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
    """`threads` threads with one positioned read or write each; what works everywhere."""

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


def free_memory() -> int:
    """Bytes that the page cache may grow by: what the system has available, and what a container's limit allows."""
    free = int(psutil.virtual_memory().available)
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            free = min(free, int(Path(limit).read_text()))
        except (OSError, ValueError):  # no such limit, or "max"
            continue
    return free
