"""The disk store: file format, every way to the rows against a plain tensor, and which way is taken.

tests/test_disk_input.py has bad input, tests/test_disk_faults.py failures, tests/test_journal.py the checkpoints.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from disk_tables import AIO, RING, SPEC, THREADS, WAYS, all_rows, wrote_all
from safetensors import safe_open
from torch import Tensor

from engram.stores import access, queues, reading
from engram.stores.base import TableSpec, initial_rows
from engram.stores.device import DeviceStore
from engram.stores.disk import DiskStore
from engram.stores.formats import get_format
from engram.stores.queues import IoUring, KernelAio
from engram.stores.reading import PageBuffer, ThreadPool
from engram.stores.rowfile import PAGE, FileInfo, Layout, RowBits, read_info
from engram.strict import ConfigError


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32)


# ---- layout and file


@pytest.mark.parametrize("row_bytes", [4, 256, 264, 640, 2048, 2052, 4096, 4100, 5000, 6144, 12288, 12300])
@pytest.mark.parametrize("rows", [1, 37, 300])
def test_rows_do_not_overlap_and_cross_no_page_they_need_not(rows: int, row_bytes: int) -> None:
    layout = Layout(rows, row_bytes)
    starts = layout.offsets(np.arange(rows))
    assert (np.diff(starts) >= row_bytes).all() and starts[-1] + row_bytes <= layout.data_bytes
    touched = (starts + row_bytes - 1) // PAGE - starts // PAGE + 1
    assert (touched == -(-row_bytes // PAGE)).all()
    pages = np.arange(-(-layout.data_bytes // PAGE))
    named = list(layout.rows_on(pages))
    for page in pages:
        on_page = np.flatnonzero((starts < (page + 1) * PAGE) & (starts + row_bytes > page * PAGE))
        assert {int(rows_p[page]) for rows_p in named} >= set(on_page.tolist())


def test_gaps_cost_what_the_documentation_says() -> None:
    waste = {size: round(100 * Layout(10**6, size).waste, 1) for size in (256, 264, 640, 5000, 2052)}
    assert waste == {256: 0.0, 264: 3.3, 640: 6.3, 5000: 2.3, 2052: 49.9}


@pytest.mark.parametrize(
    ("fmt", "width", "dtype"), [("fp32", 64, torch.float32), ("bf16", 32, torch.bfloat16), ("fp32", 66, torch.float32)]
)
def test_the_safetensors_library_reads_the_file(tmp_path: Path, fmt: str, width: int, dtype: torch.dtype) -> None:
    path, spec = tmp_path / "rows.safetensors", TableSpec(45, width, seed=1)
    store = DiskStore(path, spec, identity="a digest", format=fmt)
    store.update(torch.arange(45), torch.randn(45, width))
    values = all_rows(store)
    store.commit_checkpoint(store.prepare_checkpoint())
    store.close()
    with safe_open(path, "pt") as file:
        rows, touched, about = file.get_tensor("rows"), file.get_tensor("touched"), file.metadata()
    assert rows.dtype == dtype and about["identity"] == "a digest" and about["rows"] == "45"
    if width == 66:  # 15 rows a page, then a gap
        assert tuple(rows.shape) == (3, PAGE // 4)
        rows = rows[:, : 15 * 66].reshape(45, 66)
    assert torch.equal(rows.float(), values)
    assert np.unpackbits(touched.numpy(), bitorder="little").sum() == 45
    header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
    start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert (start + header["rows"]["data_offsets"][0]) % PAGE == 0
    assert (start + header["touched"]["data_offsets"][0]) % PAGE == 0 and path.stat().st_size % PAGE == 0


def test_51_billion_values_cost_nothing_until_rows_are_touched(tmp_path: Path) -> None:
    spec = TableSpec(200_000_000, 256, seed=9)
    path = tmp_path / "big.safetensors"
    with DiskStore(path, spec) as store:
        ids = torch.tensor([0, 199_999_999, 123_456_789, 2**27])
        assert path.stat().st_size > 4 * 51_000_000_000 and store.bytes_held()["disk"] <= 1 << 16
        assert torch.equal(bits(store.gather(ids)), bits(initial_rows(9, ids, 256, 0.02)))
        assert store.bytes_held()["disk"] <= 1 << 16
        store.update(ids, torch.randn(4, 256))
        values = store.gather(ids)
        store.commit_checkpoint(store.prepare_checkpoint())
        assert store.bytes_held()["disk"] <= 1 << 17 and store.rows_touched() == 4
    with DiskStore.open(path) as again:
        assert torch.equal(again.gather(ids), values)
        assert torch.equal(again.gather(ids[2:] + 1), spec.initial(ids[2:] + 1)) and again.rows_touched() == 4


def test_reserve_takes_the_disk_space_at_once(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    DiskStore(path, SPEC, reserve=True).close()
    assert path.stat().st_blocks * 512 >= SPEC.rows * 264


def test_row_bits_survive_a_file_with_holes(tmp_path: Path) -> None:
    rows = 5 * 8 * PAGE
    first, ids = RowBits(rows), np.array([0, 7, 8, 3 * 8 * PAGE + 1, rows - 1])
    first.set(ids)
    first.clear(np.array([8]))
    with open(tmp_path / "bits", "w+b") as file:
        os.ftruncate(file.fileno(), PAGE + len(first.bytes))
        first.store(file.fileno(), PAGE)
        second = RowBits(rows)
        second.load(file.fileno(), PAGE)
        assert np.array_equal(first.bytes, second.bytes) and second.count() == 4
        assert second.get(np.array([0, 7, 8, 9, rows - 1])).tolist() == [True, True, False, False, True]
        os.ftruncate(file.fileno(), PAGE + 10)
        with pytest.raises(OSError, match="ends inside the touched bits"):
            RowBits(rows).load(file.fileno(), PAGE)


# ---- the same bits on every way


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("width", [64, 66, 600, 1024, 1250])
def test_every_way_gives_the_bits_of_a_plain_tensor(
    tmp_path: Path, way: dict[str, Any], width: int, nan_empty: None
) -> None:
    spec = TableSpec(300, width, seed=11)
    plain = DeviceStore(spec)
    with DiskStore(tmp_path / "rows", spec, buffer_mb=1, threads=3, **way) as store:
        for _ in range(4):
            ids = torch.randint(0, spec.rows, (200,))
            assert torch.equal(bits(store.gather(ids)), bits(plain.gather(ids)))
            out = torch.empty(200, width)
            assert store.gather(ids, out=out) is out and torch.equal(out, plain.gather(ids))
            rows = torch.randperm(spec.rows)[:70]
            values = torch.randn(70, width)
            store.update(rows, values)
            plain.update(rows, values)
        assert torch.equal(bits(all_rows(store)), bits(plain.rows))
        assert store.gather(torch.empty(0, dtype=torch.long)).shape == (0, width)
        store.update(torch.empty(0, dtype=torch.long), torch.empty(0, width))
        store.commit_checkpoint(store.prepare_checkpoint())
    with DiskStore.open(tmp_path / "rows") as store:  # and another way reads what this one wrote
        assert torch.equal(bits(all_rows(store)), bits(plain.rows))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3", "int8", "lut3"])
def test_every_row_format_comes_back_as_its_codec_gives_it(tmp_path: Path, way: dict[str, Any], fmt: str) -> None:
    spec, rows = TableSpec(200, 64, seed=2), get_format(fmt, 64)
    expected = rows.decode(rows.encode(spec.initial(torch.arange(200))))
    with DiskStore(tmp_path / "rows", spec, format=fmt, **way) as store:
        ids, values = torch.randperm(200)[:90], torch.randn(90, 64)
        store.update(ids, values)
        expected[ids] = rows.decode(rows.encode(values))
        assert torch.equal(bits(all_rows(store)), bits(expected))


def test_large_batches_go_in_pieces(tmp_path: Path) -> None:
    spec = TableSpec(900, 1024, seed=3)  # a page a row: 256 rows a piece of 1 MiB
    with DiskStore(tmp_path / "rows", spec, buffer_mb=1, backend="threads") as store:
        values = torch.randn(900, 1024)
        store.update(torch.arange(900).flip(0), values.flip(0))
        assert torch.equal(all_rows(store), values)
        assert store.bytes_held()["cpu"] < 3 * (1 << 20) + 900 * 4096 + 4 * PAGE


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("width", [64, 1024])
def test_rows_that_fill_pages_evenly_come_from_the_pages_themselves(
    tmp_path: Path, way: dict[str, Any], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, values = TableSpec(600, width, seed=4), torch.randn(600, width)
    with DiskStore(tmp_path / "rows", spec, buffer_mb=1, **way) as store:
        store.update(torch.arange(600), values)
        if store._access.window is None:  # each row is copied once, out of its page
            monkeypatch.setattr(access.RowAccess, "read", lambda self, ids: pytest.fail("another copy"))
        for count in (1, 90, 2000):  # 600 distinct rows of a page each go in pieces
            ids = torch.randint(0, 600, (count,))
            first = store.gather(ids)
            assert torch.equal(first, values[ids])
            assert torch.equal(store.gather(599 - ids), values[599 - ids])
            assert torch.equal(first, values[ids]), "what was handed out is the caller's own"
            half = torch.empty(count, width, dtype=torch.bfloat16)
            assert torch.equal(store.gather(ids, out=half), values[ids].bfloat16())


def test_an_output_of_another_kind_is_filled_too(tmp_path: Path) -> None:
    store, values = wrote_all(tmp_path / "rows")
    out = torch.empty(3, 2 * SPEC.width)[:, ::2]
    assert torch.equal(store.gather(torch.tensor([5, 5, 2]), out=out), values[[5, 5, 2]])
    half = torch.empty(3, SPEC.width, dtype=torch.bfloat16)
    assert torch.equal(store.gather(torch.tensor([5, 5, 2]), out=half), values[[5, 5, 2]].bfloat16())


def test_the_cache_saves_reads_and_follows_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, values = wrote_all(tmp_path / "rows", cache_rows=100, backend="threads")
    hot = torch.randperm(SPEC.rows)
    assert store.warm(torch.cat([hot[:60], hot[:200]])) == 100  # repeated wishes take no place
    read: list[int] = []
    original = access.RowAccess.read
    monkeypatch.setattr(access.RowAccess, "read", lambda self, ids: read.append(len(ids)) or original(self, ids))
    assert torch.equal(store.gather(hot[:100]), values[hot[:100]]) and sum(read) == 0
    assert torch.equal(store.gather(hot[90:110]), values[hot[90:110]]) and sum(read) == 10
    values[hot[:150]] = torch.randn(150, SPEC.width)
    store.update(hot[:150], values[hot[:150]])
    assert torch.equal(store.gather(hot[:100]), values[hot[:100]]) and sum(read) == 10
    assert torch.equal(all_rows(store), values)
    assert store.bytes_held()["cpu"] >= 100 * 264


def test_a_row_may_be_cached_before_it_is_ever_written(tmp_path: Path) -> None:
    with DiskStore(tmp_path / "rows", SPEC, cache_rows=10, backend="threads") as store:
        ids = torch.arange(20)
        assert store.warm(ids) == 10
        assert torch.equal(store.gather(ids), SPEC.initial(ids))
        values = torch.randn(5, SPEC.width)
        store.update(ids[5:10], values)
        assert torch.equal(store.gather(ids), torch.cat([SPEC.initial(ids[:5]), values, SPEC.initial(ids[10:])]))


def test_an_update_after_a_gather_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = wrote_all(tmp_path / "rows", backend="threads")
    if "O_DIRECT" not in store.way:
        pytest.skip("this file system has no O_DIRECT")
    ids = torch.randperm(SPEC.rows)[:40]
    values = store.gather(ids)
    reads: list[int] = []
    monkeypatch.setattr(ThreadPool, "read", lambda self, fd, offsets, *rest: reads.append(len(offsets)))
    store.update(ids, values + 1)
    assert torch.equal(store.gather(ids), values + 1) and sum(reads) == 0


def test_a_step_that_has_fetched_the_next_batch_reads_nothing_for_its_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One batch ahead: gather t, gather t + 1, update t. Rows and pages of both may be the same."""
    store, values = wrote_all(tmp_path / "rows", backend="threads")
    if "O_DIRECT" not in store.way:
        pytest.skip("this file system has no O_DIRECT")
    reads: list[int] = []
    original = ThreadPool.read
    monkeypatch.setattr(
        ThreadPool, "read", lambda self, fd, at, *rest: reads.append(len(at)) or original(self, fd, at, *rest)
    )
    batches = [torch.randperm(SPEC.rows)[:60] for _ in range(8)]
    assert torch.equal(store.gather(batches[0]), values[batches[0]])
    for ids, following in itertools.pairwise(batches):
        assert torch.equal(store.gather(following), values[following])
        reads.clear()
        values[ids] = torch.randn(len(ids), SPEC.width)
        store.update(ids, values[ids])
        assert not reads
        assert torch.equal(store.gather(following), values[following]) and not reads, "a page that both batches are on"
    assert torch.equal(store.gather(batches[-1][:30]), values[batches[-1][:30]]) and not reads, "some of the pages"
    assert torch.equal(all_rows(store), values)
    store.commit_checkpoint(store.prepare_checkpoint())
    store.close()
    with DiskStore.open(tmp_path / "rows") as again:
        assert torch.equal(all_rows(again), values)


