"""Where training text comes from: the Python standard library, local files, or a Hugging Face data set.

Everything but `builtin` is read through `datasets`, which is imported only when it is needed. A document is one
string; this file knows nothing of tokens.
"""

from __future__ import annotations

import glob
import hashlib
import os
import platform
import re
import sysconfig
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engram.strict import ConfigError, require
from engram.train.textfiles import column_texts, expand, file_texts, fingerprint, is_known, load_datasets, reason

LONGEST_HELD_OUT = 65_536
"""Characters kept of one held-out document. One file of the standard library (pydoc_data/topics.py) is 7 % of the
corpus; uncut it would be most of a 5 % validation set."""
_SKIPPED = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"}
_SPLIT_NAME = re.compile(r"\w+(\[[\d:%-]*\])?")  # of a Hugging Face data set: never taken for a folder of that name
_DATASET_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class DataConfig:
    """What is read, how it becomes tokens, and how tokens become batches (docs/data.md).

    source        "builtin" (the running Python's standard library), a path, a list of paths (files, folders, globs),
                  or the name of a Hugging Face data set.
    subset, split, revision   of a Hugging Face data set; `revision` pins its content.
    streaming     read a Hugging Face data set over the network instead of downloading it first.
    validation    path(s) of separate validation text, or the split of the same Hugging Face data set; None holds out
                  a share of the documents of `source`.
    holdout, holdout_seed   that share, chosen by a hash of each document's content and this number.
    text_column   the field that holds the text (.jsonl, .json, .parquet, Hugging Face).
    txt_characters   .txt files are cut at blank lines into documents of at most this length; 0: one file, one document.
    max_documents, max_characters   read no more than this, of `source` and of `validation` each.
    tokenizer     "bpe" trains a byte-level BPE; else a tokenizer.json, a folder with one, or a Hugging Face name.
    vocab_size    of the trained BPE: 256 bytes, the end-of-text token and the merges.
    tokenizer_characters   the BPE is trained on the first so many characters of the training documents.
    eot           the token that starts every document; None is "<|endoftext|>" or the tokenizer's own eos token.
    seq_len, batch_size   predicted tokens of a window, windows of a batch.
    epochs        passes over the training windows; more than one says so loudly when the data starts to repeat.
    validation_tokens   predicted tokens of one validation, spread evenly over all validation documents.
    cache_dir     where token shards are kept; None is $ENGRAM_CACHE, else ~/.cache/engram.
    """

    source: str | tuple[str, ...] = "builtin"
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    streaming: bool = False
    validation: str | tuple[str, ...] | None = None
    holdout: float = 0.05
    holdout_seed: int = 0
    text_column: str = "text"
    txt_characters: int = 20_000
    max_documents: int | None = None
    max_characters: int | None = None
    tokenizer: str = "bpe"
    vocab_size: int = 4096
    tokenizer_characters: int = 100_000_000
    eot: str | None = None
    seq_len: int = 256
    batch_size: int = 16
    epochs: int = 1
    validation_tokens: int = 131_072
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        for name in ("source", "validation"):
            value = getattr(self, name)
            if isinstance(value, (list, tuple)):
                object.__setattr__(self, name, tuple(value))
        require(bool(self.source), 'source: empty; give "builtin", a path, a list of paths or a data set name')
        require(self.validation is None or bool(self.validation), "validation: empty; leave it out to hold out a share")
        for name in ("text_column", "tokenizer", "split"):
            require(bool(getattr(self, name)), f"{name}: must not be empty")
        for name in ("seq_len", "batch_size", "epochs", "tokenizer_characters"):
            require(getattr(self, name) >= 1, f"{name}: {getattr(self, name)} must be at least 1")
        for name in ("max_documents", "max_characters"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name}: {value} must be at least 1, or null for no limit")
        require(self.txt_characters >= 0, f"txt_characters: {self.txt_characters} must be 0 (whole files) or a length")
        require(
            self.tokenizer != "bpe" or self.vocab_size >= 257,
            f"vocab_size: {self.vocab_size} must be at least 257 (256 bytes and the end-of-text token)",
        )
        require(
            self.validation is not None or 0 < self.holdout < 1,
            f"holdout: {self.holdout} must lie between 0 and 1, for example 0.05, or give validation",
        )
        require(
            self.validation_tokens >= self.seq_len,
            f"validation_tokens: {self.validation_tokens} must be at least seq_len {self.seq_len}",
        )


@dataclass(frozen=True)
class Source:
    """One readable text: `read()` starts from the beginning each time; `identity` says what it is, without paths."""

    label: str
    identity: dict[str, Any]
    read: Callable[[], Iterator[str | None]]
    names: tuple[str, ...] = ()
    paths: frozenset[str] = frozenset()

    @property
    def description(self) -> dict[str, Any]:
        """Plain data for results: the identity, and the names of the first files."""
        return {**self.identity, **({"names": list(self.names)} if self.names else {})}


@dataclass
class Tally:
    """What a pass over a source has met: rows, rows without text, documents, characters, the smallest content hash."""

    rows: int = 0
    empty: int = 0
    documents: int = 0
    characters: int = 0
    lowest: int = 2**64


