"""Write a memory into a folder: configuration, token map, hash constants, dense weights and rows, all or nothing.

    save(memory, folder)                     # engram.json, memory.safetensors, rows-layer-1-00001-of-00003.safetensors
    handle.save_pretrained(folder)           # the same for an attached memory, with the name of its base
    model.save_pretrained(folder)            # the plain base, and the memory in folder/engram

Rows go from the store into their files in pieces, byte for byte in the store's own format; `engram.json` names the
files and comes last, so a folder holds the old memory or the new one whatever happens in between. Row gradients,
optimizer state and counters are not saved. `checkpoint.py` reads it all back.

Shapes: R rows of a table, n of one piece, B bytes a row.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from torch import Tensor, nn

from engram import __version__
from engram.config import ConfigError, EngramConfig
from engram.memory import Memory
from engram.modelcard import CardFacts, card_text, may_write, size_text
from engram.stores.device import PLAIN_DTYPES
from engram.stores.formats import RowFormat, get_format
from engram.stores.rowfile import sync_folder
from engram.stores.tensors import READ_BYTES, Stream, TensorFiles, write_tensors
from engram.strict import to_dict
from engram.table import Table

log = logging.getLogger("engram")
FORMAT = 1
"""Version of the layout. A change that older code would read wrongly counts it up; see checkpoint.MIGRATIONS."""
INDEX, DENSE, TOKEN_MAP, CARD = "engram.json", "memory.safetensors", "token_map.safetensors", "README.md"
SUBFOLDER = "engram"
"""Where a base model's folder keeps its memory."""
SHARD_SIZE = "5GB"
PATTERNS = ("memory*.safetensors", "token_map*.safetensors", "rows-layer-*.safetensors", INDEX)
"""Names of our files, for uploads and downloads."""

_OURS = re.compile(r"(memory|token_map|rows-layer-\d+-\d+-of-\d+)(\.\d+)?\.safetensors")
_ASIDE = re.compile(_OURS.pattern + r"\.writing-\d+")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True)
class FileEntry:
    """A file beside the index: its name, without a folder, and its size in bytes."""

    file: str
    bytes: int


@dataclass(frozen=True)
class ShardEntry:
    """A file with `rows` rows of a table, from row `first` on."""

    file: str
    bytes: int
    first: int
    rows: int


@dataclass(frozen=True)
class TableEntry:
    """One layer's table: stored rows times `scale` are the values; `identity` is the digest of the hash constants."""

    layer: int
    rows: int
    width: int
    row_bytes: int
    scale: float
    identity: str
    shards: tuple[ShardEntry, ...]


@dataclass(frozen=True)
class Index:
    """`engram.json`. vocab_size counts the ids (or classes) that are hashed; base_* say what it was attached to."""

    format: int
    engram: str
    config: EngramConfig
    vocab_size: int
    dense: FileEntry
    tables: tuple[TableEntry, ...]
    token_map: FileEntry | None = None
    token_map_sha256: str | None = None
    base_model: str | None = None
    base_type: str | None = None

    def files(self) -> list[FileEntry]:
        """Every file that the index names."""
        shards = [FileEntry(shard.file, shard.bytes) for table in self.tables for shard in table.shards]
        return [self.dense, *([] if self.token_map is None else [self.token_map]), *shards]


def save(
    memory: Memory, folder: str | Path, *, model: nn.Module | None = None, max_shard_size: int | str = SHARD_SIZE
) -> Path:
    """Write `memory` into `folder` (made where it is missing) -> the folder. Other files in it are left alone.

    model           whose name on the Hub and type are noted down.
    max_shard_size  most bytes of rows in one file, as a number or "200MB"; a row is never cut.
    Raises ConfigError for a memory on the meta device, a folder that is a file, a size that is none; RuntimeError when
    writes of rows failed earlier; OSError when something cannot be written. A memory that was saved there before is
    then still whole.
    """
    folder, limit = Path(folder), size_in_bytes(max_shard_size)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"save: {folder} is a file; name a folder")
    tensors = dense_state(memory)
    lost = next((name for name, tensor in tensors.items() if tensor.is_meta), None)
    if lost is not None or any(module.table.store.device.type == "meta" for module in memory.modules_by_layer()):
        raise ConfigError(f"save: {lost or 'rows'} of the memory lie on the meta device; give the model storage first")
    memory.flush()
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    transaction = _Transaction(folder)
    try:
        index = _write_files(memory, transaction, tensors, limit, model)
        transaction.finish(index)
    except BaseException:
        transaction.undo()
        if is_new:
            folder.rmdir()
        raise
    _write_card(folder, index, tensors)
    sizes = ", ".join(f"layer {table.layer} {size_text(table.rows * table.row_bytes)}" for table in index.tables)
    total = sum(file.bytes for file in index.files())
    log.info("memory saved to %s: %s (rows: %s)", folder, size_text(total), sizes)
    return folder


