"""The reader of safetensors files: equal to the format's own library, and every damage named before a byte is used."""

from __future__ import annotations

import json
import os
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from released_files import raw, write_index, write_tensors
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engram.stores import tensors
from engram.stores.reading import ThreadPool
from engram.stores.tensors import INLINE_READS, RowSpace, Stream, TensorFiles
from engram.stores.tensors import write_tensors as write_streams
from engram.strict import ConfigError

GOOD = {"a": raw(torch.arange(12.0).view(4, 3)), "b": raw(torch.arange(5))}


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8)
    tensors = {str(dtype): (torch.randn(3, 5) * 50).to(dtype) for dtype in dtypes}
    tensors |= {"scalar": torch.tensor(2.5), "none": torch.empty(0, 4)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    for path in (tmp_path, tmp_path / "x.safetensors"):
        with TensorFiles(path) as files:
            assert set(files.tensors) == set(tensors)
            for name, tensor in tensors.items():
                assert torch.equal(files.read(name), tensor) and files.read(name).dtype == tensor.dtype


@pytest.mark.parametrize("count", [5, 4 * INLINE_READS])
def test_rows_of_shards_in_several_files(tmp_path: Path, count: int) -> None:
    table = torch.randn(301, 3)
    cuts = table.split([100, 1, 90, 110])
    first = {"s.0": raw(cuts[0]), "other": raw(torch.zeros(7, dtype=torch.uint8)), "s.2": raw(cuts[2])}
    first |= {"scalar": raw(torch.tensor(1.0)), "wide": ("F32", [2**70, 0], b"")}
    write_index(tmp_path, {"one.safetensors": first, "two.safetensors": {"s.1": raw(cuts[1]), "s.3": raw(cuts[3])}})
    with TensorFiles(tmp_path) as files:
        space = RowSpace(files, [f"s.{i}" for i in range(4)])
        assert space.count == 301
        ids = np.concatenate([np.random.default_rng(count).integers(0, 301, count), [0, 300, 99, 100, 101, 102, 191]])
        found = torch.from_numpy(space.gather(ids)).view(torch.float32)
        assert torch.equal(found, table[torch.from_numpy(ids)])
        for begin, size in ((0, 301), (99, 3), (300, 1)):
            assert torch.equal(
                torch.from_numpy(space.span(begin, size)).view(torch.float32), table[begin : begin + size]
            )
        assert space.span(150, 0).shape == (0, 12) and space.gather(ids[:0]).shape == (0, 12)
        for wrong in (-1, 301):
            with pytest.raises(IndexError, match=f"row {wrong} is outside the 301"):
                space.gather(np.array([5, wrong]))
        with pytest.raises(IndexError, match="rows 300..302"):
            space.span(300, 2)
        with pytest.raises(ValueError, match="no table of rows"):
            RowSpace(files, ["scalar"])
        with pytest.raises(ValueError, match="no table of rows"):
            RowSpace(files, ["wide"])
        with pytest.raises(ValueError, match="no shards of one table"):
            RowSpace(files, ["s.0", "other"])


class OneAtATime(ThreadPool):
    """A queue that, like io_uring's, must not be used by two threads at once."""

    def __init__(self) -> None:
        super().__init__(2)
        self.busy = threading.Lock()

    def read(self, *request: Any) -> None:
        assert self.busy.acquire(blocking=False), "two threads in one queue"
        time.sleep(0.002)
        super().read(*request)
        self.busy.release()


def test_threads_may_share_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers that are read in place share one queue."""
    monkeypatch.setattr(tensors, "open_transfer", lambda *_, **__: OneAtATime())
    table = torch.randn(5000, 8)
    write_tensors(tmp_path / "x.safetensors", {"t": raw(table)})
    with TensorFiles(tmp_path) as files, ThreadPoolExecutor(4) as pool:
        space = RowSpace(files, ["t"])

        def right(seed: int) -> bool:
            ids = np.random.default_rng(seed).integers(0, 5000, 300)
            return torch.equal(torch.from_numpy(space.gather(ids)).view(torch.float32), table[torch.from_numpy(ids)])

        assert all(pool.map(right, range(20)))


def _entry(dtype: str, shape: list[int], first: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"a": _entry("F32", [4, 4], 0, 48)}, "a has 48 bytes, F32"),
        ({"a": _entry("BF16", [4, 3], 0, 48)}, "a has 48 bytes, BF16"),
        ({"b": _entry("I64", [5], 40, 80)}, "b overlaps a"),
        ({"b": _entry("I64", [4], 56, 88)}, "b leaves a gap after a"),
        ({"b": _entry("I64", [6], 48, 96)}, "b ends at byte 96 of the tensors, the file has 88: it is truncated"),
        ({"b": _entry("I64", [4], 48, 80)}, "96 bytes|not as it was written"),
        ({"a": _entry("F32", [4, 3], 48, 0)}, "ends at byte 0 before it begins"),
        ({"a": _entry("F32", [-4, -3], 0, 48)}, "the entry of a is damaged"),
        ({"a": {"dtype": "F32", "shape": [4, 3], "data_offsets": [0.0, 48.0]}}, "the entry of a is damaged"),
        ({"a": {"dtype": "F32", "shape": [4, 3], "data_offsets": [0]}}, "no dtype, shape and two offsets"),
        ({"a": 3}, "no dtype, shape and two offsets"),
    ],
)
def test_a_header_that_contradicts_itself_or_the_file_is_refused(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    path = write_tensors(tmp_path / "x.safetensors", GOOD, **changes)
    with pytest.raises(ValueError, match=said) as caught:
        TensorFiles(path)
    assert "x.safetensors" in str(caught.value)


def test_truncated_longer_and_foreign_files_are_refused(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "x.safetensors", GOOD)
    whole = path.read_bytes()
    for content, said in (
        (whole[:-1], "truncated"),
        (whole + b"\0", "not as it was written"),
        (whole[:5], "no safetensors file"),
        (b"", "no safetensors file"),
        (whole[:40], "its header would have"),
        (struct.pack("<Q", 2**62) + whole[8:], "its header would have 4,611,686,018,427,387,904 bytes"),
        (struct.pack("<Q", 6) + b"[1, 2]", "header is damaged"),
        (struct.pack("<Q", 6) + b'{"a": ', "header is damaged"),
        (struct.pack("<Q", 5000) + b"[" * 5000, "header is damaged"),
        (struct.pack("<Q", 19) + b'{"a": [], "a": [] }', "'a' occurs twice"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=said):
            TensorFiles(path)


def test_a_file_cut_short_while_it_is_open_raises(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "x.safetensors", GOOD)
    with TensorFiles(path) as files:
        os.truncate(path, path.stat().st_size - 60)
        with pytest.raises(RuntimeError, match="row 2 of the table cannot be read|row 3 of the table"):
            RowSpace(files, ["a"]).gather(np.array([0, 3]))
        with pytest.raises(RuntimeError, match="b cannot be read: .*short read"):
            files.read("b")


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "sub/../../x", "", "a\\b", "c:x"])
def test_a_name_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    inside = tmp_path / "folder"
    inside.mkdir()
    write_tensors(tmp_path / "x.safetensors", GOOD)
    (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ConfigError, match="leaves the folder"):
        TensorFiles(inside)


def test_links_of_a_cache_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    write_tensors(blobs / "0123", GOOD)
    (snapshot / "x.safetensors").symlink_to("../blobs/0123")
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    with TensorFiles(snapshot) as files:
        assert list(files.tensors) == ["a"]  # the index does not name b


def test_a_missing_file_raises_when_its_tensor_is_wanted(tmp_path: Path) -> None:
    write_index(tmp_path, {"one.safetensors": {"a": GOOD["a"]}, "two.safetensors": {"b": GOOD["b"]}})
    (tmp_path / "two.safetensors").unlink()
    with TensorFiles(tmp_path / "model.safetensors.index.json") as files:
        assert files.read("a").shape == (4, 3) and files.absent == {"b": "two.safetensors"}
        with pytest.raises(ValueError, match="b is in two.safetensors, which is not there"):
            files.read("b")
        with pytest.raises(ValueError, match="no tensor c"):
            files.read("c")


def test_an_index_that_lies_is_refused(tmp_path: Path) -> None:
    write_index(tmp_path, {"one.safetensors": GOOD})
    index = tmp_path / "model.safetensors.index.json"
    for content, said in (
        ('{"weight_map": {"c": "one.safetensors"}}', "index says that it holds c"),
        ('{"weight_map": ["a"]}', "no mapping"),
        ('{"weight_map": {"a": 3}}', "no mapping"),
        ('{"weights": {}}', "no index with a weight_map"),
        ("{", "no index with a weight_map"),
    ):
        index.write_text(content)
        with pytest.raises(ValueError, match=said):
            TensorFiles(tmp_path)
    index.rename(tmp_path / "a.safetensors.index.json")
    (tmp_path / "b.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match="2 indexes"):
        TensorFiles(tmp_path)


def test_paths_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no safetensors file in this folder"):
        TensorFiles(tmp_path)
    with pytest.raises(ConfigError, match="nothing here"):
        TensorFiles(tmp_path / "no")
    write_tensors(tmp_path / "x.safetensors", GOOD)
    write_tensors(tmp_path / "y.safetensors", {"a": GOOD["a"]})
    with pytest.raises(ValueError, match="a is in x.safetensors, too"):
        TensorFiles(tmp_path)


def test_unknown_dtypes_are_listed_and_not_read(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "x.safetensors", {"a": ("F3", [4], bytes(2)), "b": ("F4", [4], bytes(2))})
    with TensorFiles(path) as files:
        assert files["a"].dtype == "F3" and files["b"].shape == (4,)
        with pytest.raises(ValueError, match="a has dtype F3"):
            files.read("a")


def test_streams_are_what_safetensors_writes_and_reads(tmp_path: Path) -> None:
    held = {"b": torch.randn(5, 3), "a": torch.arange(7), "none": torch.empty(0, 4), "one": torch.tensor(2.5)}
    held |= {"h": torch.randn(3).bfloat16(), "u": torch.arange(3, dtype=torch.uint8), "t": torch.randn(4, 3).T}
    size = write_streams(tmp_path / "f", {name: Stream.of(tensor) for name, tensor in held.items()}, {"x": "y"})
    back = load_file(tmp_path / "f")
    assert size == (tmp_path / "f").stat().st_size and back.keys() == held.keys()
    assert all(torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype for name, tensor in held.items())
    with safe_open(tmp_path / "f", "pt") as file:
        assert file.metadata() == {"x": "y"}
    with TensorFiles(tmp_path / "f") as ours:
        assert torch.equal(ours.read("t"), held["t"]) and ours.metadata[tmp_path / "f"] == {"x": "y"}
        pieces = list(ours.pieces("b", 24))
        assert list(ours.pieces("none")) == []
    assert [first for first, _ in pieces] == [0, 2, 4]
    assert torch.equal(torch.cat([piece for _, piece in pieces]).view(torch.float32), held["b"])
    with pytest.raises(FileExistsError):
        write_streams(tmp_path / "f", {}, {})
    for pieces_of in ([torch.ones(2)], [torch.ones(2), torch.ones(2)]):
        with pytest.raises(ValueError, match="bytes"):
            write_streams(tmp_path / "g", {"x": Stream(torch.float32, (3,), pieces_of)}, {})
        assert not (tmp_path / "g").exists()
