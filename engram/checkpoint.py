"""Read what `saving.py` wrote: a memory into a model, or a base model together with its memory.

    handle = engram.load(model, folder)                       # the memory, attached to a plain base and filled
    model, handle = engram.from_pretrained(folder)            # a folder of model.save_pretrained, or a name on the Hub
    fill(handle.memory, folder)                               # into a memory that is there already

Everything that can be checked without reading rows is checked first: the index and every header, sizes, shapes, dtypes,
the token map's hash, and the constants that address the rows. Then rows go from their files into the store in pieces.
Where anything fails the model is left without memory, as it was.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import snapshot_download
from torch import Tensor, nn

from engram.attaching import attach
from engram.compress import TokenMap
from engram.config import ConfigError, EngramConfig
from engram.handles import Handle
from engram.hashing import total_rows
from engram.memory import Memory
from engram.saving import (
    FORMAT,
    INDEX,
    PATTERNS,
    SUBFOLDER,
    Index,
    ShardEntry,
    TableEntry,
    dense_state,
    shard_metadata,
    stored_as,
)
from engram.stores import DeferredDiskStore
from engram.stores.device import unfilled
from engram.stores.formats import get_format
from engram.stores.journal import find_journals
from engram.stores.tensors import DTYPES, TensorFiles
from engram.strict import from_dict, require

log = logging.getLogger("engram")
MAX_INDEX = 64 << 20
"""Bytes of the longest index that is read; ours has about 200 bytes a shard."""

MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""Version of a layout -> what turns its index into that of the next version. Version 1 is the first."""


@dataclass(frozen=True)
class Saved:
    """A checked folder: its index, its token map and its dense tensors. Rows are still to be read."""

    folder: Path
    index: Index
    token_map: TokenMap | None
    dense: dict[str, Tensor]


class Pretrained(NamedTuple):
    """A base model and the handle of its memory."""

    model: Any
    handle: Handle


def load(
    model: nn.Module,
    folder: str | Path,
    placement: str | None = None,
    path: str | Path | None = None,
    *,
    tokenizer: Any = None,
    revision: str | None = None,
) -> Handle:
    """Attach the memory saved in `folder` (or on the Hub under that name) to a plain base, filled -> its handle.

    placement  where rows are to live here; None is where they were saved from.
    path       folder of the row files for placement "disk", which must not hold tables of these layers yet.
    tokenizer  checked against the saved token map where given; it is not needed.
    revision   branch, tag or commit on the Hub.
    Raises ConfigError naming what is wrong: no memory there, a newer layout, a file that is missing, truncated,
    elsewhere or another one, another token map, hash, seed, layer list, shape or dtype, or a model that does not fit.
    RuntimeError and OSError when reading or storing rows fails. The model is then without memory, as it was.
    """
    saved = read_saved(folder, revision)
    cfg = _placed(saved.index.config, placement, path)
    new = _new_files(cfg)
    with unfilled():
        handle = attach(model, cfg, tokenizer, saved.token_map)
    try:
        _refuse_meta(handle.memory)
        _fill(handle.memory, saved)
        for module in handle.memory.modules_by_layer():
            store = module.table.store
            if isinstance(
                store, DeferredDiskStore
            ):  # what came after the last checkpoint is undone at the next opening
                store.commit_checkpoint(store.prepare_checkpoint())
    except BaseException:
        handle.detach()
        handle.memory.close()
        _remove(new)
        raise
    return handle


def fill(memory: Memory, folder: str | Path, *, revision: str | None = None) -> None:
    """Replace what `memory` holds by what is saved in `folder`, which may have been kept in other stores.

    Raises ConfigError, with the memory as it was, where the two differ or the folder is not whole; RuntimeError and
    OSError when reading or storing rows fails, with some rows replaced.
    """
    saved = read_saved(folder, revision)
    _refuse_meta(memory)
    _fill(memory, saved)


def from_pretrained(
    name: str | Path,
    *,
    base: str | Path | None = None,
    placement: str | None = None,
    path: str | Path | None = None,
    tokenizer: Any = None,
    model_class: Any = None,
    revision: str | None = None,
    **options: Any,
) -> Pretrained:
    """A base model with its memory -> (model, handle).

    name         a folder of `model.save_pretrained` (the memory lies in its `engram/`), a folder of
                 `handle.save_pretrained`, or either of them on the Hub.
    base         where the base comes from; None is `name` itself, or the name that the memory was saved with.
    model_class  default AutoModelForCausalLM; `options` go to its `from_pretrained` (dtype, device_map, ...).
    Raises as `load` does, ConfigError also where the base is not known, and what transformers raises.
    """
    from transformers import AutoModelForCausalLM

    folder = find_memory(name, revision)
    index = _read_index(folder)
    beside = folder.name == SUBFOLDER and (folder.parent / "config.json").is_file()
    if base is None:
        base = (name if not os.path.isdir(name) else folder.parent) if beside else index.base_model
        if beside and revision is not None:
            options["revision"] = revision
    if base is None:
        raise ConfigError(
            f"base: {name} holds a memory without its base model, and does not know its name; give base=... "
            f"(it was a {index.base_type or 'model'} of hidden width {index.config.hidden_size})"
        )
    model = (model_class or AutoModelForCausalLM).from_pretrained(base, **options)
    return Pretrained(model, load(model, folder, placement, path, tokenizer=tokenizer))


