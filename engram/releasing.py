"""Between released files and memories of ours: released weights into a memory, and a memory into a released layout.

    memory = engram.Memory(released_config(PATH).replace(placement="host"), token_map=token_map)
    load_released(memory, PATH)                       # everything is checked, then rows are streamed into the store
    load_released(memory, PATH, rows="in place")      # rows stay in the released files, read-only
    export_released(memory, "qwen3.8-flash-next", FOLDER)

Shapes: R rows, W row width, D hidden width, S residual streams.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from engram import families
from engram.config import ConfigError, EngramConfig
from engram.kernels.dispatch import power_of_two
from engram.layer import Engram
from engram.memory import Memory
from engram.prefetch import Fetcher
from engram.released import WEIGHT_BLOCK, Released, ReleasedRows, require_layout
from engram.released_layouts import LAYOUTS, ReleasedLayout, Weight
from engram.stores import DeferredDiskStore, DeviceStore, Store
from engram.stores.formats import LARGEST, fp8_power, get_format
from engram.stores.rowfile import sync_folder
from engram.stores.tensors import DTYPES, INDEX, Stream, write_tensors
from engram.strict import choice, require
from engram.table import Table

PIECE = 1 << 22
"""Values that are read, checked and written at a time."""
FILE_BYTES = 5 * 10**9
"""Largest file that several tensors are put into."""
MEANING = ("gate", "combine", "compress", "boundary", "bias")
"""Fields that decide what the weights mean; no file says them, the family does."""
DESCRIBED = ("layers", "orders", "heads", "head_dim", "bases", "filler", "eos", "seed", "hidden_size", "branches",
             "conv_kernel", "gate_eps", "conv_eps", "hash")  # fmt: skip
"""Fields that a config.json beside the files decides, too."""


def load_released(
    target: Memory | Engram, path: str | Path, *, rows: Literal["copy", "in place"] = "copy"
) -> dict[str, Any]:
    """Fill a memory (or one layer of it) with the weights and rows of released files.

    rows  "copy": into the layer's store, whatever its place and format, in pieces of 4 million values. "in place": the
          layer reads them from the files at every look-up (by the prefetching thread), and they cannot be trained.
          A file of rows (placement "disk") is checkpointed after it was filled.

    Returns {"family", "layers": {layer: {"rows", "width", "stored", "kept", "bytes"}}}: the formats in the files and
    here. Where they differ, values are rounded to the format of `row_dtype`; same formats are copied byte for byte, or
    value for value into a file. Norm weights become plain (the family's 1 + w), in the dtype of the parameter.

    Everything is checked before the memory is touched: raises ConfigError naming the field in which its configuration
    is not that of the files, and ValueError for tensors that are missing or have another dtype or shape, for constants
    that are not ours, and for NaN, infinity or magnitudes above 2^127 (rows "copy": in any row; else such a row raises
    when it is read). A disk that fails half way raises RuntimeError and leaves rows half replaced; those in a file are
    the old ones again when it is next opened.
    """
    choice("rows", rows, ("copy", "in place"))
    layers = target.modules_by_layer() if isinstance(target, Memory) else [target]
    with Released(path) as released:
        layout = require_layout(released)
        _check_config(layers[0], released, layout)
        weights: dict[int, dict[str, Tensor]] = {}
        for module in layers:
            if problems := list(released.problems(module.layer, module.cfg, module.hash)):
                more = f" (and {len(problems) - 1} more; see engram inspect)" if len(problems) > 1 else ""
                raise ValueError(f"path: {path}: {problems[0]}{more}")
            weights[module.layer] = released.weights(module.layer, module.cfg)
            _check_module(module, weights[module.layer], rows)
        sources = {module.layer: ReleasedRows(released, module.layer) for module in layers}
        if rows == "copy":
            for source in sources.values():
                _check_values(source)
        for module in layers if rows == "copy" else ():
            if isinstance(module.table.store, DeferredDiskStore):
                module.table.store.open()  # a file that cannot be made is an error before anything has changed
        if isinstance(target, Memory):
            target.drop_fetches()
        for module in layers:
            (_copy_rows if rows == "copy" else _use_rows)(module.table, sources[module.layer])
            parameters = dict(module.named_parameters())
            with torch.no_grad():
                for name, weight in weights[module.layer].items():
                    parameters[name].copy_(weight.view(parameters[name].shape))
        about = {layer: _about(source, rows, layers[0].cfg) for layer, source in sources.items()}
        released.kept = rows == "in place"
        return {"family": layout.family, "layers": about}


def _about(source: ReleasedRows, rows: str, cfg: EngramConfig) -> dict[str, Any]:
    spec = source.spec
    kept = cfg.row_dtype if rows == "copy" else source.format
    sizes = {"rows": spec.rows, "width": spec.width, "bytes": source.bytes_held()["released"]}
    return {**sizes, "stored": source.format, "kept": kept}


def _check_config(module: Engram, released: Released, layout: ReleasedLayout) -> None:
    """Raise ConfigError naming the first field in which a memory is not what the files are."""
    ours, theirs = module.cfg, released.cfg
    fields = (*MEANING, *(DESCRIBED if released.known else ()))
    where = "config.json" if released.known else f"family {layout.family}"
    for name in fields:
        there, here = getattr(theirs, name), getattr(ours, name)
        if name == "conv_eps" and not (ours.conv_kernel or theirs.conv_kernel):
            continue
        if here != there:
            name = "rows" if name == "bases" else name
            raise ConfigError(f"{name}: {here!r} in this configuration, {there!r} in {where} of {released.files.path}")
    rule = dataclasses.replace(ours.hash, pad_rows_to=theirs.hash.pad_rows_to)
    require(rule == theirs.hash, f"hash: {ours.hash} in this configuration, {theirs.hash} in {where}")
    if released.known and module.hash.vocab_size != theirs.vocab_size:
        raise ConfigError(f"vocab_size: {module.hash.vocab_size} is hashed here, {theirs.vocab_size} in {where}")


def _check_module(module: Engram, weights: dict[str, Tensor], rows: str) -> None:
    """Raise unless the module has these weights, all of them, in memory that can be written."""
    parameters = {name: p for name, p in module.named_parameters() if p is not module.table.proxy}
    for name in parameters.keys() ^ weights.keys():
        there, here = ("files", "configuration") if name in weights else ("configuration", "files")
        raise ConfigError(
            f"layer {module.layer}: {name} is in the {there}, but not in the {here}; see gate, conv_kernel, bias"
        )
    if any(p.is_meta for p in parameters.values()):
        raise ConfigError(f"layer {module.layer}: its weights are on the meta device; use to_empty(device=...) first")
    for name, parameter in parameters.items():
        if parameter.numel() != weights[name].numel():
            raise ConfigError(f"{name}: {list(parameter.shape)} here, {list(weights[name].shape)} in the files")
    store = module.table.store
    if rows == "copy" and isinstance(store, DeviceStore) and store.rows.is_meta:
        raise ConfigError(f"layer {module.layer}: its rows are on the meta device; use to_empty(device=...) first")
    if rows == "copy" and isinstance(store, ReleasedRows):
        raise ConfigError(
            f"layer {module.layer}: its rows are read in place from files; build a new memory to copy them"
        )
    if rows == "in place" and len(module.table.common.members()) > 1:
        raise ConfigError(f"layer {module.layer}: another model shares its rows; read in place before sharing")


def _pieces(count: int, width: int) -> Iterator[tuple[int, int]]:
    """(first row, number of rows) of pieces of at most PIECE values."""
    step = max(1, PIECE // width)
    return ((first, min(step, count - first)) for first in range(0, count, step))


def _check_values(source: ReleasedRows) -> None:
    """Raise ValueError naming the first row that no store takes."""
    for first, count in _pieces(source.spec.rows, source.spec.width):
        if source.sound(first, count):
            continue
        fine = (source.values(first, count).abs() <= LARGEST).all(dim=1)  # false for NaN
        if not bool(fine.all()):
            row = first + int((~fine).nonzero()[0])
            raise ValueError(
                f"released rows of layer {source.layer}: row {row} holds NaN, infinity or a magnitude above 2^127 "
                f"(a scale byte of 255, perhaps); use another copy of the files"
            )


def _copy_rows(table: Table, source: ReleasedRows) -> None:
    """Stream all rows into a table's store, past the optimizer: no rounding at random, no gradient, no scale."""
    table.flush()
    store = table.store
    same = source.format == table.cfg.row_dtype and isinstance(store, DeviceStore)
    for first, count in _pieces(source.spec.rows, source.spec.width):
        if same:
            store.rows[first : first + count] = source.stored(first, count).view(store.dtype).view(count, -1)
        else:
            ids = torch.arange(first, first + count, device=store.device)
            store.update(ids, source.values(first, count).to(store.device))
    store.flush()
    if isinstance(store, DeferredDiskStore):  # a table that is opened again goes back to its last checkpoint
        store.commit_checkpoint(store.prepare_checkpoint())
    _replaced(table)


def _use_rows(table: Table, source: ReleasedRows) -> None:
    """Give a table the released rows as its store."""
    if table.fetcher is not None:
        table.fetcher.close()
    cast(Any, table)._modules.pop("store", None)  # a module's attribute takes nothing but modules
    table.store = source
    table.fetcher = Fetcher(cast(Store, source), f"memory layer {table.layer}", exact=table.cfg.prefetch == "exact")
    table.trainable = False
    _replaced(table)


def _replaced(table: Table) -> None:
    """Tell a table that its rows are others now."""
    table.common.scale = 1.0
    for member in table.common.members():
        member.proxy.grad = None
        if member.proxy.device != table.store.device:
            member.proxy.data = member.proxy.data.to(table.store.device)
    if table.fetcher is not None:
        table.fetcher.replaced()


@dataclass(frozen=True)
class _Entry:
    """A tensor to be written: its bytes come in pieces, so that no table is ever whole in memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Tensor]]

    @property
    def size(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


def export_released(memory: Memory, family: str, folder: str | Path, *, shards: int = 128) -> dict[str, Any]:
    """Write a memory into a new folder in the layout of "qwen3.8-flash-next" or "deepseek-v4.1".

    shards  into how many the rows of one layer are cut (Qwen; V4.1 has one table a layer).

    Safetensors files of at most 5 GB (a larger table has a file of its own), an index, and a config.json with the
    fields of the memory, all in the family's names. Qwen: rows of fp32 or int8 memories become F32, others BF16, which
    is exact; norm weights are stored as w - 1, in float64 where fp32 would not give the same weight back. V4.1: rows
    and the fused projection become fp8 with power-of-two scales, which rounds them once; what is read back and exported
    again is the same bytes. Returns {"family", "files", "bytes"}.

    Raises ConfigError when the configuration is not expressible in the layout (the message names the field) or the
    folder is there; nothing is left behind then, nor after any other error.
    """
    layout = next((one for one in LAYOUTS if one.family == family and one.fields is not None), None)
    if layout is None or layout.fields is None:
        offered = ", ".join(one.family for one in LAYOUTS if one.fields is not None)
        raise ConfigError(f"family: {family!r} has no export; choose one of {offered}")
    folder, cfg = Path(folder), memory.cfg
    require(shards >= 1, f"shards: {shards} must be at least 1")
    require(not folder.exists(), f"folder: {folder} is there; name a new one")
    require(folder.parent.is_dir(), f"folder: {folder.parent} is no folder; make it first")
    if any(tensor.is_meta for tensor in (*memory.parameters(), *memory.buffers())):
        raise ConfigError("memory: it is on the meta device, and has no numbers to write")
    cfg = cfg.replace(vocab_size=memory.layer(cfg.layers[0]).hash.vocab_size)
    _check_expressible(cfg, layout)
    entries = [entry for module in memory.modules_by_layer() for entry in _entries(module, cfg, layout, shards)]
    groups = _groups(entries)
    aside = folder.with_name(f"{folder.name}.new-{os.getpid()}")
    aside.mkdir()
    try:
        index: dict[str, str] = {}
        for number, group in enumerate(groups, 1):
            name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            streams = {one.name: Stream(DTYPES[one.dtype], one.shape, one.pieces()) for one in group}
            write_tensors(aside / name, streams, {"format": "pt"})
            index.update({entry.name: name for entry in group})
        total = sum(entry.size for entry in entries)
        about = {"metadata": {"total_size": total}, "weight_map": index}
        described = layout.fields(cfg)
        if layout.shard_count:
            tables = [entry for entry in entries if layout.split(entry.name)]
            described[layout.shard_count] = len(tables) // len(cfg.layers)
        for name, content in ((INDEX, about), ("config.json", described)):
            _write_text(aside / name, json.dumps(content, indent=2) + "\n")
        sync_folder(aside / INDEX)
        os.rename(aside, folder)
        sync_folder(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return {"family": family, "files": len(groups), "bytes": total}


def _check_expressible(cfg: EngramConfig, layout: ReleasedLayout) -> None:
    """Raise ConfigError naming the first field that the layout's config.json and names cannot say."""
    assert layout.fields is not None
    try:
        again = layout.config(layout.fields(cfg), families.get(layout.family))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"family {layout.family} cannot hold this memory: {error}") from error
    for name in (*MEANING, *DESCRIBED, "vocab_size"):
        if name == "conv_eps" and not cfg.conv_kernel:
            continue
        if (said := getattr(again, name)) != (ours := getattr(cfg, name)):
            name = "rows" if name == "bases" else name
            raise ConfigError(
                f"{name}: {ours!r} is not expressible in the layout of {layout.family}, which says {said!r}"
            )