def size_in_bytes(size: int | str) -> int:
    """A number of bytes, or a text like "5GB" (powers of 1000) or "5GiB". Raises ConfigError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", size) if isinstance(size, str) else None
    if found is not None and found[2].upper() in _UNITS:
        size = int(float(found[1]) * _UNITS[found[2].upper()])
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(f"max_shard_size: {size!r} is no size; give bytes, or a text like '5GB' or '200MB'")
    return size


def dense_state(memory: Memory) -> dict[str, Tensor]:
    """Dense weights and hash constants by name: the state of the memory without rows and their scale.

    Raises ConfigError where something else stands in for a projection (an adapter that was given all linear layers):
    its names would be those of no memory.
    """
    for module in memory.modules_by_layer():
        for name in ("value", "key"):
            found = getattr(module, name)
            if found is not None and type(found) is not nn.Linear:
                raise ConfigError(
                    f"memory layer {module.layer}: its {name} projection is a {type(found).__module__}."
                    f"{type(found).__name__}; keep the memory out of an adapter's target modules, or merge or unload "
                    f"the adapter first"
                )
    left_out = ("table.store.rows", "table.scale")
    return {name: tensor for name, tensor in memory.state_dict().items() if not name.endswith(left_out)}


def stored_as(rows: RowFormat) -> tuple[torch.dtype, int]:
    """dtype and row length of the tensor `rows` in a shard: values for fp32 and bf16, bytes for every other format."""
    dtype = PLAIN_DTYPES.get(rows.name, torch.uint8)
    return dtype, rows.row_bytes // dtype.itemsize


def shard_metadata(layer: int, first: int, row_format: str, identity: str) -> dict[str, str]:
    """What ties a shard to its table."""
    about = {"layer": layer, "first": first, "row_format": row_format, "identity": identity}
    return {"engram_shard": json.dumps(about, sort_keys=True), "format": "pt"}


class _Transaction:
    """Files of one save: written aside, renamed to names that are free, named by the index, which comes last."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.before = folder, _named_before(folder / INDEX)
        taken = [name for name in os.listdir(folder) if _OURS.fullmatch(name)]
        used = {int(found[2][1:]) if found[2] else 1 for name in taken if (found := _OURS.fullmatch(name))}
        self.number = min(set(range(1, len(used) + 2)) - used)
        self.renamed: list[Path] = []
        self._aside: dict[Path, Path] = {}

    def place(self, name: str) -> tuple[str, Path]:
        """Wanted name -> its name in this save, which no file has, and where to write it until the end."""
        if self.number > 1:
            name = f"{name.removesuffix('.safetensors')}.{self.number}.safetensors"
        aside = self.folder / f"{name}.writing-{os.getpid()}"
        aside.unlink(missing_ok=True)
        self._aside[self.folder / name] = aside
        return name, aside

    def finish(self, index: Index) -> None:
        """Everything takes its name, the index last; what only the old index named is dropped."""
        for path, aside in self._aside.items():
            os.rename(aside, path)
            self.renamed.append(path)
        sync_folder(self.folder / INDEX)
        replace_text(self.folder / INDEX, json.dumps(to_dict(index), indent=1) + "\n")
        self.renamed = []
        names = {file.file for file in index.files()}
        for name in set(os.listdir(self.folder)) - names:
            ours = name in self.before or (_OURS.fullmatch(name) and _has_our_mark(self.folder / name))
            if ours or _ASIDE.fullmatch(name):  # a save that was killed leaves some of them behind
                (self.folder / name).unlink(missing_ok=True)
        sync_folder(self.folder / INDEX)

    def undo(self) -> None:
        """Leave the folder as it was."""
        for path in (*self._aside.values(), *self.renamed):
            path.unlink(missing_ok=True)


