"""The disk store: failures while it runs. An error each, with file and row; never zeros, never a hang."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from disk_tables import AIO, RING, SPEC, THREADS, WAYS, all_rows, wrote_all

from engram.stores import reading
from engram.stores.disk import DiskStore
from engram.stores.queues import IoUring, KernelAio
from engram.stores.reading import PageBuffer, ThreadPool
from engram.stores.rowfile import PAGE

QUEUES = [pytest.param("io_uring", IoUring, marks=RING), pytest.param("aio", KernelAio, marks=AIO)]


@pytest.fixture(params=WAYS)
def failing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[DiskStore, Path]]:
    """A store with every row written whose next read is to fail, and its file."""
    path = tmp_path / "rows"
    wrote_all(path)[0].close()
    store = DiskStore.open(path, threads=3, timeout_s=5.0, **request.param)
    yield store, path
    store.close()


def test_a_file_cut_short_while_it_is_open(failing: tuple[DiskStore, Path]) -> None:
    store, path = failing
    os.truncate(path, 3 * PAGE)
    for call in (
        lambda: store.gather(torch.tensor([900])),
        lambda: store.update(torch.tensor([900]), torch.ones(1, 66)),
    ):
        with pytest.raises(RuntimeError, match=rf"disk store {path}: row 900.*the file has 12,288 bytes, it had"):
            call()


def test_a_file_removed_while_it_is_open(failing: tuple[DiskStore, Path]) -> None:
    store, path = failing
    path.unlink()
    with pytest.raises(RuntimeError, match=rf"disk store {path}: row 7.*removed or replaced"):
        store.gather(torch.tensor([7]))


def test_a_file_replaced_while_it_is_open(failing: tuple[DiskStore, Path]) -> None:
    store, path = failing
    shutil.copy(path, path.with_name("copy"))
    os.replace(path.with_name("copy"), path)
    with pytest.raises(RuntimeError, match="removed or replaced"):
        store.gather(torch.tensor([7]))


def test_a_descriptor_closed_by_somebody_else(failing: tuple[DiskStore, Path]) -> None:
    store, path = failing
    os.close(store._fd)
    with pytest.raises(RuntimeError, match=rf"disk store {path}: row 7.*Bad file descriptor"):
        store.gather(torch.tensor([7]))
    store._fd = store._access.fd = os.open(os.devnull, os.O_RDONLY)
    with pytest.raises(RuntimeError, match="the file"):  # its number may belong to another file by now
        store.gather(torch.tensor([7]))


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("way", ["short", "error"])
def test_a_failing_read_names_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool, way: str) -> None:
    store, values = wrote_all(tmp_path / "rows", backend="threads", direct=direct)
    place = int(store._access.layout.offsets(np.array([503]))[0]) // PAGE * PAGE + store._access._start
    original, ids = os.preadv, torch.tensor([3, 503, 999, 40])
    store._access.forget()  # the pages of the update would do

    def broken(fd: int, buffers: list[Any], offset: int) -> int:
        if offset != place:
            return original(fd, buffers, offset)
        if way == "error":
            raise OSError(errno.EIO, "Input/output error")
        return original(fd, [buffers[0][:512]], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        cause = "short read of 512 instead of" if way == "short" else "read: Input/output error"
        with pytest.raises(RuntimeError, match=rf"disk store {store.path}: row 503: .*{cause}.*at byte {place:,}"):
            store.gather(ids)
    assert torch.equal(store.gather(ids), values[ids])  # the store is still good


@pytest.mark.parametrize(("backend", "kind"), QUEUES)
@pytest.mark.parametrize(("result", "cause"), [(-errno.EIO, "Input/output error"), (512, "short read of 100 instead")])
def test_a_failing_read_through_a_queue_names_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, kind: Any, result: int, cause: str
) -> None:
    store, values = wrote_all(tmp_path / "rows", backend=backend)
    original, ids = kind._pump, torch.tensor([3, 503, 999, 40])
    store._access.forget()  # the pages of the update would do

    def broken(self: Any, *args: Any) -> Any:
        results = original(self, *args)
        results[-2] = result
        return results

    with monkeypatch.context() as patch:
        patch.setattr(kind, "_pump", broken)
        if result > 0:  # a short count is tried once more, whole
            assert torch.equal(store.gather(ids), values[ids])
            store._access.forget()
            patch.setattr(os, "preadv", lambda fd, buffers, offset: 100)
        with pytest.raises(RuntimeError, match=rf"disk store {store.path}: row 503: .*{cause}"):
            store.gather(ids)
    assert torch.equal(store.gather(ids), values[ids])


@pytest.mark.parametrize(("backend", "kind"), QUEUES)
def test_a_queue_goes_on_after_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, kind: Any
) -> None:
    store, values = wrote_all(tmp_path / "rows", backend=backend, buffer_mb=1)
    original = kind._take

    def interrupted(self: Any) -> Any:
        monkeypatch.setattr(kind, "_take", original)
        raise KeyboardInterrupt

    monkeypatch.setattr(kind, "_take", interrupted)
    store._access.forget()
    with pytest.raises(KeyboardInterrupt):
        store.gather(torch.arange(0, 1000, 3))
    assert torch.equal(all_rows(store), values)


@pytest.mark.parametrize(("backend", "kind"), QUEUES)
def test_a_queue_without_answers_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, kind: Any
) -> None:
    store, values = wrote_all(tmp_path / "rows", backend=backend, timeout_s=0.05)
    store._access.forget()
    nothing = np.empty(0, dtype=np.int64)
    with monkeypatch.context() as patch:
        patch.setattr(kind, "_take", lambda self: (nothing, nothing))
        with pytest.raises(RuntimeError, match=r"row 3: .*no answer within 0.05 s"):
            store.gather(torch.tensor([3]))
    assert torch.equal(all_rows(store), values)


def test_a_dead_thread_is_an_error_now_and_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = wrote_all(tmp_path / "rows", backend="threads", threads=2, direct=False)

    def deadly(*args: Any) -> int:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", deadly)
        with pytest.raises(RuntimeError, match=rf"disk store {store.path}: row 3.*died"):
            store.gather(torch.tensor([3]))
    for _ in range(3):
        with pytest.raises(RuntimeError, match=rf"disk store {store.path}: row 3.*have died: engram-disk"):
            store.gather(torch.tensor([3]))


@pytest.mark.parametrize("direct", [True, False])
def test_a_thread_that_answers_too_late_is_an_error_and_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    store, values = wrote_all(tmp_path / "rows", backend="threads", direct=direct, timeout_s=0.1)
    original, release, late = os.preadv, threading.Event(), threading.Event()
    store._access.forget()

    def stuck(fd: int, buffers: list[Any], offset: int) -> int:
        release.wait(10)
        buffers[0][:] = b"\xff" * len(buffers[0])  # into memory that nobody uses any more
        late.set()
        return len(buffers[0])

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", stuck)
        with pytest.raises(RuntimeError, match=r"row 3: .*no answer within 0.1 s"):
            store.gather(torch.tensor([3]))
        patch.setattr(os, "preadv", original)
        assert torch.equal(store.gather(torch.tensor([3])), values[3:4])
        release.set()
        assert late.wait(10)
    assert torch.equal(store.gather(torch.tensor([3])), values[3:4])  # from the pages that are still there
    assert torch.equal(all_rows(store), values)


def test_a_failed_call_ends_when_no_thread_works_for_it_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[int] = []

    def slow_or_failing(fd: int, buffers: list[Any], offset: int) -> int:
        if offset == 0:
            raise OSError(errno.EIO, "Input/output error")
        inside.append(offset)
        time.sleep(0.1)
        inside.remove(offset)
        return len(buffers[0])

    pool, places = ThreadPool(4), np.array([100, 101, 102, 103, 104, 105, 106, 107, 0])
    monkeypatch.setattr(os, "preadv", slow_or_failing)
    with pytest.raises(OSError, match="Input/output error, at byte 0"):
        pool.read(0, places, np.ones(9, dtype=np.int64), PageBuffer().take(16), np.arange(9))
    assert not inside
    pool.close()


@AIO
def test_many_rows_go_through_the_page_cache_by_kernel_aio_and_its_errors_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, values = wrote_all(tmp_path / "rows", backend="mapping")
    calls: list[int] = []
    original = KernelAio._pump
    monkeypatch.setattr(
        KernelAio,
        "_pump",
        lambda self, what, fd, at, *rest: calls.append(len(at)) or original(self, what, fd, at, *rest),
    )
    scattered = torch.arange(0, 1000, 3)
    values[scattered] = torch.randn(len(scattered), SPEC.width)
    store.update(scattered, values[scattered])
    assert calls == [len(scattered)] and torch.equal(all_rows(store), values)
    values[:5] = 1.0
    store.update(torch.arange(5), values[:5])
    assert len(calls) == 1, "a few are written one by one"
    store.commit_checkpoint(store.prepare_checkpoint())

    def full(self: Any, *args: Any) -> Any:
        results = original(self, *args)
        results[100:] = -errno.ENOSPC
        return results

    with monkeypatch.context() as patch:
        patch.setattr(KernelAio, "_pump", full)
        with pytest.raises(RuntimeError, match=rf"disk store {store.path}: row 300: .*No space left on device"):
            store.update(scattered, -values[scattered])
    with pytest.raises(RuntimeError, match="an update failed .*open it again to go back"):
        store.gather(scattered)
    store.close()
    with DiskStore.open(tmp_path / "rows") as again:
        assert torch.equal(all_rows(again), values)


@pytest.mark.parametrize("way", WAYS)
def test_a_failing_write_stops_the_store_and_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: dict[str, Any]
) -> None:
    store, values = wrote_all(tmp_path / "rows", **way)
    original, calls = os.pwritev, [0]

    def full(fd: int, buffers: list[Any], offset: int) -> int:
        calls[0] += 1
        if calls[0] > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(fd, buffers, offset)

    def ring_full(self: Any, fd: int, offsets: Any, lengths: Any, buffer: Any, starts: Any) -> None:
        for offset, length, start in zip(offsets.tolist(), lengths.tolist(), starts.tolist(), strict=True):
            reading.move_whole(os.pwritev, fd, offset, buffer.data[start : start + length])

    monkeypatch.setattr(IoUring, "write", ring_full)
    monkeypatch.setattr(KernelAio, "write", ring_full)
    ids = torch.arange(0, 1000, 50)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        with pytest.raises(RuntimeError, match=rf"disk store {store.path}: row \d+: .*No space left on device"):
            store.update(ids, torch.ones(20, SPEC.width))
    for call in (lambda: store.gather(ids), lambda: store.flush(), lambda: store.prepare_checkpoint()):
        with pytest.raises(RuntimeError, match="an update failed .*open it again to go back"):
            call()
    store.close()
    with DiskStore.open(tmp_path / "rows") as again:
        assert torch.equal(all_rows(again), values)


def test_a_failing_flush_stops_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, values = wrote_all(tmp_path / "rows", **THREADS)
    store.update(torch.tensor([5]), values[:1] + 1)

    def failing(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(RuntimeError, match=rf"disk store {store.path}: .*Input/output error"):
            store.prepare_checkpoint()
    with pytest.raises(RuntimeError, match="a flush failed .*open it again"):
        store.prepare_checkpoint()
    store.close()
    with DiskStore.open(tmp_path / "rows") as again:
        assert torch.equal(all_rows(again), values)


def test_a_failing_journal_leaves_the_rows_unwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, values = wrote_all(tmp_path / "rows", **THREADS)

    def full(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(RuntimeError, match=rf"disk store {store.path}: row 5.*No space left on device"):
            store.update(torch.tensor([5]), values[:1] + 1)
    store.close()
    with DiskStore.open(tmp_path / "rows") as again:
        assert torch.equal(all_rows(again), values)


def test_a_closed_store_and_a_store_of_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = wrote_all(tmp_path / "rows")
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(RuntimeError, match=f"opened by process {store._pid}; open it again"):
            store.gather(torch.tensor([1]))
    store.close()
    store.close()
    with pytest.raises(RuntimeError, match="closed"):
        store.gather(torch.tensor([1]))
