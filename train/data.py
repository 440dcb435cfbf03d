"""From a DataConfig to prepared data: read, tokenize and cache once, then hand out batches.

    corpus = prepare(DataConfig(source="builtin", seq_len=256), seed=0)
    for batch in corpus.reader(): model(**batch)

A cache folder holds tokenizer.json, meta.json and, for train and validation, raw arrays of tokens and offsets.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram.strict import ConfigError, require
from engram.train.corpus import LONGEST_HELD_OUT, DataConfig, Source, Tally, content_hash, documents, open_sources
from engram.train.tokens import (
    ShardWriter,
    TokenShards,
    encoder,
    load_tokenizer,
    token_dtype,
    tokenizer_sha256,
    train_bpe,
    vocabulary_size,
    write_documents,
)
from engram.train.windows import (
    Batch,
    WindowReader,
    make_batch,
    permuted,
    position_ids,
    say,
    validation_batches,
    validation_starts,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT = 1
"""Version of the files in a cache folder and of the rules that make them; a change of either changes it."""
Progress = Callable[[str, int, "int | None"], None]
"""(stage, characters done, characters in all or None): called about once per 2 million characters."""


@dataclass(frozen=True)
class Corpus:
    """Prepared data: training and validation shards, the tokenizer, and a plain-data description for every result."""

    config: DataConfig
    seed: int
    train: TokenShards
    validation: TokenShards
    tokenizer: PreTrainedTokenizerFast
    eot: int
    vocab_size: int
    description: dict[str, Any]
    folder: Path

    def reader(self, *, batch_size: int | None = None, rank: int = 0, world_size: int = 1) -> WindowReader:
        """Training batches as the config says, in the order of `seed`."""
        cfg = self.config
        size = batch_size or cfg.batch_size
        return WindowReader(
            self.train, cfg.seq_len, size, self.seed, epochs=cfg.epochs, rank=rank, world_size=world_size
        )

    def validation_batches(self, batch_size: int | None = None) -> Iterator[Batch]:
        """Validation batches as the config says: the same windows at every call."""
        cfg = self.config
        return validation_batches(self.validation, cfg.seq_len, batch_size or cfg.batch_size, cfg.validation_tokens)


def prepare(cfg: DataConfig, seed: int = 0, progress: Progress | None = None) -> Corpus:
    """Read, tokenize and cache what `cfg` describes, or open the cache; `seed` orders the training windows only.

    The cache folder is named by a hash of everything that decides its content, is built aside and renamed, and is
    built once when several processes ask for it together. Raises ConfigError for unusable data (unknown path, no
    text, a missing column, a tokenizer without an end-of-text token) and for a cache folder that cannot be written.
    """
    train, validation = open_sources(cfg)
    tokenizer = None if cfg.tokenizer == "bpe" else load_tokenizer(cfg.tokenizer, cfg.eot)
    require(
        tokenizer is not None or cfg.eot is None, f"eot: {cfg.eot!r} cannot be set with tokenizer 'bpe'; leave it out"
    )
    identity = _identity(cfg, train, validation, tokenizer)
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]
    root = Path(os.path.expanduser(cfg.cache_dir or os.environ.get("ENGRAM_CACHE") or "~/.cache/engram"))
    folder = root / key
    if not (folder / "meta.json").is_file():
        try:
            root.mkdir(parents=True, exist_ok=True)
            with _lock(root / f"{key}.lock", train.label):
                if not (folder / "meta.json").is_file():
                    _build(cfg, train, validation, tokenizer, folder, identity, progress or _progress())
        except OSError as error:  # errors of the sources are ConfigErrors by now: this is the cache
            raise ConfigError(f"cache_dir: {root} cannot be written: {error}") from error
    return _open_cache(cfg, seed, folder)


def open_prepared(cfg: DataConfig, seed: int, key: str) -> Corpus:
    """Data prepared before, by its key alone: the source is not needed. Raises ConfigError if it is not there."""
    folder = Path(os.path.expanduser(cfg.cache_dir or os.environ.get("ENGRAM_CACHE") or "~/.cache/engram")) / key
    require((folder / "meta.json").is_file(), f"cache_dir: {folder.parent} holds no data of key {key}")
    return _open_cache(cfg, seed, folder)


def _identity(cfg: DataConfig, train: Source, validation: Source | None, tokenizer: Any) -> dict[str, Any]:
    import tokenizers

    spec: dict[str, Any] = {"kind": "bpe", "vocab_size": cfg.vocab_size, "characters": cfg.tokenizer_characters}
    if tokenizer is not None:
        spec = {"kind": "loaded", "sha256": tokenizer_sha256(tokenizer), "eot": tokenizer.eos_token}
    names = ("text_column", "txt_characters", "max_documents", "max_characters")
    return {
        "format": FORMAT,
        "source": train.identity,
        "validation": {"holdout": cfg.holdout, "seed": cfg.holdout_seed} if validation is None else validation.identity,
        "reading": {name: getattr(cfg, name) for name in names},
        "tokenizer": spec,
        "tokenizers": tokenizers.__version__,
    }


@contextlib.contextmanager
def _lock(path: Path, label: str) -> Iterator[None]:
    from filelock import FileLock, Timeout  # comes with torch; the system frees it when its process dies

    lock = FileLock(str(path))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"another process is preparing {label}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _split(
    cfg: DataConfig, train: Source, validation: Source | None, limit: int, tallies: dict[str, Tally]
) -> Iterator[tuple[str, str]]:
    """(split, text) of every document in stored order; one whose content hash is below `limit` is held out."""
    tally = tallies["train"]
    for text in documents(train, cfg, tally):
        number = content_hash(text, cfg.holdout_seed)
        tally.lowest = min(tally.lowest, number)
        if number < limit:
            yield "validation", text[:LONGEST_HELD_OUT]
        else:
            yield "train", text
    if validation is not None:
        for text in documents(validation, cfg, tallies["validation"]):
            yield "validation", text


def _for_tokenizer(cfg: DataConfig, train: Source, limit: int, tally: Tally, report: Progress) -> Iterator[str]:
    """The training documents the BPE learns from, up to `tokenizer_characters`."""
    left, said = cfg.tokenizer_characters, 0
    for text in documents(train, cfg, tally):
        if content_hash(text, cfg.holdout_seed) < limit:
            continue
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return
        if tally.characters - said >= 2_000_000:
            said = tally.characters
            report("reading for the tokenizer", said, cfg.max_characters)


@dataclass(frozen=True)
class _Filled:
    """What one pass of reading and tokenizing left in a folder."""

    tokenizer: PreTrainedTokenizerFast
    vocab_size: int
    eot: int
    splits: dict[str, dict[str, Any]]
    tallies: dict[str, Tally]


def _fill(
    cfg: DataConfig,
    train: Source,
    validation: Source | None,
    limit: int,
    tokenizer: PreTrainedTokenizerFast | None,
    folder: Path,
    report: Progress,
) -> _Filled:
    total = cfg.max_characters
    if tokenizer is None:
        first = Tally()
        tokenizer = train_bpe(_for_tokenizer(cfg, train, limit, first, report), cfg.vocab_size)
        if first.characters < cfg.tokenizer_characters:  # then all of the source was read
            total = first.characters
    vocab_size = vocabulary_size(tokenizer)
    eot = tokenizer.get_vocab()[tokenizer.eos_token]
    tokenizer.save_pretrained(str(folder))
    writers = {split: ShardWriter(folder, split, vocab_size, eot) for split in ("train", "validation")}
    tallies = {split: Tally() for split in writers}
    done = 0

    def advance(characters: int) -> None:
        nonlocal done
        done += characters
        report("tokenizing", done, total)

    try:
        write_documents(_split(cfg, train, validation, limit, tallies), writers, encoder(tokenizer), advance)
    finally:
        splits = {split: writer.close() for split, writer in writers.items()}
    return _Filled(tokenizer, vocab_size, eot, splits, tallies)


def _build(
    cfg: DataConfig,
    train: Source,
    validation: Source | None,
    tokenizer: PreTrainedTokenizerFast | None,
    folder: Path,
    identity: dict[str, Any],
    report: Progress,
) -> None:
    for stale in folder.parent.glob(f".tmp-{folder.name}-*"):  # left by a kill; the lock is ours
        shutil.rmtree(stale, ignore_errors=True)
    aside = Path(tempfile.mkdtemp(prefix=f".tmp-{folder.name}-", dir=folder.parent))
    try:
        limit = int(cfg.holdout * 2**64) if validation is None else 0
        filled = _fill(cfg, train, validation, limit, tokenizer, aside, report)
        if (
            validation is None
            and not filled.splits["validation"]["documents"]
            and filled.tallies["train"].documents > 1
        ):
            # so few documents that chance held out none: take the one with the smallest hash
            limit = filled.tallies["train"].lowest + 1
            filled = _fill(cfg, train, validation, limit, tokenizer, aside, report)
        _check_not_empty(cfg, train, validation, filled)
        meta = {
            **identity,
            "source": train.description,
            "validation": identity["validation"] if validation is None else validation.description,
            "splits": filled.splits,
            "rows": {split: {"read": tally.rows, "empty": tally.empty} for split, tally in filled.tallies.items()},
            "dtype": token_dtype(filled.vocab_size).str,
            "vocab_size": filled.vocab_size,
            "eot": filled.tokenizer.eos_token,
            "eot_id": filled.eot,
            "tokenizer_sha256": _file_sha256(aside / "tokenizer.json"),
            "python_version": platform.python_version(),
            "holdout_seed": cfg.holdout_seed,
        }
        text = json.dumps(meta, indent=1, sort_keys=True, ensure_ascii=False)
        (aside / "meta.json").write_text(text + "\n", encoding="utf-8")
        os.chmod(aside, 0o755)  # mkdtemp makes folders that only their owner can read
        try:
            os.rename(aside, folder)
        except OSError:
            if not (folder / "meta.json").is_file():  # else another process was first, with the same content
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _check_not_empty(cfg: DataConfig, train: Source, validation: Source | None, filled: _Filled) -> None:
    rows = filled.tallies["train"]
    require(
        rows.documents > 0,
        f"source: {train.label} is empty: {rows.rows} rows were read and none holds text",
    )
    if filled.splits["validation"]["documents"] == 0:
        if validation is not None:
            raise ConfigError(f"validation: {validation.label} is empty: no row of it holds text")
        raise ConfigError(
            f"holdout: {train.label} is a single document, of which nothing can be held out; give validation, "
            "more documents, or cut .txt files shorter (txt_characters)"
        )
    require(
        filled.splits["train"]["documents"] > 0,
        f"holdout: a share of {cfg.holdout} held out all {rows.documents} documents of {train.label}; lower it",
    )


def _open_cache(cfg: DataConfig, seed: int, folder: Path) -> Corpus:
    from transformers import PreTrainedTokenizerFast

    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        same = meta["format"] == FORMAT and _file_sha256(folder / "tokenizer.json") == meta["tokenizer_sha256"]
        train, validation = (TokenShards.open(folder, split, meta) for split in ("train", "validation"))
    except (OSError, KeyError, ValueError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"cache_dir: {folder} is damaged ({error!r}); delete that folder to rebuild it") from error
    require(same, f"cache_dir: the tokenizer in {folder} was changed; delete that folder to rebuild it")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    windows = len(validation_starts(len(validation), cfg.seq_len, cfg.validation_tokens))
    if windows < cfg.validation_tokens // cfg.seq_len:
        say(
            f"validation_tokens: {cfg.validation_tokens} asked, {windows * cfg.seq_len} are there; all of them are used"
        )
    if cfg.tokenizer == "bpe" and meta["vocab_size"] < cfg.vocab_size:
        say(f"vocab_size: {cfg.vocab_size} asked, the text gives a BPE of {meta['vocab_size']} ids only")
    if found := train.counts["eot_in_text"] + validation.counts["eot_in_text"]:
        say(f"WARNING: the text itself holds the end-of-text token {meta['eot']!r} ({found} times) and is split there")
    description = {**meta, "key": folder.name, "seed": seed, "seq_len": cfg.seq_len, "epochs": cfg.epochs}
    description["validation_tokens"] = windows * cfg.seq_len
    return Corpus(cfg, seed, train, validation, tokenizer, meta["eot_id"], meta["vocab_size"], description, folder)


def _file_sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _progress() -> Progress:
    """A line on standard error every five seconds; nothing for what is quick."""
    began = last = time.monotonic()
    current = ""

    def report(stage: str, done: int, total: int | None) -> None:
        nonlocal began, last, current
        now = time.monotonic()
        if stage != current:
            current, began = stage, now
        if now - last < 5 or now == began:
            return
        last = now
        rate = done / (now - began)
        left = f", {max(0, total - done) / rate:.0f} s left" if total else ""
        say(f"{stage}: {done / 1e6:.1f} million characters, {rate / 1e6:.2f} million/s{left}")

    return report


__all__ = [
    "Batch",
    "Corpus",
    "DataConfig",
    "TokenShards",
    "WindowReader",
    "make_batch",
    "permuted",
    "position_ids",
    "prepare",
    "validation_batches",
    "validation_starts",
]
