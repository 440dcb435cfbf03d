"""safetensors files in pieces: streamed writes and positioned reads, so that a large table is never there twice.

    write_tensors(path, {"rows": Stream(torch.bfloat16, (R, W), pieces)}, {"engram_rows": "..."})
    header = read_header(path)                       # everything is checked before a byte of a tensor is used
    for first, bytes_nB in read_pieces(path, header.tensors["rows"]): ...

The usual writer wants every tensor in memory and refuses tensors that share one; the usual reader maps the whole file.
The format is theirs (8 bytes of length, JSON, data), and theirs read what this file writes.

Shapes: n rows of one piece, B bytes a row.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engram.strict import ConfigError

PIECE_BYTES = 8 << 20
"""Bytes that are read or written at a time: a thousandth of a large table, and enough for the speed of a disk."""
MAX_HEADER = 100_000_000
"""Longest header that safetensors itself accepts."""

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""torch dtype -> its name in a header."""
DTYPES = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True)
class Stream:
    """A tensor to be written: `pieces` are tensors of any shape whose bytes, one after another, are the tensor's."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Iterable[Tensor]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: Tensor) -> Stream:
        """A tensor that is in memory as a whole."""
        return cls(tensor.dtype, tuple(tensor.shape), (tensor,))


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file: its bytes are `start` to `start + size`, counted from the start of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True)
class Header:
    """What a file says it holds. `size` is that of the whole file, in bytes."""

    size: int
    tensors: dict[str, TensorEntry]
    metadata: dict[str, str] = field(default_factory=dict)


def write_tensors(path: str | Path, streams: Mapping[str, Stream], metadata: Mapping[str, str]) -> int:
    """Write a new safetensors file, a piece at a time, and sync it -> its size in bytes.

    Pieces of zeros become holes where the file system has them. Raises FileExistsError when `path` exists, OSError when
    it cannot be written, ValueError for pieces that are not the tensor's bytes; no file is left then.
    """
    ordered = sorted(streams.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))  # keeps all of them aligned
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, stream in ordered:
        entries[name] = {
            "dtype": NAMES[stream.dtype],
            "shape": list(stream.shape),
            "data_offsets": [at, at + stream.size],
        }
        at += stream.size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    head = len(text).to_bytes(8, "little") + text
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(fd, len(head) + at)
        _write_at(fd, memoryview(head), 0)
        place = len(head)
        for name, stream in ordered:
            end = place + stream.size
            for piece in stream.pieces:
                flat = piece.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                if place + len(flat) > end:
                    raise ValueError(f"{name}: more bytes than the {stream.size:,} of shape {list(stream.shape)}")
                if bool(flat.any()):
                    _write_at(fd, flat.numpy().data, place)
                place += len(flat)
            if place != end:
                raise ValueError(f"{name}: {stream.size - (end - place):,} bytes, {stream.size:,} are its shape's")
        os.fsync(fd)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(fd)
    return len(head) + at


def _write_at(fd: int, view: memoryview, place: int) -> None:
    while view:
        written = os.pwrite(fd, view, place)
        view, place = view[written:], place + written


def read_header(path: str | Path) -> Header:
    """Header of a safetensors file, checked against itself and the file's size.

    Raises ConfigError naming the file when it cannot be read, is no safetensors file, contradicts itself (unknown
    dtype, shape and bytes that disagree, gaps, overlaps), or is shorter or longer than it says.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(MAX_HEADER, size - 8):
                raise ConfigError(f"{path}: no safetensors file, or a truncated one ({size:,} bytes); use another copy")
            text = file.read(length)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        data = json.loads(text)
        metadata = {str(key): str(value) for key, value in data.pop("__metadata__", {}).items()}
        entries = [_entry(name, about, 8 + length) for name, about in data.items()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path}: the header is damaged ({error}); use another copy") from error
    at = 8 + length
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.size)):
        if entry.start != at:
            raise ConfigError(f"{path}: tensor {entry.name!r} begins at byte {entry.start:,}, not {at:,}: damaged")
        at += entry.size
    if at != size:
        raise ConfigError(
            f"{path}: {size:,} bytes, its header says {at:,}: the file is "
            f"{'truncated' if size < at else 'not as it was written'}; use another copy"
        )
    return Header(size, {entry.name: entry for entry in entries}, metadata)


def _entry(name: str, about: Any, begin: int) -> TensorEntry:
    dtype, shape, (start, end) = DTYPES[about["dtype"]], tuple(about["shape"]), about["data_offsets"]
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (*shape, start, end)):
        raise ValueError(f"tensor {name!r} has a shape or place that is no number")
    if end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"tensor {name!r}: {end - start:,} bytes for shape {list(shape)}")
    return TensorEntry(name, dtype, shape, begin + start, end - start)


def read_pieces(path: str | Path, entry: TensorEntry, piece_bytes: int = PIECE_BYTES) -> Iterator[tuple[int, Tensor]]:
    """A matrix in a file -> (first row, its next rows as bytes uint8 [n, B]) from the first row to the last.

    A piece is good until the next one is asked for. Raises RuntimeError when the file ends early, OSError when it
    cannot be read.
    """
    if not entry.size:
        return
    rows, row_bytes = entry.shape[0], entry.size // entry.shape[0]
    step = min(rows, max(1, piece_bytes // row_bytes))
    buffer_nB = torch.empty(step, row_bytes, dtype=torch.uint8)
    with open(path, "rb", buffering=0) as file:
        for first in range(0, rows, step):
            part_nB = buffer_nB[: min(step, rows - first)]
            _read_at(file.fileno(), part_nB, entry.start + first * row_bytes, path)
            yield first, part_nB


def read_tensor(path: str | Path, entry: TensorEntry) -> Tensor:
    """One whole tensor on the CPU. Raises as `read_pieces` does."""
    tensor = torch.empty(entry.shape, dtype=entry.dtype)
    with open(path, "rb", buffering=0) as file:
        _read_at(file.fileno(), tensor.reshape(-1).view(torch.uint8), entry.start, path)
    return tensor


def _read_at(fd: int, into: Tensor, place: int, path: str | Path) -> None:
    view = into.reshape(-1).numpy().data
    while view:
        got = os.preadv(fd, [view], place)
        if not got:
            raise RuntimeError(f"{path}: the file ends at byte {place:,}; it was longer when its header was read")
        view, place = view[got:], place + got
