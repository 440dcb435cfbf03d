"""Released files read as they are: what is in them, whether our hash fits them, their weights and their rows.

    engram inspect PATH                                        # a folder of safetensors files, or one of them
    values_nW = released_rows(PATH, layer=1, row_ids=[5, 7])   # positioned reads: 47 or 189 GiB are never loaded
    cfg = released_config(PATH)                                # releasing.py fills a memory of it, and writes one back

The layouts are data (released_layouts.py). Row numbers are nowhere in the weights: constants that a file has saved, its
row counts and its config.json are compared with what our hash derives, and a difference is an error, since every row
would be addressed wrongly.

Shapes: R rows, n row numbers, W row width, D hidden width, S residual streams, C columns, b bytes of a row.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.config import ConfigError, EngramConfig
from engram.hashing import NgramHash, table_sizes, total_rows
from engram.released_layouts import NAMES, ReleasedLayout, Weight, configured, find_layout
from engram.stores import TableSpec
from engram.stores.formats import BLOCK, get_format
from engram.stores.tensors import DTYPES, RowSpace, TensorFiles

WEIGHT_BLOCK = 32  # numbers along both sides of a block of a projection that share one scale
PLAIN = {"F32": "fp32", "BF16": "bf16", "F16": "fp16", "F64": "fp64"}
"""Dtypes of plain numbers -> their names here."""
LOOKS_LIKE = ("engram", "ngram", ".ple.")
"""Names with these that are in no memory module are listed: a spelling nobody has described yet."""


@dataclass
class FoundLayer:
    """The memory of one decoder block in released files: its names' prefix and the tensors of its rows, in order."""

    layer: int
    prefix: str
    tables: list[str] = field(default_factory=list)
    fault: str = ""


