"""The undo journal and the checkpoint protocol: records, every moment at which a process can end, and bad input.

A kill is a copy of the folder: what a process that ends right now leaves behind. tests/test_kill.py kills real ones.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from disk_tables import all_rows
from torch import Tensor

from engram.stores.base import TableSpec
from engram.stores.disk import DiskStore
from engram.stores.journal import (
    FILE_HEADER,
    JournalKey,
    UndoJournal,
    find_journals,
    journal_path,
    read_previous,
    read_records,
)
from engram.stores.reading import ThreadPool, move_whole
from engram.strict import ConfigError

KEY = JournalKey("0123456789abcdef", rows=100, row_bytes=12)
SPEC = TableSpec(40, 66, seed=3)
CACHED = {"backend": "threads", "threads": 1, "direct": False}
WAYS = [
    pytest.param({"backend": "mapping"}, id="mapping"),
    pytest.param(CACHED, id="cached"),
    pytest.param({"backend": "threads", "threads": 1}, id="direct"),
]
RECORDS = [
    (np.array([3, 9, 99]), np.array([True, False, True])),
    (np.array([0]), np.array([False])),
    (np.array([50, 51]), np.array([True, True])),
]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def laid_out(folder: Path, files: dict[str, bytes]) -> Path:
    """Make a folder hold exactly these files."""
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def written(tmp_path: Path, durable: bool = False) -> tuple[Path, list[int], list[np.ndarray]]:
    """A journal of RECORDS: its path, the bytes at which each record ends, the old bytes of each."""
    journal = UndoJournal.create(tmp_path / "rows", KEY, 4, previous=2, durable=durable)
    ends, olds = [], []
    for number, (ids, touched) in enumerate(RECORDS):
        old = np.random.default_rng(number).integers(0, 256, (int(touched.sum()), 12), dtype=np.uint8)
        journal.append(ids, touched, old)
        ends.append(journal.size)
        olds.append(old)
    journal.close()
    return journal.path, ends, olds


# ---- records


@pytest.mark.parametrize("durable", [False, True])
def test_records_come_back(tmp_path: Path, durable: bool) -> None:
    path, ends, olds = written(tmp_path, durable)
    assert path.name == "rows.journal-4" and path.stat().st_size == ends[-1]
    assert read_previous(path, KEY, 4) == 2 and find_journals(tmp_path / "rows") == {4: path}
    for (ids, touched), old, (got_ids, got_touched, got_old) in zip(
        RECORDS, olds, read_records(path, KEY), strict=True
    ):
        assert np.array_equal(ids, got_ids) and np.array_equal(touched, got_touched) and np.array_equal(old, got_old)


def test_a_torn_last_record_is_ignored_wherever_it_is_torn(tmp_path: Path) -> None:
    path, ends, _ = written(tmp_path)
    data = path.read_bytes()
    for length in range(FILE_HEADER, len(data)):
        path.write_bytes(data[:length])
        assert len(list(read_records(path, KEY))) == sum(end <= length for end in ends)
    for length in range(FILE_HEADER):
        path.write_bytes(data[:length])
        assert read_previous(path, KEY, 4) is None


def test_a_record_of_zeros_at_the_end_is_ignored(tmp_path: Path) -> None:
    path, ends, _ = written(tmp_path)
    path.write_bytes(path.read_bytes()[: ends[1]] + b"\0" * 300)  # a power cut may leave the length without the data
    assert len(list(read_records(path, KEY))) == 2


def test_damage_before_a_whole_record_is_an_error(tmp_path: Path) -> None:
    path, ends, _ = written(tmp_path)
    data = path.read_bytes()
    for place in (FILE_HEADER, FILE_HEADER + 10, FILE_HEADER + 45, ends[0] - 1, ends[0] + 3, ends[1] - 1):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(ConfigError, match=rf"path: {path}: damaged at byte [\d,]+ with whole records behind it"):
            list(read_records(path, KEY))
    path.write_bytes(data[: ends[0]] + data[ends[1] :])  # a record is missing
    with pytest.raises(ConfigError, match="damaged at byte"):
        list(read_records(path, KEY))


def test_a_journal_of_another_table_is_an_error(tmp_path: Path) -> None:
    path, _, _ = written(tmp_path)
    for other in (JournalKey("f" * 16, 100, 12), JournalKey(KEY.unique, 101, 12), JournalKey(KEY.unique, 100, 16)):
        with pytest.raises(ConfigError, match="belongs to another table"):
            read_previous(path, other, 4)
    with pytest.raises(ConfigError, match="number 4 and was renamed"):
        read_previous(path, KEY, 5)
    path.write_bytes(b"x" + path.read_bytes()[1:])
    with pytest.raises(ConfigError, match="head of this undo journal is damaged"):
        read_previous(path, KEY, 4)


# ---- the protocol


def test_rows_and_bits_are_byte_for_byte_what_they_were(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    store = DiskStore(path, SPEC, **CACHED)
    store.update(torch.arange(0, 40, 3), torch.randn(14, 66))
    g = store.prepare_checkpoint()
    store.commit_checkpoint(g)
    before = path.read_bytes()
    for _ in range(3):
        store.update(torch.randperm(40)[:20], torch.randn(20, 66))
    store.flush()
    store.close()
    assert path.read_bytes()[4096:] != before[4096:]
    DiskStore.open(path, generation=g).close()
    assert path.read_bytes()[4096:] == before[4096:]
    assert [p.name for p in tmp_path.iterdir()] == ["rows"]


def test_each_row_is_journalled_once_a_generation_and_fresh_rows_take_no_bytes(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "rows", SPEC, **CACHED)
    path, ids = journal_path(store.path, 0), torch.arange(10)
    sizes = []
    for turn in range(3):
        store.update(ids, torch.randn(10, 66))
        sizes.append(path.stat().st_size)
        if turn == 0:
            assert sizes[0] < FILE_HEADER + 200  # 10 numbers and 10 bits, no rows
    assert sizes[0] == sizes[1] == sizes[2]
    store.commit_checkpoint(store.prepare_checkpoint())
    store.update(ids, torch.randn(10, 66))
    store.update(torch.arange(5, 15), torch.randn(10, 66))
    records = list(read_records(journal_path(store.path, 1), store._checkpoints.key))
    assert [r[0].tolist() for r in records] == [list(range(10)), [10, 11, 12, 13, 14]]
    assert [len(r[2]) for r in records] == [10, 0]


def test_a_clean_table_stands_alone_and_a_dirty_one_needs_its_journal(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with DiskStore(path, SPEC) as store:
        store.update(torch.arange(5), torch.ones(5, 66))
        store.commit_checkpoint(store.prepare_checkpoint())
    assert [p.name for p in tmp_path.iterdir()] == ["rows"]
    with DiskStore(path, SPEC) as store:
        assert float(all_rows(store)[:5].min()) == 1
        store.update(torch.arange(5), torch.zeros(5, 66))
    journal = journal_path(path, 1)
    kept = content(tmp_path)
    journal.unlink()
    with pytest.raises(ConfigError, match=rf"path: {journal} is missing: .*put it back beside the table"):
        DiskStore(path, SPEC)
    laid_out(tmp_path, kept)
    with DiskStore(path, SPEC) as store:
        assert float(all_rows(store)[:5].min()) == 1


def test_going_back_to_either_checkpoint_between_prepare_and_commit(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    store = DiskStore(tmp_path / "a" / "rows", SPEC)
    states = []
    for turn in range(3):  # two prepared and not committed: the caller's checkpoints failed
        states.append(all_rows(store))
        if turn:
            assert store.prepare_checkpoint() == turn == store.generation
        store.update(torch.randperm(40)[:15], torch.randn(15, 66))
    store.flush()
    files = content(tmp_path / "a")
    assert sorted(files) == ["rows", "rows.journal-0", "rows.journal-1", "rows.journal-2"]
    for wanted in (None, 0, 1, 2):
        folder = laid_out(tmp_path / "b", files)
        with DiskStore.open(folder / "rows", generation=wanted) as again:
            assert torch.equal(all_rows(again), states[wanted or 0])
        with DiskStore.open(folder / "rows") as again:  # and that is now the committed one
            assert torch.equal(all_rows(again), states[wanted or 0])
            assert again.prepare_checkpoint() == 3  # a number that was given out is not given out again
    for wanted in (-1, 3, 7):
        folder = laid_out(tmp_path / "b", files)
        with pytest.raises(ConfigError, match=rf"cannot go back to checkpoint {wanted}, only to \[0, 1, 2\]"):
            DiskStore.open(folder / "rows", generation=wanted)
        assert content(folder) == files
    folder = laid_out(tmp_path / "b", {name: data for name, data in files.items() if name != "rows.journal-1"})
    with pytest.raises(ConfigError, match=r"journal-1 is missing"):
        DiskStore.open(folder / "rows", generation=0)


def test_a_dropped_checkpoint_cannot_be_gone_back_to(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "rows", SPEC)
    for _ in range(2):
        store.update(torch.arange(5), torch.randn(5, 66))
        store.commit_checkpoint(store.prepare_checkpoint())
    with pytest.raises(ConfigError, match=r"generation: 1 was not prepared"):
        store.commit_checkpoint(1)
    with pytest.raises(ConfigError, match=r"generation: 5 was not prepared"):
        store.commit_checkpoint(5)
    store.commit_checkpoint(2)
    store.close()
    with pytest.raises(ConfigError, match=r"cannot go back to checkpoint 1, only to \[2\]"):
        DiskStore.open(tmp_path / "rows", generation=1)
    DiskStore.open(tmp_path / "rows", generation=2).close()


def test_a_new_table_is_not_made_beside_old_journals(tmp_path: Path) -> None:
    with DiskStore(tmp_path / "rows", SPEC) as store:
        store.update(torch.arange(5), torch.randn(5, 66))
    (tmp_path / "rows").unlink()
    with pytest.raises(ConfigError, match=r"journal-0 is left of another table; remove it"):
        DiskStore(tmp_path / "rows", SPEC)


def test_a_checkpoint_that_cannot_be_prepared_leaves_the_store_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path / "rows", SPEC)
    ids, values = torch.arange(5), torch.randn(5, 66)
    store.update(ids, values)
    original = os.write

    def full(fd: int, data: Any) -> int:
        original(fd, bytes(data)[:5])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(RuntimeError, match=rf"disk store {store.path}: .*No space left"):
            store.prepare_checkpoint()
    assert store.generation == 0
    store.update(ids, values + 1)
    assert store.prepare_checkpoint() == 1
    store.commit_checkpoint(1)
    store.close()
    with DiskStore.open(tmp_path / "rows") as again:
        assert torch.equal(again.gather(ids), values + 1)


def test_a_durable_journal_is_synced_before_the_rows_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    for name in ("write", "fdatasync", "pwritev"):
        original = getattr(os, name)

        def call(*args: Any, name: str = name, original: Callable[..., Any] = original) -> Any:
            order.append(name)
            return original(*args)

        monkeypatch.setattr(os, name, call)
    with DiskStore(tmp_path / "rows", SPEC, durable=True, **CACHED) as store:
        store.update(torch.arange(3), torch.randn(3, 66))
        assert order == ["write", "write", "fdatasync", "pwritev"]
        order.clear()
        store.update(torch.arange(3), torch.randn(3, 66))
        assert order == ["pwritev"]


# ---- every moment at which a process can end


@contextmanager
def kills(
    folder: Path, state: dict[str, Any], patch: pytest.MonkeyPatch
) -> Iterator[list[tuple[Any, dict[str, bytes]]]]:
    """Collects what a process would leave behind if it ended before, within or after each call that writes."""
    found: list[tuple[Any, dict[str, bytes]]] = []

    def note() -> None:
        found.append((state.get("recorded"), content(folder)))

    for name in ("write", "pwrite", "pwritev", "unlink", "ftruncate", "link", "rename"):
        original = getattr(os, name)

        def call(*args: Any, name: str = name, original: Callable[..., Any] = original, **more: Any) -> Any:
            note()
            if name == "write":  # cut in two: a torn record
                original(args[0], bytes(args[1])[: len(args[1]) // 2])
                note()
                done = len(args[1]) // 2 + original(args[0], bytes(args[1])[len(args[1]) // 2 :])
            elif name == "pwritev" and len(args[1][0]) > 300:
                half = len(args[1][0]) // 2 // 512 * 512
                original(args[0], [args[1][0][:half]], args[2]) if half else None
                note()
                done = original(*args)
            else:
                done = original(*args, **more)
            note()
            return done

        patch.setattr(os, name, call)
    yield found


def in_order(patch: pytest.MonkeyPatch) -> None:
    """The threads of a pool run in the calling one, so that moments have an order."""

    def run(self: ThreadPool, call: Any, fd: int, offsets: Any, lengths: Any, buffer: Any, starts: Any) -> None:
        for offset, length, start in zip(offsets.tolist(), lengths.tolist(), starts.tolist(), strict=True):
            move_whole(call, fd, offset, buffer.data[start : start + length])

    patch.setattr(ThreadPool, "_run", run)


@pytest.mark.parametrize("way", WAYS)
def test_whenever_a_process_ends_the_recorded_checkpoint_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: dict[str, Any]
) -> None:
    folder, state, states = tmp_path / "run", {"recorded": None}, {}
    folder.mkdir()
    with monkeypatch.context() as patch:
        in_order(patch)
        with kills(folder, state, patch) as found:
            store = DiskStore(folder / "rows", SPEC, **way)
            states[None] = states[0] = all_rows(store)
            for _ in range(3):
                for _ in range(2):
                    store.update(torch.randperm(40)[:7].sort().values, torch.randn(7, 66))
                g = store.prepare_checkpoint()
                states[g] = all_rows(store)
                store.update(torch.randperm(40)[:3], torch.randn(3, 66))
                state["recorded"] = g  # the caller's rename
                store.update(torch.randperm(40)[:3], torch.randn(3, 66))
                store.commit_checkpoint(g)
            store.close()
    assert len(found) > 80
    checked = 0
    for recorded, files in found:
        if "rows" not in files:
            continue
        laid_out(tmp_path / "after", files)
        with DiskStore.open(tmp_path / "after" / "rows", generation=recorded, **way) as again:
            assert torch.equal(all_rows(again), states[recorded])
            again.update(torch.arange(3), torch.ones(3, 66))  # and it goes on from there
            again.commit_checkpoint(again.prepare_checkpoint())
        laid_out(tmp_path / "after", files)
        with DiskStore.open(tmp_path / "after" / "rows") as again:  # to the one committed last, whichever it is by now
            assert torch.equal(all_rows(again), states[again.generation])
        checked += 1
    assert checked > 80


def test_a_roll_back_may_end_at_any_moment_and_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    store = DiskStore(folder / "rows", SPEC, **CACHED)
    states = {}
    for turn in range(3):
        store.update(torch.randperm(40)[:15], torch.randn(15, 66))
        states[store.prepare_checkpoint()] = all_rows(store)
        if turn == 0:
            store.commit_checkpoint(1)
    store.update(torch.randperm(40)[:15], torch.randn(15, 66))
    store.flush()
    files = content(folder)
    store.close()
    for wanted in (1, 2, 3):
        laid_out(folder, files)
        with monkeypatch.context() as patch, kills(folder, {}, patch) as found:
            DiskStore.open(folder / "rows", generation=wanted, **CACHED).close()
        assert len(found) > 10
        for _, left in found:
            laid_out(tmp_path / "after", left)
            with DiskStore.open(tmp_path / "after" / "rows", generation=wanted, **CACHED) as again:
                assert torch.equal(all_rows(again), states[wanted])


# ---- against a plain tensor


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(4))
def test_random_sequences_against_a_plain_tensor(tmp_path: Path, way: dict[str, Any], seed: int) -> None:
    choose = random.Random(seed)
    spec = TableSpec(choose.choice([1, 17, 300]), choose.choice([1, 33, 66, 256, 1500]), seed=seed)
    options = {**way, "buffer_mb": 1, "cache_rows": choose.choice([0, 20])}
    store = DiskStore(tmp_path / "rows", spec, **options)
    plain = spec.initial(torch.arange(spec.rows))
    kept: dict[int, Tensor] = {0: plain.clone()}
    committed = 0
    for _ in range(80):
        what = choose.choice(["gather", "gather", "update", "update", "update", "prepare", "commit", "reopen", "warm"])
        if what == "gather":
            ids = torch.randint(0, spec.rows, (choose.randrange(50),))
            assert torch.equal(store.gather(ids), plain[ids])
        elif what == "update":
            ids = torch.randperm(spec.rows)[: choose.randrange(1, 30)]
            values = torch.randn(len(ids), spec.width)
            store.update(ids, values)
            plain[ids] = values
        elif what == "warm":
            store.warm(torch.randint(0, spec.rows, (30,)))
        elif what == "prepare":
            kept[store.prepare_checkpoint()] = plain.clone()
        elif what == "commit":
            committed = choose.choice(list(kept))
            store.commit_checkpoint(committed)
            kept = {g: rows for g, rows in kept.items() if g >= committed}
        else:
            store.close()
            wanted = choose.choice([None, *kept])
            store = DiskStore.open(tmp_path / "rows", generation=wanted, **options)
            committed = committed if wanted is None else wanted
            plain = kept[committed].clone()
            kept = {committed: plain.clone()}
    assert torch.equal(all_rows(store), plain)
    store.close()