def _named_before(index: Path) -> set[str]:
    """Names in an index that will be replaced, as far as it can be read; only names of ours."""
    try:
        data = json.loads(index.read_text(encoding="utf-8"))
        files = [data["dense"], data["token_map"], *(shard for table in data["tables"] for shard in table["shards"])]
        names = {str(file["file"]) for file in files if file is not None}
    except (OSError, ValueError, KeyError, TypeError):  # none, or one that nobody can load any more
        return set()
    return {name for name in names if _OURS.fullmatch(name)}


def _has_our_mark(path: Path) -> bool:
    """Whether a save has written this file."""
    try:
        with TensorFiles(path) as file:
            return not {"engram_shard", "engram_memory", "engram_token_map"}.isdisjoint(file.metadata[path])
    except ValueError:  # no safetensors file, or a damaged one
        return False


def replace_text(path: Path, text: str) -> None:
    """Write a small text file aside, sync it, and let it take its name at once."""
    aside = path.with_name(f"{path.name}.writing-{os.getpid()}")
    try:
        with open(aside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _write_files(
    memory: Memory, transaction: _Transaction, tensors: dict[str, Tensor], limit: int, model: nn.Module | None
) -> Index:
    cfg, tmap = memory.cfg, memory.token_map
    name, aside = transaction.place(DENSE)
    streams = {key: Stream.of(tensor) for key, tensor in tensors.items()}
    dense = FileEntry(name, write_tensors(aside, streams, {"engram_memory": str(FORMAT), "format": "pt"}))
    map_entry = None
    if tmap is not None:
        name, aside = transaction.place(TOKEN_MAP)
        map_entry = FileEntry(name, write_tensors(aside, {"map": Stream.of(tmap.map)}, tmap.metadata()))
    return Index(
        format=FORMAT,
        engram=__version__,
        config=cfg.replace(path=None),  # a folder of this machine
        vocab_size=memory.layer(cfg.layers[0]).hash.vocab_size,
        dense=dense,
        tables=tuple(_write_table(module.table, transaction, limit) for module in memory.modules_by_layer()),
        token_map=map_entry,
        token_map_sha256=None if tmap is None else tmap.sha256,
        base_model=hub_name(model),
        base_type=getattr(getattr(model, "config", None), "model_type", None),
    )


def _write_table(table: Table, transaction: _Transaction, limit: int) -> TableEntry:
    rows, spec = get_format(table.cfg.row_dtype, table.cfg.head_dim), table.store.spec
    dtype, length = stored_as(rows)
    a_shard = max(1, limit // rows.row_bytes)
    count = math.ceil(spec.rows / a_shard)
    shards = []
    for number, first in enumerate(range(0, spec.rows, a_shard), start=1):
        stop = min(first + a_shard, spec.rows)
        name, aside = transaction.place(f"rows-layer-{table.layer}-{number:05d}-of-{count:05d}.safetensors")
        pieces = _pieces(table, first, stop, max(1, READ_BYTES // rows.row_bytes))
        about = shard_metadata(table.layer, first, rows.name, table.identity)
        size = write_tensors(aside, {"rows": Stream(dtype, (stop - first, length), pieces)}, about)
        shards.append(ShardEntry(name, size, first, stop - first))
    entry = (table.layer, spec.rows, spec.width, rows.row_bytes, float(table.scale), table.identity)
    return TableEntry(*entry, tuple(shards))


def _pieces(table: Table, first: int, stop: int, step: int) -> Iterator[Tensor]:
    for start in range(first, stop, step):
        yield table.store.read_range(start, min(start + step, stop))


def _write_card(folder: Path, index: Index, tensors: dict[str, Tensor]) -> None:
    """A README of somebody else's stays."""
    if not may_write(folder / CARD):
        return
    constants = ("hash.multipliers", "hash.sizes", "hash.offsets", "hash.digest")
    facts = CardFacts(
        index.config,
        [(t.layer, t.rows, t.width, len(t.shards), sum(shard.bytes for shard in t.shards)) for t in index.tables],
        [(file.file, file.bytes) for file in (index.dense, index.token_map) if file is not None],
        sum(tensor.numel() for name, tensor in tensors.items() if not name.endswith(constants)),
        index.vocab_size,
        index.token_map_sha256,
        index.base_model,
        index.base_type,
    )
    replace_text(folder / CARD, card_text(facts))


def hub_name(model: nn.Module | None) -> str | None:
    """The base model's name on the Hub; None for one that was made here or comes from a folder of this machine."""
    name = str(getattr(getattr(model, "config", None), "_name_or_path", None) or "")
    return name if _HUB_NAME.fullmatch(name) and not os.path.exists(name) else None


def upload(
    memory: Memory,
    repo_id: str,
    *,
    model: nn.Module | None = None,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str = "Upload engram memory",
    create_pr: bool = False,
    max_shard_size: int | str = SHARD_SIZE,
) -> str:
    """Save the memory into a temporary folder and upload it in one commit -> the commit's address.

    The repository is made where it is missing. The temporary folder (TMPDIR) needs the space of all rows. Raises as
    `save` does, and what `huggingface_hub` raises.
    """
    api = HfApi(token=token)
    with tempfile.TemporaryDirectory(prefix="engram-") as folder:
        save(memory, folder, model=model, max_shard_size=max_shard_size)
        name = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        done = api.upload_folder(
            repo_id=name,
            folder_path=folder,
            commit_message=commit_message,
            revision=revision,
            create_pr=create_pr,
            delete_patterns=list(PATTERNS),  # shards of an earlier upload; a file that is uploaded now stays
        )
    return str(done)


class PlainSaver:
    """`model.save_pretrained` while a memory is attached: the plain base, and the memory in `engram/` beside it.

    Stands on the model itself, in front of its class's method, until `remove`. A copied model takes a copy along.
    """

    def __init__(self, model: nn.Module, memory: Memory) -> None:
        self.model, self.memory = model, memory
        self._before = model.__dict__.get("save_pretrained")
        if hasattr(model, "save_pretrained"):
            model.__dict__["save_pretrained"] = self.save_pretrained

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        push_to_hub: bool = False,
        max_shard_size: int | str | None = None,
        **kwargs: Any,
    ) -> Any:
        """The model's own `save_pretrained` without the memory, and `save` into `save_directory`/engram.

        Arguments are those of transformers; `max_shard_size` holds for base and rows. Raises ConfigError for
        push_to_hub=True, and as `save` does.
        """
        if push_to_hub:
            raise ConfigError("push_to_hub: with a memory attached, call model.push_to_hub(repo_id): it uploads both")
        limit = SHARD_SIZE if max_shard_size is None else max_shard_size
        if max_shard_size is not None:
            kwargs["max_shard_size"] = max_shard_size
        if is_main_process:
            save(self.memory, Path(save_directory) / SUBFOLDER, model=self.model, max_shard_size=limit)
        if state_dict is not None:
            state_dict = {name: value for name, value in state_dict.items() if not name.startswith("engram.")}
        own = self._before or partial(type(self.model).save_pretrained, self.model)  # type: ignore[attr-defined]
        # out of the way, so that parameter counts, quantizers and state_dict see the plain base
        attached = self.model._modules.pop("engram", None)
        try:
            return own(save_directory, is_main_process, state_dict, **kwargs)
        finally:
            if attached is not None:
                self.model._modules["engram"] = attached

    def remove(self) -> None:
        """Give the model its own `save_pretrained` back."""
        mine: Any = self.model.__dict__.get("save_pretrained")
        if getattr(mine, "__self__", None) is self:
            del self.model.__dict__["save_pretrained"]
            if self._before is not None:
                self.model.__dict__["save_pretrained"] = self._before


class SavesMemory:
    """The part of a handle that saves: `memory` inside `model`."""

    model: nn.Module
    memory: Memory

    def save_pretrained(self, folder: str | Path, *, max_shard_size: int | str = SHARD_SIZE) -> Path:
        """Write the memory alone, without its base, into `folder`; see `engram.saving.save`."""
        return save(self.memory, folder, model=self.model, max_shard_size=max_shard_size)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload the memory alone, without its base, to the Hub; see `engram.saving.upload`."""
        return upload(self.memory, repo_id, model=self.model, **options)