def test_threads_may_gather_and_update_at_the_same_time(tmp_path: Path) -> None:
    store, values = wrote_all(tmp_path / "rows", backend="threads", threads=2)
    failures: list[BaseException] = []

    def work(lane: int) -> None:
        try:
            ids = torch.arange(lane, SPEC.rows, 4)
            mine = values[ids].clone()
            for step in range(8):
                assert torch.equal(store.gather(ids), mine)
                mine = mine + step
                store.update(ids, mine)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(lane,)) for lane in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


# ---- which way is taken


def test_the_way_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="engram"):
        store, _ = wrote_all(tmp_path / "rows", **THREADS)
        all_rows(store)
    said = [record.message for record in caplog.records if "2 threads, page cache" in record.message]
    assert len(said) == 1 and store.way == "2 threads, page cache"


def test_a_file_that_outgrows_the_page_cache_is_no_longer_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, values = wrote_all(tmp_path / "rows")
    assert store.way.startswith("mapping")
    monkeypatch.setattr(access, "free_memory", lambda: 4096)
    assert store.way.startswith("mapping")
    store.flush()
    assert not store.way.startswith("mapping")
    assert torch.equal(all_rows(store), values)
    store.update(torch.tensor([3]), values[:1])
    assert torch.equal(store.gather(torch.tensor([3])), values[:1])