def open_sources(cfg: DataConfig) -> tuple[Source, Source | None]:
    """The training source and the separate validation source, if any; opens nothing but what identifies them.

    Raises ConfigError for an unknown path, an unknown ending, a missing library, and for validation text that is
    also training text.
    """
    train = _open(cfg)
    if cfg.validation is None:
        return train, None
    single = cfg.validation if isinstance(cfg.validation, str) else None
    if train.identity["kind"] == "hub" and single is not None and _SPLIT_NAME.fullmatch(single):
        require(single != cfg.split, f"validation: {single!r} is the training split; name another split")
        return train, _hub("validation", cfg, train.identity["name"], single)
    items = (cfg.validation,) if isinstance(cfg.validation, str) else cfg.validation
    held = _files("validation", cfg, items)
    shared = sorted(train.paths & held.paths)
    require(not shared, f"validation: {', '.join(shared[:3])} is in source too; validation text must not be trained on")
    return train, held


def documents(source: Source, cfg: DataConfig, tally: Tally | None = None) -> Iterator[str]:
    """Documents of a source in stored order: empty rows dropped, limits applied, always encodable as UTF-8."""
    tally = Tally() if tally is None else tally
    for text in source.read():
        tally.rows += 1
        if text is None or not text.strip():
            tally.empty += 1
            continue
        if cfg.max_characters is not None:
            text = text[: cfg.max_characters - tally.characters]
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:  # a lone surrogate, as JSON escapes can hold; no tokenizer takes it
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        tally.documents += 1
        tally.characters += len(text)
        yield text
        if tally.documents == cfg.max_documents:
            return
        if cfg.max_characters is not None and tally.characters >= cfg.max_characters:
            return


def content_hash(text: str, seed: int) -> int:
    """0..2**64 - 1 from a document's content. It decides what is held out, so equal documents stay together."""
    key = str(seed).encode()[:64]
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8, key=key).digest(), "little")


# --- builtin -------------------------------------------------------------------------------------------------------


def _stdlib(root: Path) -> list[tuple[str, Path]]:
    """(name, file) of the library's sources, by name; `_sysconfigdata*` and `config-*` hold paths of the build."""
    out = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in _SKIPPED and not name.startswith("config-")]
        for name in names:
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                path = Path(folder, name)
                out.append((path.relative_to(root).as_posix(), path))
    return sorted(out)


def _builtin() -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    files = _stdlib(root)
    require(bool(files), "source: this Python has no standard library sources (.py) for 'builtin'; give a path instead")
    digest = hashlib.sha256()
    size = 0
    for name, path in files:
        content = path.read_bytes()
        size += len(content)
        digest.update(f"{name}\0{len(content)}\0".encode() + content)

    def read() -> Iterator[str | None]:
        for _, path in files:
            try:
                with tokenize.open(path) as handle:
                    yield handle.read()
            except (SyntaxError, UnicodeDecodeError):  # no valid coding line: counted among the empty rows
                yield None

    identity = {
        "kind": "builtin",
        "files": len(files),
        "bytes": size,
        "sha256": digest.hexdigest(),
        "python_version": platform.python_version(),
    }
    return Source("builtin", identity, read)


# --- local files and Hugging Face data sets ------------------------------------------------------------------------


def _looks_local(item: str) -> bool:
    path = os.path.expanduser(item)
    return os.path.exists(path) or glob.has_magic(item) or item[:1] in "./~" or is_known(item)


def _open(cfg: DataConfig) -> Source:
    items = (cfg.source,) if isinstance(cfg.source, str) else cfg.source
    require(all(items), f"source: {cfg.source!r} holds an empty path")
    if items == ("builtin",):
        return _builtin()
    if len(items) == 1 and not _looks_local(items[0]):
        return _hub("source", cfg, items[0], cfg.split)
    return _files("source", cfg, items)


def _files(where: str, cfg: DataConfig, items: Sequence[str]) -> Source:
    require("builtin" not in items, f"{where}: 'builtin' is a training source by itself; it cannot be used here")
    paths = expand(where, items)
    identity = {"kind": "files", **fingerprint(where, paths)}

    def read() -> Iterator[str | None]:
        for path in paths:
            yield from file_texts(where, path, cfg.text_column, cfg.txt_characters)

    names = tuple(p.name for p in paths[:8])
    return Source(", ".join(items), identity, read, names, frozenset(str(p.resolve()) for p in paths))


def _hub(field_name: str, cfg: DataConfig, name: str, split: str) -> Source:
    require(
        _DATASET_NAME.fullmatch(name) is not None,
        f"{field_name}: {name!r} is no existing path and no Hugging Face data set name",
    )
    label = f"{name} (split {split})"

    def read() -> Iterator[str | None]:
        datasets = load_datasets()
        options = {"name": cfg.subset, "split": split, "revision": cfg.revision, "streaming": cfg.streaming}
        try:
            table = datasets.load_dataset(name, **options)
        except Exception as error:  # hub, network and builder errors share no base class
            raise ConfigError(
                f"{field_name}: {name!r} is no existing path, and as a Hugging Face data set (subset {cfg.subset!r}, "
                f"split {split!r}) it could not be loaded: {reason(error)}"
            ) from error
        try:
            yield from column_texts(f"{field_name}: {label}", table, cfg.text_column)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{field_name}: reading {label} failed: {reason(error)}") from error

    identity = {"kind": "hub", "name": name, "subset": cfg.subset, "split": split, "revision": cfg.revision}
    return Source(label, identity, read)
