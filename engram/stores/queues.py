"""The kernel's queues for reads and writes: io_uring and kernel aio, through ctypes and numpy; and the choice of a way.

    transfer = open_transfer("auto", direct=True)         # IoUring, KernelAio or ThreadPool, the same interface
    transfer.read(fd, offsets_k, lengths_k, buffer, starts_k)

Queue depth is everything: one thread reads 10 thousand pages a second where 128 requests in flight read 140 thousand (a
network-like virtual disk, two cores). A queue needs one system call for a quarter of its depth: 1.0 of the same loop in
C, where 16 Python threads come to 0.6-0.95 of 16 threads in C (they pass the interpreter on at every page; the lower
figure with another program on a core).
Containers often forbid io_uring, and seldom kernel aio: `queue_works` asks once.

Shapes: k requests of a call, m of them put into the queue at a time; see `reading.py`.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys
import threading
import time
from functools import lru_cache
from pathlib import Path

import numpy as np

from engram.stores.reading import Numbers, ThreadPool, Transfer, TransferError, move_whole
from engram.strict import ConfigError

DEPTH = 128  # requests in flight: 0.95 of what 256 gave
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
_CQE = np.dtype([("user_data", "i8"), ("res", "i4"), ("flags", "u4")])
_AIO = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}  # io_setup, io_destroy, io_submit, io_getevents
_IOCB = np.dtype(
    {
        "names": ["data", "opcode", "fd", "buf", "nbytes", "offset"],
        "formats": ["u8", "u2", "u4", "u8", "u8", "i8"],
        "offsets": [0, 16, 20, 24, 32, 40],
        "itemsize": 64,
    }
)
_EVENT = np.dtype([("data", "i8"), ("obj", "u8"), ("res", "i8"), ("res2", "i8")])


class _Queue:
    """Requests in a queue of the kernel, up to `depth` in flight; io_uring and its elder, by the same loop."""

    kind = "queue"

    def __init__(self, depth: int = DEPTH, timeout_s: float = 120.0) -> None:
        self.name = f"{self.kind}, depth {depth}"
        self.depth, self.timeout_s = depth, timeout_s
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._call.restype = ctypes.c_long
        self._lost: list[Numbers] = []
        self._open_now = self._closed = False
        self._open()
        self._open_now = True

    def read(self, fd: int, offsets_k: Numbers, lengths_k: Numbers, buffer: Numbers, starts_k: Numbers) -> None:
        """See `Transfer.read`."""
        self._run("read", fd, offsets_k, lengths_k, buffer, starts_k)

    def write(self, fd: int, offsets_k: Numbers, lengths_k: Numbers, buffer: Numbers, starts_k: Numbers) -> None:
        """See `Transfer.write`."""
        self._run("write", fd, offsets_k, lengths_k, buffer, starts_k)

    def close(self) -> None:
        """Let go of the queue; its memory goes with the last view."""
        self._closed = True
        if self._open_now:
            self._open_now = False
            self._shut()

    def _run(
        self, what: str, fd: int, offsets_k: Numbers, lengths_k: Numbers, buffer: Numbers, starts_k: Numbers
    ) -> None:
        if self._closed:
            raise RuntimeError(f"the {self.kind} queue of the disk store is closed")
        if not self._open_now:
            self._open()
            self._open_now = True
        try:
            results = self._pump(what, fd, offsets_k, lengths_k, buffer, starts_k)
        except BaseException:  # requests may be under way: their queue and buffer are never used again
            self._lost.append(buffer)
            self._open_now = False
            self._shut()
            raise
        for index in np.flatnonzero(results != lengths_k).tolist():
            offset, start, result = int(offsets_k[index]), int(starts_k[index]), int(results[index])
            if result < 0 and -result not in (errno.EAGAIN, errno.EINTR):
                raise TransferError(offset, f"{what}: {os.strerror(-result)}")
            # the kernel may stop half way (a signal): once more, whole, and then a short count is an error
            call = os.preadv if what == "read" else os.pwritev
            move_whole(call, fd, offset, buffer.data[start : start + int(lengths_k[index])])

    def _pump(
        self, what: str, fd: int, offsets_k: Numbers, lengths_k: Numbers, buffer: Numbers, starts_k: Numbers
    ) -> Numbers:
        """Keep up to `depth` requests in flight until all have completed -> their results [k]."""
        total, given, done = len(offsets_k), 0, 0
        results = np.empty(total, dtype=np.int64)
        entries_k = self._entries(what, fd, offsets_k, lengths_k, starts_k + buffer.ctypes.data)
        deadline = time.monotonic() + self.timeout_s
        while done < total:
            count = min(self.depth - (given - done), total - given)
            if count:
                self._put(entries_k[given : given + count])
                given += count
            self._submit(min(max(1, self.depth // 4), total - done))
            numbers, found = self._take()
            results[numbers] = found
            done += len(numbers)
            if done < total and time.monotonic() > deadline:
                raise TransferError(int(offsets_k[0]), f"no answer within {self.timeout_s:g} s")
        return results

    def _check(self, result: int) -> int:
        """Raise OSError for a failed system call, except for those that are simply made again."""
        if result < 0 and ctypes.get_errno() not in (errno.EINTR, errno.ETIME, errno.EAGAIN, errno.EBUSY):
            raise OSError(ctypes.get_errno(), f"{self.kind}: {os.strerror(ctypes.get_errno())}")
        return max(0, result)

    def _open(self) -> None:
        raise OSError(errno.ENOSYS, self.kind)

    def _shut(self) -> None: ...

    def _entries(self, what: str, fd: int, offsets_k: Numbers, lengths_k: Numbers, addresses_k: Numbers) -> Numbers:
        """Requests in the kernel's own layout, [k, 8] words, made for a whole call at once: a request then costs a copy
        of 64 bytes. Their numbers 0..k-1 come back with their results."""
        return np.empty((0, 8), np.uint64)

    def _put(self, entries_m: Numbers) -> None:
        """Requests into the queue; the kernel may read them until they have been submitted."""

    def _submit(self, wanted: int) -> None:
        """Hand over what is in the queue, and wait for `wanted` completions or a second."""

    def _take(self) -> tuple[Numbers, Numbers]:
        """Completions that have arrived: their numbers and results (bytes, or an error below 0)."""
        return np.empty(0, np.int64), np.empty(0, np.int64)


class IoUring(_Queue):
    """One io_uring of `depth` requests. Raises OSError where the kernel refuses one or lacks what is used (5.11)."""

    kind = "io_uring"

    def _open(self) -> None:
        params = np.zeros(30, dtype=np.uint32)  # struct io_uring_params; the indices below are its fields
        self._fd = int(self._call(_SETUP, self.depth, ctypes.c_void_p(params.ctypes.data)))
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), f"io_uring: {os.strerror(ctypes.get_errno())}")
        if int(params[5]) & _NEEDED != _NEEDED:
            self._shut()
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
        self._sqes = np.frombuffer(sqes, np.uint64, 8 * entries).reshape(entries, 8)
        words(16, entries)[:] = np.arange(entries)  # slot i of the ring is always entry i
        self._second = np.array([1, 0], dtype=np.int64)
        self._wait = np.array([0, 0, self._second.ctypes.data], dtype=np.uint64)  # no signal mask; a timeout
        self._wait_arguments = (ctypes.c_void_p(self._wait.ctypes.data), ctypes.c_size_t(self._wait.nbytes))
        self._barrier = threading.Lock()

    def _shut(self) -> None:
        os.close(self._fd)

    def _entries(self, what: str, fd: int, offsets_k: Numbers, lengths_k: Numbers, addresses_k: Numbers) -> Numbers:
        entries_k = np.zeros(len(offsets_k), dtype=_SQE)
        entries_k["opcode"], entries_k["fd"] = _READ if what == "read" else _WRITE, fd
        entries_k["off"], entries_k["len"] = offsets_k, lengths_k
        entries_k["addr"], entries_k["user_data"] = addresses_k, np.arange(len(offsets_k))
        return entries_k.view(np.uint64).reshape(-1, 8)

    def _put(self, entries_m: Numbers) -> None:
        tail, count = int(self._sq_tail[0]), len(entries_m)
        slot = tail & self._sq_mask
        whole = min(count, len(self._sqes) - slot)
        self._sqes[slot : slot + whole], self._sqes[: count - whole] = entries_m[:whole], entries_m[whole:]
        self._sq_tail[0] = (tail + count) & 0xFFFFFFFF

    def _submit(self, wanted: int) -> None:
        waiting = (int(self._sq_tail[0]) - int(self._sq_head[0])) & 0xFFFFFFFF
        self._check(self._call(_ENTER, self._fd, waiting, wanted, _GETEVENTS | _EXT_ARG, *self._wait_arguments))

    def _take(self) -> tuple[Numbers, Numbers]:
        head, tail = int(self._cq_head[0]), int(self._cq_tail[0])
        with self._barrier:  # on weakly ordered processors the entries must be read after the tail
            found = self._cqes[(head + np.arange((tail - head) & 0xFFFFFFFF)) & self._cq_mask]
        with self._barrier:
            self._cq_head[0] = tail
        return found["user_data"], found["res"]


class KernelAio(_Queue):
    """The kernel's older queue (io_submit), as fast with O_DIRECT, and permitted in most containers that forbid
    io_uring. Through the page cache it would do one request after the other. Raises OSError where it is refused."""

    kind = "kernel aio"

    def _open(self) -> None:
        numbers = _AIO.get(platform.machine())
        if numbers is None:
            raise OSError(errno.ENOSYS, f"kernel aio: unknown on {platform.machine()}")
        self._setup, self._destroy, self._given, self._events = numbers
        context = np.zeros(1, dtype=np.uint64)
        if self._call(self._setup, ctypes.c_ulong(self.depth), ctypes.c_void_p(context.ctypes.data)) < 0:
            raise OSError(ctypes.get_errno(), f"kernel aio: {os.strerror(ctypes.get_errno())}")
        self._context = ctypes.c_ulong(int(context[0]))
        self._second = np.array([1, 0], dtype=np.int64)
        self._found = np.zeros(self.depth, dtype=_EVENT)
        self._queued = np.empty(0, dtype=np.uint64)  # addresses of requests that the kernel has not taken yet
        self._flying = self._count = 0

    def _shut(self) -> None:
        if not self._flying:  # it would wait for what is under way, perhaps for ever
            self._call(self._destroy, self._context)

    def _entries(self, what: str, fd: int, offsets_k: Numbers, lengths_k: Numbers, addresses_k: Numbers) -> Numbers:
        entries_k = np.zeros(len(offsets_k), dtype=_IOCB)
        entries_k["opcode"], entries_k["fd"] = int(what == "write"), fd
        entries_k["offset"], entries_k["nbytes"] = offsets_k, lengths_k
        entries_k["buf"], entries_k["data"] = addresses_k, np.arange(len(offsets_k))
        return entries_k.view(np.uint64).reshape(-1, 8)

    def _put(self, entries_m: Numbers) -> None:
        addresses_m = np.arange(len(entries_m)) * _IOCB.itemsize + entries_m.ctypes.data
        self._queued = np.concatenate([self._queued, addresses_m.astype(np.uint64)])

    def _submit(self, wanted: int) -> None:
        if len(self._queued):
            count, pointer = ctypes.c_long(len(self._queued)), ctypes.c_void_p(self._queued.ctypes.data)
            taken = self._check(self._call(self._given, self._context, count, pointer))
            self._queued, self._flying = self._queued[taken:], self._flying + taken
        self._count = self._check(
            self._call(
                self._events,
                self._context,
                ctypes.c_long(min(wanted, self._flying)),
                ctypes.c_long(self.depth),
                ctypes.c_void_p(self._found.ctypes.data),
                ctypes.c_void_p(self._second.ctypes.data),
            )
        )
        self._flying -= self._count

    def _take(self) -> tuple[Numbers, Numbers]:
        found = self._found[: self._count]
        return found["data"], found["res"]


@lru_cache(maxsize=2)
def queue_works(kind: type[_Queue]) -> bool:
    """Whether this process may use `IoUring` or `KernelAio`: asked once, by reading from this very file through it."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        ring = kind(4, timeout_s=2.0)
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


def open_transfer(kind: str, direct: bool, threads: int = 16, timeout_s: float = 120.0) -> Transfer:
    """The transfer called "io_uring", "aio" or "threads"; "auto" is the first of these that is permitted.

    direct  whether the file is open with O_DIRECT; "auto" takes "aio" only then.
    Raises ConfigError for one that is not permitted.
    """
    for name, queue_kind in (("io_uring", IoUring), ("aio", KernelAio)):
        if kind == name and not queue_works(queue_kind):
            raise ConfigError(f"backend: {name!r} is not permitted on this machine; use 'auto' or 'threads'")
        if kind == name or (kind == "auto" and (direct or name == "io_uring") and queue_works(queue_kind)):
            return queue_kind(timeout_s=timeout_s)
    return ThreadPool(threads, timeout_s)