def test_without_o_direct_the_page_cache_is_used_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = os.open

    def refusing(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refusing)
    store, values = wrote_all(tmp_path / "rows", backend="threads")
    assert store.way == "16 threads, page cache" and "no O_DIRECT" in caplog.text
    assert torch.equal(all_rows(store), values)


def test_without_queues_threads_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "queue_works", lambda kind: False)
    monkeypatch.setattr(access, "free_memory", lambda: 0)
    store, values = wrote_all(tmp_path / "rows")
    assert store.way.startswith("16 threads") and torch.equal(all_rows(store), values)
    for queue in ("io_uring", "aio"):
        with pytest.raises(ConfigError, match=rf"backend: '{queue}' is not permitted.*use 'auto' or 'threads'"):
            DiskStore(tmp_path / "other", SPEC, backend=queue)


@AIO
def test_without_io_uring_kernel_aio_is_used_with_o_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "queue_works", lambda kind: kind is KernelAio)
    assert queues.open_transfer("auto", direct=True).name == "kernel aio, depth 128"
    assert queues.open_transfer("auto", direct=False).name == "16 threads"


def test_a_refused_mapping_is_an_error_where_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **more: Any) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    wrote_all(tmp_path / "rows")[0].close()
    monkeypatch.setattr(mmap, "mmap", refused)
    with pytest.raises(ConfigError, match=r"backend: 'mapping' of [\d,]+ bytes is refused .*use 'auto'"):
        DiskStore.open(tmp_path / "rows", backend="mapping")
    monkeypatch.setattr(queues, "queue_works", lambda kind: False)
    with DiskStore.open(tmp_path / "rows", direct=False) as store:
        assert store.way == "16 threads, page cache"


