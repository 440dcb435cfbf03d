"""Tokenizers and token shards: documents in, one stream of token ids on disk out.

Shapes: N tokens of a stream, K documents. A document is [EOT] + its tokens, so the stream begins with EOT and every
EOT begins a document. Tokenizers are `transformers.PreTrainedTokenizerFast` everywhere.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engram.strict import ConfigError, require
from engram.train.textfiles import reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

EOT = "<|endoftext|>"
PIECE = 1_000_000
"""Longer documents are tokenized in pieces cut at line ends: an encoding costs some 100 bytes a token."""
BATCH_CHARACTERS = 2_000_000
BATCH_DOCUMENTS = 4096


def train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE: id 0 is <|endoftext|>, ids 1-256 the bytes, then merges; every text decodes back exactly.

    The same texts in the same order give the same tokenizer. Little text gives fewer ids than `vocab_size`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(iter(texts), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=EOT, clean_up_tokenization_spaces=False)


def load_tokenizer(name: str, eot: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer from a tokenizer.json file, a folder or a Hugging Face name, with `eos_token` set to what starts
    documents: `eot`, else its own eos token, else <|endoftext|> if it has that.

    Raises ConfigError if there is no such tokenizer, if it has no fast form, or if no EOT token can be found.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = Path(os.path.expanduser(name))
    file = path / "tokenizer.json" if path.is_dir() else path
    if not path.exists() and (path.suffix == ".json" or name[:1] in "./~"):
        raise ConfigError(f"tokenizer: {name!r} does not exist; give a tokenizer.json, a folder, a name, or 'bpe'")
    try:
        if file.is_file() and not (file.parent / "tokenizer_config.json").is_file():
            tokenizer: Any = PreTrainedTokenizerFast(tokenizer_file=str(file), clean_up_tokenization_spaces=False)
        else:
            tokenizer = AutoTokenizer.from_pretrained(str(file.parent) if file.is_file() else name)
    except Exception as error:  # tokenizers raises bare Exception, the hub its own classes
        raise ConfigError(
            f"tokenizer: {name!r} is neither 'bpe' nor a tokenizer that could be loaded: {reason(error)}"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError(
            f"tokenizer: {name!r} loads as {type(tokenizer).__name__}, without a tokenizer.json; save one"
        )
    vocabulary = tokenizer.get_vocab()
    wanted = eot or tokenizer.eos_token or (EOT if EOT in vocabulary else None)
    special = ", ".join(repr(t) for t in tokenizer.added_tokens_encoder) or "none"
    if wanted is None:
        raise ConfigError(f"eot: tokenizer {name!r} has no eos token; set eot to one of its special tokens: {special}")
    require(wanted in vocabulary, f"eot: {wanted!r} is not in tokenizer {name!r}; its special tokens: {special}")
    tokenizer.eos_token = wanted
    return tokenizer


def tokenizer_sha256(tokenizer: PreTrainedTokenizerFast) -> str:
    """Hex digest of everything that decides its ids (not of its truncation and padding, which are never used here)."""
    return hashlib.sha256(_plain_backend(tokenizer).to_str().encode("utf-8")).hexdigest()


def vocabulary_size(tokenizer: PreTrainedTokenizerFast) -> int:
    """One more than the largest id (`len` is smaller where a vocabulary has gaps)."""
    return max(tokenizer.get_vocab().values()) + 1


def encoder(tokenizer: PreTrainedTokenizerFast) -> Callable[[Sequence[str]], list[list[int]]]:
    """A function from texts to lists of ids: nothing added or cut, special tokens in a text are plain text."""
    backend = _plain_backend(tokenizer)
    backend.encode_special_tokens = True

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    return encode


def _plain_backend(tokenizer: PreTrainedTokenizerFast) -> Any:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    return backend


def _pieces(text: str, limit: int = PIECE) -> Iterator[str]:
    start = 0
    while len(text) - start > limit:
        cut = text.rfind("\n", start, start + limit) + 1 or start + limit
        yield text[start:cut]
        start = cut
    yield text[start:]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Integer type of the ids on disk."""
    return np.dtype("<u2" if vocab_size <= 65_536 else "<u4")


