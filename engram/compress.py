"""Token id -> canonical id ("class"): tokens whose normalised text agrees share a class, and with it their rows.

    tmap = TokenMap.from_tokenizer(tokenizer)      # .map int64 [len], .size, .sha256, .unmapped

The procedure of the Engram demo (engram_demo_v1, section 2 of the paper): decode each id alone; text with U+FFFD (part
of a UTF-8 character) is keyed by the token string; other text is normalised (NFKC, NFD, accents stripped, lower case,
white-space runs to one space, a lone space protected, ends stripped) and keyed by the result, or by itself when nothing
is left. The first key seen gets the next class. Classes of every other kind of id, all tested:
special tokens     a class of their own each, never merged with ordinary text
gaps, padded ids   ids without a token share one class, the last; `unmapped` counts them
byte fallback      <0x41> decodes to "A" and joins it; a byte that is no character alone keeps its own class

The multipliers depend on the number of classes, so one class more or less re-addresses every row: the map carries a
sha256 of its content and a load refuses another.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Regex, normalizers
from torch import Tensor

from engram.config import ConfigError

MAP_VERSION = 1
LONE_SPACE = "\ue000"  # stands for a text that is exactly one space, so that stripping does not empty it
PART_OF_CHARACTER = "\ufffd"
BATCH = 4096  # ids decoded per call


class TokenMap:
    """A map from raw token ids to classes: `map` int64 [len], `size` classes, `sha256` of the content.

    kind      which decoder built it ("fast" or "slow"), recorded because the two may disagree on unknown ids.
    unmapped  number of ids below len(map) that no token stands for.

    Raises ConfigError when the classes are not numbered 0..size-1.
    """

    def __init__(self, class_of: Tensor | Sequence[int], unmapped: int = 0, kind: str = "given") -> None:
        self.map = torch.as_tensor(class_of, dtype=torch.int64, device="cpu").contiguous()
        if self.map.ndim != 1 or len(self.map) == 0:
            raise ConfigError(f"token map: expected a list of classes, got shape {list(self.map.shape)}")
        self.size = int(self.map.max()) + 1
        if int(self.map.min()) < 0 or len(torch.unique(self.map)) != self.size:
            raise ConfigError(f"token map: classes must be numbered 0..{self.size - 1} without gaps")
        self.unmapped, self.kind = unmapped, kind

    @property
    def sha256(self) -> str:
        """Hash of the map's content: version, length and every class, as little-endian int64."""
        digest = hashlib.sha256(f"engram token map v{MAP_VERSION} {len(self.map)}\n".encode())
        digest.update(self.map.numpy().astype("<i8").tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.map)

    def __repr__(self) -> str:
        return (
            f"TokenMap({len(self)} ids -> {self.size} classes, {self.unmapped} unmapped, {self.kind}, "
            f"sha256 {self.sha256[:12]})"
        )

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, vocab_size: int | None = None) -> TokenMap:
        """Build the map of a tokenizer: `tokenizers.Tokenizer`, or a fast or slow tokenizer of transformers.

        vocab_size  ids of the model; ids past the tokenizer share the class of unmapped ids. Default: the tokenizer's.
        Raises ConfigError when the tokenizer holds more ids than the model.
        """
        pieces = _Pieces(tokenizer)
        length = pieces.length if vocab_size is None else vocab_size
        if length < pieces.length:
            raise ConfigError(
                f"vocab_size: the model has {length} ids but the tokenizer uses {pieces.length}; "
                f"use the tokenizer that belongs to the model, or resize the model's embeddings"
            )
        normalise = _normaliser()
        classes: dict[tuple[str, str], int] = {}
        missing: list[int] = []
        class_of = [0] * length
        for start in range(0, length, BATCH):
            ids = range(start, min(start + BATCH, length))
            for i, token, text in pieces.read(ids):
                if token is None:
                    missing.append(i)
                    continue
                if i in pieces.special:
                    key = ("special", str(i))
                elif PART_OF_CHARACTER in text:
                    key = ("text", token)
                else:
                    key = ("text", normalise(text) or text)
                class_of[i] = classes.setdefault(key, len(classes))
        for i in missing:
            class_of[i] = len(classes)
        return cls(class_of, unmapped=len(missing), kind=pieces.kind)

    def save(self, path: str | Path) -> None:
        """Write the map as one safetensors file (aside, then renamed)."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(path.name + ".tmp")
        save_file({"map": self.map}, aside, metadata=self.metadata())
        os.replace(aside, path)

    def metadata(self) -> dict[str, str]:
        """What stands in the header of the map's file: version, hash, and how it was built."""
        about = {"version": MAP_VERSION, "sha256": self.sha256, "unmapped": self.unmapped, "kind": self.kind}
        return {"engram_token_map": json.dumps(about)}

    @classmethod
    def load(cls, path: str | Path, sha256: str | None = None) -> TokenMap:
        """Read a map. Raises ConfigError when its content does not match its own hash, or the `sha256` wanted."""
        try:
            with safe_open(str(path), "pt") as file:
                about = json.loads((file.metadata() or {}).get("engram_token_map", "null"))
                if about is None:
                    raise ConfigError(f"token map {path}: the file holds no token map")
                version, recorded = about["version"], about["sha256"]
                found = cls(file.get_tensor("map"), about["unmapped"], about["kind"])
        except ConfigError:
            raise
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"token map {path}: cannot be read: {error!r}") from error
        if version != MAP_VERSION:
            raise ConfigError(f"token map {path}: version {version}, this code reads {MAP_VERSION}")
        for name, wanted in (("recorded", recorded), ("expected", sha256)):
            if wanted is not None and wanted != found.sha256:
                raise ConfigError(
                    f"token map {path}: sha256 {found.sha256[:12]} differs from the {name} {wanted[:12]}; "
                    f"rows trained with one map are wrong under another"
                )
        return found