def find_memory(name: str | Path, revision: str | None = None) -> Path:
    """A folder or a name on the Hub -> the folder that holds the index. Raises ConfigError where there is none."""
    folder = Path(name)
    if not folder.exists():
        try:
            patterns = [*PATTERNS, f"{SUBFOLDER}/*", "config.json"]
            folder = Path(snapshot_download(str(name), revision=revision, allow_patterns=patterns))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{name}: no folder of this name, and no repository that can be read: {error}") from error
    found = next((place for place in (folder, folder / SUBFOLDER) if (place / INDEX).is_file()), None)
    if found is None:
        raise ConfigError(
            f"{name}: holds no memory (no {INDEX}, here or in {SUBFOLDER}/); save one with save_pretrained"
        )
    return found


def read_saved(name: str | Path, revision: str | None = None) -> Saved:
    """Read and check everything but the rows themselves. Raises ConfigError as `load` says."""
    folder = find_memory(name, revision)
    index = _read_index(folder)
    _check_index(folder, index)
    token_map = None
    if index.token_map is not None:
        token_map = TokenMap.load(_file(folder, index.token_map.file, index.token_map.bytes), index.token_map_sha256)
    path = _file(folder, index.dense.file, index.dense.bytes)
    with _tensors(path) as file:
        dense = {name: file.read(name) for name in file.tensors}
    for table in index.tables:
        for shard in table.shards:
            _check_shard(folder, index.config, table, shard)
    return Saved(folder, index, token_map, dense)


def _read_index(folder: Path) -> Index:
    """The index in its newest form. Raises ConfigError for one that is damaged or of a newer version."""
    path = folder / INDEX
    require(path.stat().st_size <= MAX_INDEX, f"{path}: {path.stat().st_size:,} bytes are no index; use another copy")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        version = data["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: the index is damaged ({error!r}); use another copy") from error
    while version in MIGRATIONS:
        data = MIGRATIONS[version](data)
        version = data["format"]
    require(
        version == FORMAT,
        f"{path}: layout version {version!r}, this code reads {', '.join(map(str, sorted({*MIGRATIONS, FORMAT})))}; "
        f"install a newer engram (it was written by {data.get('engram')!r})",
    )
    return from_dict(Index, data, where=str(path))


def _check_index(folder: Path, index: Index) -> None:
    """The index against its own configuration. Raises ConfigError."""
    cfg, where = index.config, folder / INDEX
    layers = tuple(table.layer for table in index.tables)
    require(layers == cfg.layers, f"{where}: tables of layers {list(layers)}, the configuration has {list(cfg.layers)}")
    require(
        cfg.compress == (index.token_map is not None) == (index.token_map_sha256 is not None),
        f"{where}: compress is {cfg.compress}, and the token map is {index.token_map}; one belongs to the other",
    )
    row_bytes = get_format(cfg.row_dtype, cfg.head_dim).row_bytes
    for table in index.tables:
        found = (table.rows, table.width, table.row_bytes)
        wanted = (total_rows(cfg, table.layer), cfg.head_dim, row_bytes)
        require(
            found == wanted,
            f"{where}: layer {table.layer} has {found} rows, values and bytes a row, its configuration makes {wanted}",
        )
        require(
            math.isfinite(table.scale) and table.scale > 0,
            f"{where}: layer {table.layer} has scale {table.scale}; it must be above 0",
        )
        at = 0
        for shard in table.shards:
            require(
                shard.first == at and shard.rows > 0,
                f"{where}: {shard.file} holds rows from {shard.first} on where {at} comes next: a shard is missing",
            )
            at += shard.rows
        require(at == table.rows, f"{where}: the shards of layer {table.layer} hold {at} of {table.rows} rows")


def _file(folder: Path, name: str, size: int) -> Path:
    """A file that the index names: beside it, there, and as long as it should be. Raises ConfigError."""
    require(
        name == Path(name).name and name not in ("", ".", "..") and "\\" not in name and "\0" not in name,
        f"{folder / INDEX}: names the file {name!r}, which is not in its own folder; refused",
    )
    path = folder / name
    require(path.is_file(), f"{path}: this file of the memory is missing; copy the whole folder")
    there = path.stat().st_size
    require(
        there == size,
        f"{path}: {there:,} bytes, the index says {size:,}: the file is "
        f"{'truncated' if there < size else 'not as it was written'}; use another copy",
    )
    return path