class Released:
    """Released files, taken apart: `layout` (None: none is known), `cfg`, and `layers` (0-based block -> FoundLayer).

    unplaced  names inside the memory's modules, or like them, that belong to nothing we know.
    known     whether a config.json describes the memory; else `cfg` is the family's, with the measures of the files.
    kept      whether the files stay open at the end of a `with`, for rows that are read later.

    Raises what TensorFiles raises, and ValueError for a config.json that cannot be used or a layer that is there twice.
    """

    def __init__(self, path: str | Path) -> None:
        self.files = TensorFiles(path)
        names = [*self.files.tensors, *self.files.absent]
        self.layout = find_layout(names)
        self.layers: dict[int, FoundLayer] = {}
        self.unplaced: list[str] = []
        self.known = self.kept = False
        if self.layout is None:
            self.unplaced = [name for name in names if any(mark in name for mark in LOOKS_LIKE)]
            return
        fields = self._config_json()
        self.cfg = configured(self.layout, fields)
        self.known = fields is not None and bool(self.layout.known_by) and self.layout.known_by in fields
        by_prefix: dict[str, dict[str, int | None]] = {}
        for name in names:
            if found := self.layout.split(name):
                by_prefix.setdefault(found[0], {})[name] = found[2]
        table = next((info for name, info in self.files.tensors.items() if self.layout.split(name)), None)
        block = self.layout.block_scale and table is not None and table.dtype == "F8_E4M3"
        row_dtype = "fp8_e4m3" if block else {"F32": "fp32", "BF16": "bf16"}.get(table.dtype if table else "")
        self.cfg = self.cfg.replace(row_dtype=row_dtype or self.cfg.row_dtype)
        if not self.known:
            self.cfg = self.cfg.replace(**self._measured(next(iter(by_prefix)), names))
        for prefix, shards in by_prefix.items():
            one = FoundLayer(-1, prefix, sorted(shards, key=lambda name: (shards[name] is not None, shards[name] or 0)))
            numbers = [shards[name] for name in one.tables]
            if numbers != [None] and numbers != list(range(len(numbers))):
                one.fault = self._numbering(prefix, numbers)
            one.layer = self._layer(one)
            if one.layer in self.layers:
                other = self.layers[one.layer].prefix
                raise ValueError(f"path: {path}: layer {one.layer} is there twice, as {other!r} and {prefix!r}")
            self.layers[one.layer] = one
        self.layers = dict(sorted(self.layers.items()))
        self.unplaced = list(self._unplaced(names))

    def _config_json(self) -> dict[str, Any] | None:
        """The config.json beside the files, its text part where it has one; None where there is none."""
        path = self.files.folder / "config.json"
        if not path.exists():
            return None
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"path: {path}: not valid JSON: {error}") from error
        inner = fields.get("text_config", fields) if isinstance(fields, dict) else None
        if not isinstance(inner, dict):
            raise ValueError(f"path: {path}: expected a mapping of fields")
        return inner

    def _measured(self, prefix: str, names: Sequence[str]) -> dict[str, int]:
        """Fields of the configuration that the shapes of one module tell."""
        assert self.layout is not None
        sizes: dict[str, int] = {}
        for weight in self.layout.weights:
            part = weight.part.replace("{s}", "0").replace("{c}", "0")
            info = self.files.tensors.get(prefix + part)
            if info is not None and len(info.shape) == len(weight.shape):
                sizes.update({k: v for k, v in zip(weight.shape, info.shape, strict=True) if k not in sizes})
            if "{s}" in weight.part:
                sizes["S"] = len({name for name in names if _fits(prefix + weight.part, name)})
        if "SD" in sizes and sizes.get("D"):
            sizes.setdefault("S", sizes["SD"] // sizes["D"])
        table = next((info for name, info in self.files.tensors.items() if self.layout.split(name)), None)
        if table is not None and len(table.shape) == 2:
            sizes["W"] = table.shape[1]
        fields = {"hidden_size": "D", "branches": "S", "conv_kernel": "K", "head_dim": "W"}
        return {name: sizes[letter] for name, letter in fields.items() if sizes.get(letter)}

    def _numbering(self, prefix: str, numbers: Sequence[int | None]) -> str:
        """What is wrong with the numbers of a table's shards."""
        given = [number for number in numbers if number is not None]
        missing = sorted(set(range(max(given, default=0) + 1)) - set(given))
        if missing:
            return f"{prefix}: shard {missing[0]} of its rows is missing"
        return f"{prefix}: its rows are there twice, in shards of one number or beside a whole table"

    def _layer(self, one: FoundLayer) -> int:
        """The 0-based block of a module: by its name, or by its number of rows."""
        assert self.layout is not None
        number = self.layout.layer(one.prefix)
        if number is not None:
            return number
        if self.cfg.site == "embedding":
            return 0
        rows = sum(self.files[name].shape[0] for name in one.tables)
        fitting = [layer for layer in self.cfg.layers if total_rows(self.cfg, layer) == rows]
        return fitting[0] if fitting else self.cfg.layers[0]  # of another size: the check of rows says so

    def _unplaced(self, names: Iterable[str]) -> Iterator[str]:
        assert self.layout is not None
        for name in names:
            inside = [one for one in self.layers.values() if name.startswith(one.prefix)]
            if any(name in one.tables or self.layout.skips(name[len(one.prefix) :]) for one in inside):
                continue
            known = {name for one in inside for name in self._parts(one, self.cfg)}
            if name not in known and (inside or any(mark in name for mark in LOOKS_LIKE)):
                yield name

    def _parts(self, one: FoundLayer, cfg: EngramConfig) -> list[str]:
        """Names of everything but the rows that a module of this layout may have."""
        assert self.layout is not None
        layout = self.layout
        parts = [part for group in layout.parts(cfg.branches, cfg.columns).values() for part in group]
        parts += [weight.scale for weight in layout.weights] + [layout.block_scale, layout.one_scale]
        return [one.prefix + part for part in (*parts, *layout.constants) if part]

    def __enter__(self) -> Released:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.kept:
            self.files.close()

    def found(self, layer: int) -> FoundLayer:
        """The memory of block `layer`. Raises ConfigError where the files have none."""
        if layer not in self.layers:
            there = list(self.layers) if self.layers else "no memory that we know"
            raise ConfigError(f"layer: {layer} is not in {self.files.path}; it has {there} (0-based blocks)")
        return self.layers[layer]

    def problems(self, layer: int, cfg: EngramConfig, hasher: NgramHash | None) -> Iterator[str]:
        """Everything in which one layer's tensors are not what `cfg` says: names, dtypes, shapes, rows, constants.

        hasher  whose constants the saved ones must equal; None where the configuration has no such layer.
        """
        one, layout = self.found(layer), self.layout
        assert layout is not None
        if one.fault:
            yield one.fault
            return
        try:
            yield from self._row_problems(one, cfg)
        except ValueError as error:
            yield str(error)
        shapes = _letters(cfg)
        for weight in layout.weights:
            expected = [prod(shapes[letter] for letter in product) for product in weight.shape]
            for part in layout.parts(cfg.branches, cfg.columns)[weight.ours]:
                if wrong := self._wrong(one.prefix + part, expected, weight):
                    yield wrong
        if hasher is None:
            yield f"layer {layer}: the configuration has memory in {list(cfg.layers)} alone"
            return
        for part, name in layout.constants.items():
            derived = getattr(hasher, name).cpu().flatten().tolist()
            if one.prefix + part in self.files:
                saved = self.files.read(one.prefix + part).flatten().tolist()
                if saved != derived:
                    at = next((i for i, (a, b) in enumerate(zip(saved, derived, strict=False)) if a != b), len(derived))
                    yield (
                        f"{one.prefix}{part}: saved {saved[at : at + 1]} at place {at} of {len(saved)}, ours is "
                        f"{derived[at : at + 1]} of {len(derived)}: another seed, vocabulary or size; every row would "
                        f"be addressed wrongly"
                    )

    def _wrong(self, name: str, expected: list[int], weight: Weight) -> str:
        """What is wrong with one dense tensor; empty where nothing is."""
        try:
            info = self.files[name]
            if list(info.shape) != expected:
                return f"{name}: shape {list(info.shape)}, expected {expected}"
            if weight.scale and info.dtype == "F8_E4M3":
                scale = self.files[name[: -len(weight.part)] + weight.scale]
                blocks = [-(-size // WEIGHT_BLOCK) for size in expected]
                if list(scale.shape) != blocks or scale.dtype != "F8_E8M0":
                    return f"{scale.name}: {scale.dtype} {list(scale.shape)}, expected F8_E8M0 {blocks}"
            elif info.dtype not in PLAIN:
                return f"{name}: dtype {info.dtype}, expected one of {', '.join(PLAIN)}"
        except ValueError as error:
            return str(error)
        return ""

    def _row_problems(self, one: FoundLayer, cfg: EngramConfig) -> Iterator[str]:
        infos = [self.files[name] for name in one.tables]
        for info in infos:
            if len(info.shape) != 2 or info.shape[1] != cfg.head_dim:
                yield f"{info.name}: shape {list(info.shape)}, expected rows of {cfg.head_dim} values"
                return
        rows = [info.shape[0] for info in infos]
        layer = one.layer
        if layer in cfg.layers:
            sizes = list(table_sizes(cfg)[layer])
            assert self.layout is not None
            if self.layout.one_a_column and rows != sizes:
                yield f"{one.prefix}: tables of {rows} rows, this configuration has {sizes}"
            elif sum(rows) != total_rows(cfg, layer):
                yield (
                    f"{one.prefix}: {sum(rows):,} rows, the hash of layer {layer} addresses "
                    f"{total_rows(cfg, layer):,}: other table sizes, or another layer"
                )
        ReleasedRows(self, one.layer)

    def weights(self, layer: int, cfg: EngramConfig) -> dict[str, Tensor]:
        """Our name of a weight -> its numbers, in the shape of ours. Raises ValueError for NaN or infinity in it."""
        one, found = self.found(layer), {}
        assert self.layout is not None
        for weight in self.layout.weights:
            names = [one.prefix + part for part in self.layout.parts(cfg.branches, cfg.columns)[weight.ours]]
            parts = [self._numbers(name, weight, cfg) for name in names]
            whole = torch.cat(parts, dim=weight.axis) if len(parts) > 1 else parts[0]
            if not bool(whole.isfinite().all()):
                raise ValueError(f"{names[0]}: holds NaN or infinity; use another copy")
            # in float64: 1 + w of a bf16 w needs more bits than bf16 has
            found[weight.ours] = whole.double() + weight.plus if weight.plus else whole
        return found

    def _numbers(self, name: str, weight: Weight, cfg: EngramConfig) -> Tensor:
        """A dense tensor, or the rows of it that are this weight; fp8 blocks times their scales, fp32."""
        info, letters = self.files[name], _letters(cfg)
        if not weight.count:
            return self.files.read(name)
        first = prod(letters[letter] for letter in weight.first) if weight.first else 0
        count = prod(letters[letter] for letter in weight.count)
        stored = torch.from_numpy(self.files.span(name, first, count)).view(DTYPES[info.dtype]).view(count, -1)
        if info.dtype in PLAIN:
            return stored
        scale = self.files.read(name[: -len(weight.part)] + weight.scale).float()
        block = torch.arange(first, first + count) // WEIGHT_BLOCK
        return stored.float().mul_(scale[block].repeat_interleave(WEIGHT_BLOCK, dim=1)[:, : stored.shape[1]])


class ReleasedRows:
    """The rows of one layer in released files: the interface of a store, but nothing can be written.

    format  "fp32", "bf16", "fp16", "fp8_e4m3" (codes and block scales) or "fp8_e4m3 with one scale".

    Raises ValueError when the rows' tensors have another dtype or shape, or their scales are missing.
    """

    kind = "released"
    device = torch.device("cpu")

    def __init__(self, released: Released, layer: int) -> None:
        one, layout, files = released.found(layer), released.layout, released.files
        assert layout is not None
        self.layer = layer
        self._codes: RowSpace | None = RowSpace(files, one.tables)
        self._scales: RowSpace | None = None
        self._factor = 1.0
        first = self._codes.infos[0]
        if len(first.shape) != 2 or min(first.shape) < 1:
            raise ValueError(f"{first.name}: shape {list(first.shape)} is no table of rows")
        self.spec = TableSpec(self._codes.count, first.shape[1])
        self._dtype = DTYPES.get(first.dtype)
        self.format = PLAIN.get(first.dtype, "")
        if first.dtype == "F8_E4M3" and layout.block_scale:
            self.format, self._scales = "fp8_e4m3", RowSpace(files, [one.prefix + layout.block_scale])
            scale, blocks = self._scales.infos[0], -(-self.spec.width // BLOCK)
            if scale.dtype != "F8_E8M0" or scale.shape != (self.spec.rows, blocks):
                raise ValueError(
                    f"{scale.name}: {scale.dtype} {list(scale.shape)}, expected F8_E8M0 {[self.spec.rows, blocks]}"
                )
        elif first.dtype == "F8_E4M3" and layout.one_scale:
            self.format = "fp8_e4m3 with one scale"
            scale_of_all = files.read(one.prefix + layout.one_scale).double().flatten()
            if len(scale_of_all) != 1 or not 0 < float(scale_of_all[0]) < float("inf"):
                raise ValueError(
                    f"{one.prefix}{layout.one_scale}: {scale_of_all.tolist()}, expected one number above 0"
                )
            self._factor = float(scale_of_all[0])
        if not self.format:
            raise ValueError(f"{first.name}: dtype {first.dtype}, rows are read as {', '.join(PLAIN)} or F8_E4M3")

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, scales of its own included."""
        return self._open().row_bytes + (0 if self._scales is None else self._scales.row_bytes)

    def read(self, ids_n: Tensor | Sequence[int]) -> Tensor:
        """Row numbers [n] -> values fp32 [n, W], as the format says: a scale byte of 0 is 2^-127, of 255 NaN.

        Raises TypeError for numbers that are no integers, IndexError outside the table, RuntimeError naming file and
        row where one cannot be read.
        """
        given = torch.as_tensor(ids_n if isinstance(ids_n, Tensor) else list(ids_n))
        if len(given) and (given.is_floating_point() or given.dtype == torch.bool):
            raise TypeError(f"row_ids: expected integers, got {given.dtype}")
        codes, ids = self._open(), given.cpu().reshape(-1).numpy().astype(np.int64)
        return self._decode(codes.gather(ids), None if self._scales is None else self._scales.gather(ids))

    def values(self, first: int, count: int) -> Tensor:
        """Rows `first` to `first + count` -> values fp32 [count, W]."""
        scales = None if self._scales is None else self._scales.span(first, count)
        return self._decode(self._open().span(first, count), scales)

    def sound(self, first: int, count: int) -> bool:
        """Whether the bits alone show that no value of these rows is NaN, infinite or beyond 2^127; else look closer.

        Twenty times as fast as decoding: with a table of 100 GB the difference is 20 minutes.
        """
        codes = self._open().span(first, count)
        if self._dtype == torch.bfloat16:
            return int((codes.view(np.uint16) & 0x7FFF).max()) <= 0x7F00
        if self._dtype == torch.float8_e4m3fn:
            highest = 0 if self._scales is None else int(self._scales.span(first, count).max())
            # 448 * 2^(245 - 127) is below 2^127
            return int((codes & 0x7F).max()) < 0x7F and highest <= 245 and 448 * self._factor <= 2.0**127
        return False

    def stored(self, first: int, count: int) -> Tensor:
        """The same rows as bytes uint8 [count, b] of the row format `format`, where that is one of ours."""
        codes = torch.from_numpy(self._open().span(first, count))
        return (
            codes if self._scales is None else torch.cat([codes, torch.from_numpy(self._scales.span(first, count))], 1)
        )

    def _decode(self, codes_nb: np.ndarray, scales_nk: np.ndarray | None) -> Tensor:
        if not len(codes_nb):  # torch cannot view no bytes as numbers
            return torch.empty(0, self.spec.width)
        codes = torch.from_numpy(codes_nb)
        if scales_nk is not None:
            return get_format("fp8_e4m3", self.spec.width).decode(
                torch.cat([codes, torch.from_numpy(scales_nk)], dim=1)
            )
        assert self._dtype is not None
        values_nW = codes.view(self._dtype).view(len(codes), -1).to(torch.float32)
        return values_nW if self._factor == 1 else values_nW.mul_(self._factor)

    def gather(self, ids_n: Tensor, out: Tensor | None = None) -> Tensor:
        """As `read`, into `out` where it is given. Raises RuntimeError naming a row that holds NaN or infinity, too."""
        values_nW = self.read(ids_n.cpu())
        broken = (~values_nW.isfinite()).any(dim=1).nonzero().flatten()
        if len(broken):
            raise RuntimeError(
                f"released rows of layer {self.layer}: row {int(ids_n[broken[0]])} holds NaN or infinity"
            )
        return values_nW if out is None else out.copy_(values_nW)

    def update(self, ids_U: Tensor, values_UW: Tensor) -> None:
        """Always raises RuntimeError: released files are never written."""
        raise RuntimeError(f"released rows of layer {self.layer} are read-only; load them into a store to train them")

    def bytes_held(self) -> dict[str, int]:
        """Bytes of the rows by place: all of them in files."""
        return {"released": 0 if self._codes is None else self.spec.rows * self.row_bytes}

    def flush(self) -> None:
        """Nothing is ever written."""

    def close(self) -> None:
        """Let go of the files, which are closed when no layer reads them any more."""
        self._codes = self._scales = None

    def _open(self) -> RowSpace:
        if self._codes is None:
            raise RuntimeError(f"released rows of layer {self.layer}: closed")
        return self._codes

    def __deepcopy__(self, memo: dict[int, Any]) -> ReleasedRows:
        return copy.copy(self)  # nothing of it ever changes


def _letters(cfg: EngramConfig) -> dict[str, int]:
    """The letters of shapes in released_layouts.py as numbers."""
    sizes = {"D": cfg.hidden_size, "S": cfg.branches, "F": cfg.branches + 1, "K": cfg.conv_kernel}
    return {**sizes, "M": cfg.memory_width, "W": cfg.head_dim, "1": 1}


def _fits(pattern: str, name: str) -> bool:
    """Whether a name is `pattern` with a number for {s}."""
    before, _, after = pattern.partition("{s}")
    return name.startswith(before) and name.endswith(after) and name[len(before) : len(name) - len(after)].isdigit()


def released_config(path: str | Path) -> EngramConfig:
    """The configuration of the memory in released files: config.json's where there is one, else the family's with the
    measures of the files.

    `row_dtype` is the format of the files where it is one of ours, and `init` is "zeros": a table of 100 GB that is
    filled from the files need not be filled with random numbers before.

    Raises ConfigError where no layout is known, and what `Released` raises.
    """
    with Released(path) as released:
        require_layout(released)
        return released.cfg.replace(init="zeros")


def released_rows(path: str | Path, layer: int, row_ids: Tensor | Sequence[int]) -> Tensor:
    """Row numbers [n] of one 0-based block -> values fp32 [n, W], read in place; a scale byte of 255 gives NaN.

    Raises ConfigError for a layer that is not there, IndexError outside the table, and what `Released` raises.
    """
    with Released(path) as released:
        require_layout(released)
        one = released.found(layer)
        if one.fault:
            raise ValueError(one.fault)
        return ReleasedRows(released, layer).read(row_ids)


def require_layout(released: Released) -> ReleasedLayout:
    """The layout of released files. Raises ConfigError where none is known."""
    if released.layout is None:
        raise ConfigError(
            f"path: {released.files.path}: no memory in a layout that we know; known are those of {', '.join(NAMES)}"
        )
    return released.layout