def _normaliser() -> Callable[[str], str]:
    steps = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(LONE_SPACE, " "),
        ]
    )
    return lambda text: str(steps.normalize_str(text))


class _Pieces:
    """Reads (id, token string, decoded text) from any kind of tokenizer; the raw backend where there is one.

    The high-level call of transformers may clean up spaces; every port since the demo decodes with the backend.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self.slow = tokenizer if not hasattr(backend, "id_to_token") else None
        self.kind = "fast" if self.slow is None else "slow"
        self.backend = backend
        if self.slow is not None and not hasattr(tokenizer, "convert_ids_to_tokens"):
            raise ConfigError(
                f"tokenizer: {type(tokenizer).__name__} is neither a tokenizers.Tokenizer nor one of transformers"
            )
        vocabulary = tokenizer.get_vocab()
        self.tokens = {i: token for token, i in sorted(vocabulary.items())} if self.slow is not None else {}
        if self.slow is None:
            vocabulary = backend.get_vocab(with_added_tokens=True)
            self.special = {i for i, added in backend.get_added_tokens_decoder().items() if added.special}
        else:
            self.special = {int(i) for i in getattr(tokenizer, "all_special_ids", [])}
        self.length = max(max(vocabulary.values(), default=-1) + 1, len(vocabulary))

    def read(self, ids: range) -> list[tuple[int, str | None, str]]:
        if self.slow is None:
            tokens = [self.backend.id_to_token(i) for i in ids]
            texts = self.backend.decode_batch(
                [[i] if token is not None else [] for i, token in zip(ids, tokens, strict=True)],
                skip_special_tokens=False,
            )
            return list(zip(ids, tokens, texts, strict=True))
        return [
            (
                i,
                self.tokens.get(i),
                str(self.slow.decode([i], skip_special_tokens=False, clean_up_tokenization_spaces=False))
                if i in self.tokens
                else "",
            )
            for i in ids
        ]
