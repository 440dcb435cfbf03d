"""safetensors files in pieces: what theirs reads, and headers that lie."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from engram import tensorfiles
from engram.config import ConfigError
from engram.saving import size_in_bytes
from engram.tensorfiles import Stream, read_header, read_pieces, write_tensors


def test_streams_are_what_safetensors_writes_and_reads(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(5, 3), "a": torch.arange(7), "none": torch.empty(0, 4), "one": torch.tensor(2.5)}
    tensors |= {"h": torch.randn(3).bfloat16(), "u": torch.arange(3, dtype=torch.uint8), "t": torch.randn(4, 3).T}
    size = write_tensors(tmp_path / "f", {name: Stream.of(tensor) for name, tensor in tensors.items()}, {"x": "y"})
    back = load_file(tmp_path / "f")
    assert size == (tmp_path / "f").stat().st_size and back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype for name, tensor in tensors.items())
    with safe_open(tmp_path / "f", "pt") as file:
        assert file.metadata() == {"x": "y"}
    header = read_header(tmp_path / "f")
    assert torch.equal(tensorfiles.read_tensor(tmp_path / "f", header.tensors["t"]), tensors["t"])
    pieces = [(first, piece.clone()) for first, piece in read_pieces(tmp_path / "f", header.tensors["b"], 24)]
    assert [first for first, _ in pieces] == [0, 2, 4]
    assert torch.equal(torch.cat([piece for _, piece in pieces]).view(torch.float32), tensors["b"])
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "f", {}, {})
    for pieces_of in ([torch.ones(2)], [torch.ones(2), torch.ones(2)]):
        with pytest.raises(ValueError, match="bytes"):
            write_tensors(tmp_path / "g", {"x": Stream(torch.float32, (3,), pieces_of)}, {})
        assert not (tmp_path / "g").exists()


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}',
        b'{"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}}',
        b'{"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}, "b": {"dtype": "U8", "shape": [4], '
        b'"data_offsets": [4, 8]}}',
        b'{"a": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}',
    ],
)
def test_headers_that_lie_are_refused(header: bytes, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ConfigError, match=str(tmp_path / "f")):
        read_header(tmp_path / "f")
    (tmp_path / "f").write_bytes(struct.pack("<Q", 1 << 40) + header)
    with pytest.raises(ConfigError, match="no safetensors file, or a truncated one"):
        read_header(tmp_path / "f")


def test_sizes_as_people_write_them() -> None:
    assert [size_in_bytes(text) for text in (7, "5GB", "200 mb", "1.5KiB")] == [7, 5 * 10**9, 2 * 10**8, 1536]
    for text in ("5", "GB", "5XB", 0, -1, True, 1.5):
        with pytest.raises(ConfigError, match="max_shard_size"):
            size_in_bytes(text)  # type: ignore[arg-type]


def test_nothing_that_is_read_is_longer_than_its_header_says(tmp_path: Path) -> None:
    write_tensors(tmp_path / "f", {"rows": Stream.of(torch.ones(4, 2))}, {})
    header = read_header(tmp_path / "f")
    os.truncate(tmp_path / "f", header.size - 3)
    with pytest.raises(RuntimeError, match="ends at byte"):
        list(read_pieces(tmp_path / "f", header.tensors["rows"]))