@dataclass(frozen=True)
class TokenShards:
    """One split on disk: `tokens` [N] (uint16, or uint32 above 65,536 ids) and `offsets` [K + 1] int64 (document k is
    tokens[offsets[k]:offsets[k + 1]] and begins with `eot`), both mapped read-only; `sha256` is that of the tokens.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    eot: int
    vocab_size: int
    sha256: str
    counts: dict[str, int]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def documents(self) -> int:
        """K, documents."""
        return len(self.offsets) - 1

    def document(self, index: int) -> np.ndarray:
        """Tokens of one document, its EOT first."""
        return np.asarray(self.tokens[self.offsets[index] : self.offsets[index + 1]])

    @classmethod
    def of(cls, documents: Sequence[Sequence[int]], eot: int, vocab_size: int) -> TokenShards:
        """Shards in memory from lists of ids without EOT: for tests and small experiments."""
        parts = [np.array([eot, *ids], dtype=token_dtype(vocab_size)) for ids in documents]
        tokens = np.concatenate(parts)
        offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        digest = hashlib.sha256(tokens.tobytes()).hexdigest()
        return cls(
            tokens, offsets, eot, vocab_size, digest, {"tokens": len(tokens), "documents": len(parts), "eot_in_text": 0}
        )

    @classmethod
    def open(cls, folder: Path, split: str, meta: dict[str, Any]) -> TokenShards:
        """Map what a ShardWriter wrote. Raises ConfigError if a file's size or ends disagree with `meta`."""
        info = meta["splits"][split]
        arrays = []
        for part, dtype, length in (
            ("tokens", np.dtype(meta["dtype"]), info["tokens"]),
            ("offsets", np.dtype("<i8"), info["documents"] + 1),
        ):
            path = folder / f"{split}.{part}.bin"
            size = path.stat().st_size if path.is_file() else -1
            require(
                size == length * dtype.itemsize,
                f"cache_dir: {path} has {size} bytes, not {length * dtype.itemsize}; delete that folder to rebuild it",
            )
            arrays.append(np.memmap(path, dtype=dtype, mode="r", shape=(length,)))
        tokens, offsets = arrays
        counts = {name: value for name, value in info.items() if name != "sha256"}
        require(
            offsets[0] == 0 and offsets[-1] == len(tokens) and tokens[0] == meta["eot_id"],
            f"cache_dir: {folder} is damaged ({split} documents do not cover its tokens); delete it to rebuild it",
        )
        return cls(tokens, offsets, meta["eot_id"], meta["vocab_size"], info["sha256"], counts)


class ShardWriter:
    """Writes one split, `{split}.tokens.bin` and `{split}.offsets.bin`: raw little-endian arrays, appended to."""

    def __init__(self, folder: Path, split: str, vocab_size: int, eot: int) -> None:
        self.dtype = token_dtype(vocab_size)
        self.vocab_size, self.eot = vocab_size, eot
        self.counts = {"tokens": 0, "documents": 0, "characters": 0, "bytes": 0, "eot_in_text": 0}
        self._digest = hashlib.sha256()
        self._tokens = open(folder / f"{split}.tokens.bin", "wb")  # noqa: SIM115
        self._offsets = open(folder / f"{split}.offsets.bin", "wb")  # noqa: SIM115
        self._offsets.write(np.zeros(1, dtype="<i8").tobytes())

    def add(self, ids: Sequence[int], characters: int, size: int, starts: bool) -> None:
        """Append the ids of one document, or of a further piece of the last one (`starts` False)."""
        values = np.empty(len(ids) + starts, dtype=np.int64)
        values[starts:] = ids
        if starts:
            values[0] = self.eot
        elif self.counts["documents"] == 0:
            raise ValueError("a further piece came before any document")
        require(
            not len(ids) or (values.min() >= 0 and values.max() < self.vocab_size),
            f"tokenizer: it gave an id outside 0..{self.vocab_size - 1}",
        )
        self.counts["eot_in_text"] += int((values[starts:] == self.eot).sum())
        self.counts["characters"] += characters
        self.counts["bytes"] += size
        raw = values.astype(self.dtype).tobytes()
        self._digest.update(raw)
        self._tokens.write(raw)
        self.counts["tokens"] += len(values)
        self.counts["documents"] += starts
        if not starts:
            self._offsets.seek(-8, os.SEEK_END)
        self._offsets.write(np.array([self.counts["tokens"]], dtype="<i8").tobytes())

    def close(self) -> dict[str, Any]:
        """Flush and close; the split's part of meta.json."""
        self._tokens.close()
        self._offsets.close()
        return {**self.counts, "sha256": self._digest.hexdigest()}


def write_documents(
    documents: Iterable[tuple[str, str]],
    writers: dict[str, ShardWriter],
    encode: Callable[[Sequence[str]], list[list[int]]],
    advance: Callable[[int], None],
) -> None:
    """Tokenize (split, text) pairs in batches into the writers; `advance(characters)` is called after each batch.

    No more than one batch of tokens (about 2 million characters) is held at a time.
    """
    batch: list[tuple[str, str, bool]] = []
    size = 0

    def flush() -> None:
        for (split, text, starts), ids in zip(batch, encode([text for _, text, _ in batch]), strict=True):
            writers[split].add(ids, len(text), len(text.encode("utf-8")), starts)
        batch.clear()

    for split, text in documents:
        for index, piece in enumerate(_pieces(text)):
            batch.append((split, piece, index == 0))
            size += len(piece)
            if size >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
                flush()
                advance(size)
                size = 0
    if batch:
        flush()
        advance(size)