def test_memory_limits_of_a_container_count(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"/sys/fs/cgroup/memory.max": "4096\n"}
    original = Path.read_text

    def fake(self: Path, *args: Any, **more: Any) -> str:
        return texts[str(self)] if str(self) in texts else original(self, *args, **more)

    monkeypatch.setattr(Path, "read_text", fake)
    assert reading.free_memory() == 4096
    texts["/sys/fs/cgroup/memory.max"] = "max\n"
    assert reading.free_memory() > 4096


# ---- the ways by themselves


@pytest.mark.parametrize(
    "make",
    [
        lambda: ThreadPool(3),
        pytest.param(lambda: IoUring(8), marks=RING),
        pytest.param(lambda: KernelAio(8), marks=AIO),
    ],
)
def test_transfers_move_what_they_are_asked_for(tmp_path: Path, make: Callable[[], Any]) -> None:
    data = np.random.default_rng(0).integers(0, 256, 64 * PAGE, dtype=np.uint8)
    (tmp_path / "file").write_bytes(data.tobytes())
    transfer, fd = make(), os.open(tmp_path / "file", os.O_RDWR)
    offsets = np.random.default_rng(1).permutation(60)[:50] * PAGE + 17
    lengths, buffer = np.arange(50) + 1, PageBuffer().take(1 << 16)
    starts = np.cumsum(lengths) - lengths
    transfer.read(fd, offsets, lengths, buffer, starts)
    for offset, length, start in zip(offsets, lengths, starts, strict=True):
        assert np.array_equal(buffer[start : start + length], data[offset : offset + length])
    buffer[:] = 7
    transfer.write(fd, offsets, lengths, buffer, starts)
    for offset, length in zip(offsets, lengths, strict=True):
        data[offset : offset + length] = 7
    assert (tmp_path / "file").read_bytes() == data.tobytes()
    transfer.read(fd, offsets[:0], lengths[:0], buffer, starts[:0])
    with pytest.raises(OSError, match="short read of 0 instead of 5 bytes, at byte 99,999,999"):
        transfer.read(fd, np.array([99_999_999]), np.array([5]), buffer, np.array([0]))
    transfer.close()
    with pytest.raises(RuntimeError, match="closed"):
        transfer.read(fd, offsets, lengths, buffer, starts)
    os.close(fd)


def test_the_header_says_what_it_was_given(tmp_path: Path) -> None:
    info = FileInfo(TableSpec(12, 3, seed=2**62, std=0.1, zeros=True), "fp32", 12, identity="é" * 100)
    (tmp_path / "rows").write_bytes(info.header() + b"\0" * (info.bits_offset + info.bits_bytes))
    fd = os.open(tmp_path / "rows", os.O_RDONLY)
    assert read_info(fd, tmp_path / "rows") == (info, len(info.header())) and len(info.header()) % PAGE == 0
    os.close(fd)