def _tensors(path: Path) -> TensorFiles:
    """An open file. Raises ConfigError for a damaged one."""
    try:
        return TensorFiles(path)
    except ValueError as error:
        raise ConfigError(f"{error}; use another copy of the memory") from error


def _check_shard(folder: Path, cfg: EngramConfig, table: TableEntry, shard: ShardEntry) -> None:
    """Raise ConfigError when a shard's file holds anything but its rows."""
    path = _file(folder, shard.file, shard.bytes)
    with _tensors(path) as file:
        found = {name: (DTYPES.get(info.dtype), info.shape) for name, info in file.tensors.items()}
        said = file.metadata[path].get("engram_shard")
    dtype, length = stored_as(get_format(cfg.row_dtype, cfg.head_dim))
    wanted = {"rows": (dtype, (shard.rows, length))}
    require(found == wanted, f"{path}: holds {found}, wanted is {wanted}")
    about = shard_metadata(table.layer, shard.first, cfg.row_dtype, table.identity)["engram_shard"]
    require(said == about, f"{path}: says {said}, the index {about}: the file belongs elsewhere")


def _placed(cfg: EngramConfig, placement: str | None, path: str | Path | None) -> EngramConfig:
    """The saved configuration with its rows placed here."""
    placement = cfg.placement if placement is None else placement
    require(placement == "disk" or path is None, f"path: rows with placement {placement!r} have none; leave it out")
    require(
        placement != "disk" or path is not None,
        "path: rows with placement 'disk' need the folder of their files: load(model, folder, path=...); "
        "or choose placement='host' or 'device'",
    )
    return cfg.replace(placement=placement, path=None if path is None else str(path))


def _new_files(cfg: EngramConfig) -> list[Path]:
    """Row files that placement "disk" will make. Raises ConfigError where there is one already."""
    if cfg.placement != "disk":
        return []
    files = [Path(str(cfg.path)) / f"layer-{layer}.safetensors" for layer in cfg.layers]
    there = next((file for file in files if os.path.lexists(file)), None)
    require(there is None, f"path: {there} is there already; name another folder, or remove it first")
    return files


def _remove(files: list[Path]) -> None:
    """Row files of a load that failed, and their journals."""
    for file in files:
        if file.parent.is_dir():
            for journal in find_journals(file).values():
                journal.unlink(missing_ok=True)
            file.unlink(missing_ok=True)


def _refuse_meta(memory: Memory) -> None:
    lost = any(tensor.is_meta for tensor in (*memory.parameters(), *memory.buffers()))
    require(not lost, "model: its weights lie on the meta device; give it storage (to_empty, load_state_dict) first")


def _fill(memory: Memory, saved: Saved) -> None:
    """Dense weights, rows and scales into a memory. Raises ConfigError before anything is changed where they differ."""
    index = saved.index
    for field in ("layers", "head_dim", "row_dtype"):
        ours, theirs = getattr(memory.cfg, field), getattr(index.config, field)
        require(ours == theirs, f"{field}: {ours!r} here, {theirs!r} in {saved.folder}")
    own = dense_state(memory)
    for table in index.tables:
        module = memory.layer(table.layer)
        prefix = f"layers.{table.layer}.hash."
        same = all(
            name in saved.dense and saved.dense[name].tolist() == tensor.tolist()
            for name, tensor in own.items()
            if name.startswith(prefix)
        )
        require(
            module.table.identity == table.identity and same,
            f"layer {table.layer}: {saved.folder} was saved with another hash than this memory has (vocabulary of "
            f"{index.vocab_size:,} ids there, {module.hash.vocab_size:,} here; or another seed, token map, filler, "
            f"boundary or version); its rows would be addressed wrongly",
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    found = {name: tuple(tensor.shape) for name, tensor in saved.dense.items()}
    if shapes != found:
        name = min({*shapes.items()} ^ {*found.items()})[0]
        raise ConfigError(
            f"{saved.folder / index.dense.file}: {name} has shape {found.get(name)}, this memory has {shapes.get(name)}"
        )
    memory.load_state_dict(saved.dense, strict=False)
    for table in index.tables:
        ours = memory.layer(table.layer).table
        ours.flush()
        for shard in table.shards:
            with _tensors(saved.folder / shard.file) as file:
                for first, bytes_nB in file.pieces("rows"):
                    ours.store.write_range(shard.first + first, bytes_nB)
        ours.renew(table.scale)
    log.info("memory loaded from %s", saved.folder)