def _entries(module: Engram, cfg: EngramConfig, layout: ReleasedLayout, shards: int) -> Iterator[_Entry]:
    """The tensors of one layer."""
    one_table = bool(layout.block_scale)
    prefix = f"layers.{module.layer}.engram." if one_table else f"model.language_model.layers.{module.layer}.ple."
    rows, width = module.table.store.spec.rows, cfg.head_dim
    if one_table:
        blocks = get_format("fp8_e4m3", width).row_bytes - width

        def part(begin: int, end: int) -> Callable[[], Iterator[Tensor]]:
            return lambda: (bytes_nb[:, begin:end] for bytes_nb in _fp8_rows(module.table))

        yield _Entry(f"{prefix}embed.weight", "F8_E4M3", (rows, width), part(0, width))
        yield _Entry(f"{prefix}embed.scale", "F8_E8M0", (rows, blocks), part(width, width + blocks))
    else:
        dtype = "F32" if cfg.row_dtype in ("fp32", "int8") else "BF16"
        step = -(-rows // shards)
        for shard, first in enumerate(range(0, rows, step)):
            count = min(step, rows - first)
            name = f"{prefix}ple_embedding.ngram_embedding.shard_{shard}.weight"
            yield _Entry(name, dtype, (count, width), _converted(module.table, first, count, DTYPES[dtype]))
    for part_name, constant in layout.constants.items():
        saved = getattr(module.hash, constant).cpu()
        yield _whole(prefix + part_name, saved)
    done = set()
    for weight in layout.weights:
        if weight.part not in done:
            done.add(weight.part)
            yield from _dense(module, cfg, prefix, weight, layout)


def _values(table: Table, first: int, count: int) -> Iterator[Tensor]:
    """Values fp32 [n, W] of rows `first` to `first + count`, in pieces, on the CPU."""
    for begin, size in _pieces(count, table.cfg.head_dim):
        ids = torch.arange(first + begin, first + begin + size, device=table.store.device)
        yield table.read(ids).detach().cpu()


def _fp8_rows(table: Table) -> Iterator[Tensor]:
    """All rows as fp8 bytes uint8 [n, b], in pieces, on the CPU: as they are where they are stored so, else encoded."""
    store, codec = table.store, get_format("fp8_e4m3", table.cfg.head_dim)
    as_they_are = table.cfg.row_dtype == "fp8_e4m3" and table.scale == 1
    for first, count in _pieces(store.spec.rows, table.cfg.head_dim):
        if isinstance(store, ReleasedRows) and store.format == "fp8_e4m3":
            yield store.stored(first, count)
        elif isinstance(store, DeviceStore) and as_they_are:
            yield store.rows[first : first + count].cpu()
        else:
            yield from (codec.encode(values) for values in _values(table, first, count))


def _converted(table: Table, first: int, count: int, dtype: torch.dtype) -> Callable[[], Iterator[Tensor]]:
    return lambda: (values.to(dtype) for values in _values(table, first, count))


def _whole(name: str, tensor: Tensor) -> _Entry:
    dtype = next(name for name, kind in DTYPES.items() if kind == tensor.dtype)
    return _Entry(name, dtype, tuple(tensor.shape), lambda: iter([tensor]))


def _dense(module: Engram, cfg: EngramConfig, prefix: str, weight: Weight, layout: ReleasedLayout) -> Iterator[_Entry]:
    """One dense tensor of the layout, with its scales: all of our weights that are in it."""
    parameters = dict(module.named_parameters())
    ours = [one for one in layout.weights if one.part == weight.part]  # in the order in which they are fused
    stored = torch.cat([parameters[one.ours].detach().cpu().flatten(0, -2 if one.count else -1) for one in ours])
    sizes = {
        "D": cfg.hidden_size,
        "S": cfg.branches,
        "F": cfg.branches + 1,
        "K": cfg.conv_kernel,
        "M": cfg.memory_width,
    }
    shape = tuple(prod({**sizes, "1": 1}[letter] for letter in letters) for letters in weight.shape)
    stored = stored.view(shape)
    if not bool(stored.isfinite().all()):
        raise ValueError(f"layer {module.layer}: {ours[0].ours} holds NaN or infinity; nothing was written")
    if weight.plus:
        stored = _without(stored, weight.plus)
    if not weight.scale:
        yield _whole(prefix + weight.part, stored)
        return
    codes, scales = fp8_blocks(stored.float())
    yield _whole(prefix + weight.part, codes)
    yield _whole(prefix + weight.scale, scales)


def _without(weight: Tensor, plus: float) -> Tensor:
    """w - plus, in the dtype of `w` where adding it again gives the same bits, else in float64."""
    less = (weight.double() - plus).to(weight.dtype)
    same = torch.equal((less.double() + plus).to(weight.dtype), weight)
    return less if same else weight.double() - plus


def fp8_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix fp32 [a, b] -> codes E4M3 [a, b] and scales E8M0 [ceil(a / 32), ceil(b / 32)], by the rule of fp8 rows.

    The smallest power of two at which the block's largest magnitude rounds to at most 448, so that what is decoded gets
    the same codes and scales again.
    """
    height, width = weight.shape
    padded = nn.functional.pad(weight, (0, -width % WEIGHT_BLOCK, 0, -height % WEIGHT_BLOCK))
    blocks = padded.unflatten(0, (-1, WEIGHT_BLOCK)).unflatten(2, (-1, WEIGHT_BLOCK))
    power = fp8_power(blocks.abs().amax(dim=(1, 3)))
    codes = (blocks * power_of_two(127 - power)[:, None, :, None]).flatten(2).flatten(0, 1)[:height, :width]
    return codes.to(torch.float8_e4m3fn), (power + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def _groups(entries: list[_Entry]) -> list[list[_Entry]]:
    """Entries in their order, put into files of at most FILE_BYTES; a larger one is alone."""
    groups: list[list[_Entry]] = [[]]
    for entry in entries:
        if groups[-1] and sum(one.size for one in groups[-1]) + entry.size > FILE_BYTES:
            groups.append([])
        groups[-1].append(entry)
    return groups


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
