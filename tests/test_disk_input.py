"""The disk store: bad input. A clear error each, and nothing is overwritten."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from disk_tables import SPEC, THREADS, all_rows, wrote_all

from engram.stores.base import TableSpec
from engram.stores.disk import DiskStore
from engram.stores.rowfile import PAGE
from engram.strict import ConfigError


def test_zero_rows(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rows: a table of 0 x 8 holds nothing"):
        DiskStore(tmp_path / "rows", TableSpec(0, 8))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spec": TableSpec(1001, 66, seed=5)}, "made with rows 1000, asked is 1001"),
        ({"spec": TableSpec(1000, 67, seed=5)}, "made with width 66, asked is 67"),
        ({"spec": TableSpec(1000, 66, seed=6)}, "made with seed 5, asked is 6"),
        ({"spec": TableSpec(1000, 66, seed=5, std=0.5)}, "made with std 0.02, asked is 0.5"),
        ({"spec": TableSpec(1000, 66, seed=5, zeros=True)}, "made with zeros False, asked is True"),
        ({"format": "bf16"}, "made with format 'fp32', asked is 'bf16'"),
        ({"identity": "other"}, "made with identity '', asked is 'other'"),
    ],
)
def test_a_file_of_another_table_is_refused_and_left_alone(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "rows"
    wrote_all(path)[0].close()
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=message):
        DiskStore(path, **{"spec": SPEC, **change})
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["rows"]
    DiskStore(path, SPEC).close()


def test_open_checks_the_identity_it_is_given(tmp_path: Path) -> None:
    DiskStore(tmp_path / "rows", SPEC, identity="mine").close()
    DiskStore.open(tmp_path / "rows", identity="mine").close()
    assert DiskStore.open(tmp_path / "rows").spec == SPEC
    with pytest.raises(ConfigError, match="identity 'mine', asked is 'yours'"):
        DiskStore.open(tmp_path / "rows", identity="yours")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: b"1234",
        lambda data: b"\xff" * len(data),
        lambda data: b'{"a": 1}' * 4000,
        lambda data: data[:-1],
        lambda data: data[:-PAGE],
        lambda data: data[: 2 * PAGE],
        lambda data: data + b"\0" * PAGE,
        lambda data: data.replace(b'"width":"66"', b'"width":"65"'),
        lambda data: data.replace(b'"rows":"1000"', b'"rows":"1006"'),
        lambda data: data.replace(b'"rows":"1000"', b'"rows":"-999"'),
        lambda data: data.replace(b'"rows":"1000"', b'"rows":"1e99"'),
        lambda data: data.replace(b'"engram_rows":"1"', b'"engram_rows":"2"'),
        lambda data: data.replace(b'"data_offsets":[0,', b'"data_offsets":[4,'),
        lambda data: data.replace(b'"unique"', b'"antique'),
    ],
)
def test_a_damaged_file_is_refused_and_left_alone(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "rows"
    wrote_all(path)[0].close()
    damaged = damage(path.read_bytes())
    assert damaged != path.read_bytes()
    path.write_bytes(damaged)
    for attempt in (lambda: DiskStore(path, SPEC), lambda: DiskStore.open(path)):
        with pytest.raises(ConfigError, match=f"path: {path}"):
            attempt()
    assert path.read_bytes() == damaged


def test_a_safetensors_file_of_something_else_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(3)}, tmp_path / "model.safetensors")
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="no row file"):
        DiskStore(tmp_path / "model.safetensors", SPEC)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_paths_that_cannot_hold_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"path: .*missing/rows: .*create its folder"):
        DiskStore(tmp_path / "missing" / "rows", SPEC)
    with pytest.raises(ConfigError, match=r"file/rows: .*part of the path is a file"):
        DiskStore(tmp_path / "file" / "rows", SPEC)
    with pytest.raises(ConfigError, match=f"path: {tmp_path}: .*"):
        DiskStore(tmp_path, SPEC)
    with pytest.raises(ConfigError, match=r"there is no table here"):
        DiskStore(tmp_path / "rows", SPEC, generation=3)
    with pytest.raises(ConfigError, match="there is no table here"):
        DiskStore.open(tmp_path / "rows")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_no_space_is_found_when_the_file_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Disk:
        f_bavail, f_frsize = 3, 4096

    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda path: Disk)
        with pytest.raises(ConfigError, match=r"12,288 bytes are free; .*bytes are needed"):
            DiskStore(tmp_path / "rows", SPEC)

    def full(fd: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match="No space left on device; .* bytes are needed"):
        DiskStore(tmp_path / "rows", SPEC, reserve=True)
    assert not list(tmp_path.iterdir())


def test_more_rows_than_the_disk_has_room_for_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Disk:
        f_bavail, f_frsize = 1 << 20, 1

    monkeypatch.setattr(os, "statvfs", lambda path: Disk)
    monkeypatch.setattr("engram.stores.rowfile.MIN_FREE", 1 << 10)
    DiskStore(tmp_path / "rows", TableSpec(100_000, 64)).close()
    assert "bytes with all rows touched, 1,048,576 are free" in caplog.text


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refused(*args: Any, **more: Any) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        with pytest.raises(ConfigError, match=f"path: .*rows: {os.strerror(number)}; .*cho"):
            DiskStore(tmp_path / "rows", SPEC)


def test_a_file_too_large_for_the_file_system(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"File too large|Invalid argument"):
        DiskStore(tmp_path / "rows", TableSpec(2**50, 1024))
    assert not list(tmp_path.iterdir())


def test_rows_outside_the_table_and_shapes_that_do_not_fit(tmp_path: Path) -> None:
    store, values = wrote_all(tmp_path / "rows", **THREADS)
    for bad in (-1, SPEC.rows, 2**62):
        with pytest.raises(IndexError, match=rf"disk store .*rows: row {bad} is outside the table of 1,000 rows"):
            store.gather(torch.tensor([3, bad]))
        with pytest.raises(IndexError, match=f"row {bad}"):
            store.update(torch.tensor([bad]), values[:1])
    for wrong in (torch.tensor([1.0]), torch.tensor([True])):
        with pytest.raises(TypeError, match="row numbers are torch"):
            store.gather(wrong)
    with pytest.raises(ValueError, match="out: shape"):
        store.gather(torch.tensor([1]), out=torch.empty(2, SPEC.width))
    with pytest.raises(ValueError, match="values: shape"):
        store.update(torch.tensor([1, 2]), values[:1])
    with pytest.raises(ValueError, match="row 7 is given twice"):
        store.update(torch.tensor([7, 1, 7]), values[:3])
    with pytest.raises(ValueError, match=r"(?i)row.*7|7.*row"):
        store.update(torch.tensor([1, 7]), torch.stack([values[0], values[1] * float("nan")]))
    assert torch.equal(all_rows(store), values)


@pytest.mark.parametrize("options", [{"backend": "tape"}, {"threads": 0}, {"buffer_mb": 0}, {"cache_rows": -1}])
def test_bad_options(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        DiskStore(tmp_path / "rows", SPEC, **options)
    assert not list(tmp_path.iterdir())


def test_one_writer_or_many_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engram.stores.rowfile.LOCK_WAIT_S", 0.05)
    path = tmp_path / "rows"
    store, values = wrote_all(path)
    for read_only in (False, True):
        with pytest.raises(ConfigError, match="another store has this file open"):
            DiskStore(path, SPEC, read_only=read_only)
    assert torch.equal(all_rows(store), values)
    store.close()
    with DiskStore.open(path, read_only=True) as one, DiskStore.open(path, read_only=True, backend="threads") as two:
        assert torch.equal(all_rows(one), values) and torch.equal(all_rows(two), values)
        with pytest.raises(ConfigError, match="read_only"):
            one.update(torch.tensor([1]), values[:1])
        with pytest.raises(ConfigError, match="read_only"):
            one.prepare_checkpoint()
        with pytest.raises(ConfigError, match="another store"):
            DiskStore(path, SPEC)


def test_a_reader_does_not_get_rows_that_should_be_undone(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    store, values = wrote_all(path)
    store.update(torch.tensor([1]), values[:1] * 2)
    store.close()
    with pytest.raises(ConfigError, match="open it for writing once"):
        DiskStore.open(path, read_only=True)
    DiskStore.open(path).close()
    with DiskStore.open(path, read_only=True) as reader:
        assert torch.equal(all_rows(reader), values)
