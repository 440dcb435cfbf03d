"""Data: tokenizer, shards and their cache, windows, readers that resume (sources: test_corpus.py)."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_corpus import WORDS, small_config, small_texts, write_jsonl

from engram.strict import ConfigError
from engram.train import corpus as sources
from engram.train import data, tokens
from engram.train.data import (
    Corpus,
    DataConfig,
    TokenShards,
    WindowReader,
    permuted,
    prepare,
)

REAL = Path(os.environ.get("ENGRAM_CORPUS", Path(__file__).resolve().parents[2] / "shared" / "corpus"))


# --- tokenizer -----------------------------------------------------------------------------------------------------


def test_bpe_is_deterministic_lossless_and_has_eot_zero() -> None:
    one, two = (tokens.train_bpe(small_texts(40), 320) for _ in range(2))
    assert tokens.tokenizer_sha256(one) == tokens.tokenizer_sha256(two)
    assert one.eos_token_id == 0 and one.convert_ids_to_tokens(0) == "<|endoftext|>"
    assert tokens.vocabulary_size(one) == 320 == len(one)
    odd = "a\tb  \n\n é€ \u2028 \U0001f600 \ufeff \r\n 日本 <|endoftext|>"
    (ids,) = tokens.encoder(one)([odd])
    assert one.decode(ids) == odd
    assert 0 not in ids  # the name of the token in a text is text
    assert tokens.tokenizer_sha256(tokens.train_bpe(small_texts(40, seed=1), 320)) != tokens.tokenizer_sha256(one)


def test_tokenizer_files_and_folders(tmp_path: Path, folder: Path, corpus: Corpus) -> None:
    source = corpus.config.source
    again = prepare(small_config(folder, source=source, tokenizer=str(corpus.folder / "tokenizer.json")))
    assert again.train.sha256 == corpus.train.sha256 and again.folder != corpus.folder and again.eot == 0
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "tokenizer.json").write_bytes((corpus.folder / "tokenizer.json").read_bytes())
    for name in (bare, bare / "tokenizer.json", corpus.folder):
        same = prepare(small_config(folder, source=source, tokenizer=str(name)))
        assert same.folder == again.folder, name
    assert type(again.tokenizer).__name__ == type(corpus.tokenizer).__name__


def test_a_loaded_tokenizer_adds_cuts_and_pads_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"[UNK]": 0, "[CLS]": 1, "</s>": 2, **{w: i + 3 for i, w in enumerate(WORDS)}, "far": 70_000}
    word = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    word.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    word.add_special_tokens(["[CLS]", "</s>"])
    added = [("[CLS]", 1), ("</s>", 2)]
    word.post_processor = processors.TemplateProcessing(single="[CLS] $A </s>", special_tokens=added)
    word.enable_truncation(3)
    word.enable_padding(length=50)
    word.save(str(tmp_path / "word.json"))
    source = str(
        write_jsonl(tmp_path / "a.jsonl", ["memory table row gate far", "hash token"] * 20 + ["gate </s> gate"])
    )
    cfg = small_config(
        tmp_path, source=source, tokenizer=str(tmp_path / "word.json"), validation_tokens=16, holdout=0.1
    )
    with pytest.raises(ConfigError, match=r"no eos token; set eot to one of its special tokens: '\[CLS\]', '</s>'"):
        prepare(cfg)
    with pytest.raises(ConfigError, match="eot: 'nope' is not in tokenizer"):
        prepare(small_config(tmp_path, source=source, tokenizer=str(tmp_path / "word.json"), eot="nope"))
    validation = str(write_jsonl(tmp_path / "v.jsonl", small_texts(5)))
    made = prepare(
        small_config(
            tmp_path,
            source=source,
            tokenizer=str(tmp_path / "word.json"),
            eot="</s>",
            validation=validation,
            validation_tokens=16,
        )
    )
    assert made.eot == 2 and made.vocab_size == 70_001 and made.train.tokens.dtype == np.uint32
    assert made.train.document(0).tolist() == [2, 3, 4, 5, 6, 70_000]
    assert made.train.document(1).tolist() == [2, 7, 8]
    assert made.train.document(40).tolist() == [2, 6, 2, 6]  # a word tokenizer knows no other way to write "</s>"
    assert made.train.counts["eot_in_text"] == 1
    assert "holds the end-of-text token '</s>' (1 times)" in capsys.readouterr().err
    assert isinstance(made.tokenizer, PreTrainedTokenizerFast) and made.tokenizer.eos_token_id == 2


def test_tokenizer_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = str(write_jsonl(tmp_path / "a.jsonl", small_texts(10)))
    with pytest.raises(ConfigError, match=r"tokenizer: '\./nope' does not exist"):
        prepare(small_config(tmp_path, source=source, tokenizer="./nope"))
    import transformers

    def unreachable(name: str) -> None:
        raise OSError(f"no connection for {name}")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", unreachable)
    with pytest.raises(
        ConfigError, match="'some/name' is neither 'bpe' nor a tokenizer .* no connection for some/name"
    ):
        prepare(small_config(tmp_path, source=source, tokenizer="some/name"))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ConfigError, match="neither 'bpe' nor a tokenizer that could be loaded"):
        prepare(small_config(tmp_path, source=source, tokenizer=str(tmp_path / "bad.json")))
    with pytest.raises(ConfigError, match="eot: 'x' cannot be set with tokenizer 'bpe'"):
        prepare(small_config(tmp_path, source=source, eot="x"))


# --- shards and cache ----------------------------------------------------------------------------------------------


def test_documents_are_eot_and_tokens_and_decode_to_the_text(corpus: Corpus) -> None:
    assert corpus.train.tokens.dtype == np.uint16 and corpus.train.offsets.dtype == np.int64
    assert corpus.train.documents + corpus.validation.documents == 200
    found = []
    for shards in (corpus.train, corpus.validation):
        tokens_N = np.asarray(shards.tokens)
        assert np.flatnonzero(tokens_N == corpus.eot).tolist() == shards.offsets[:-1].tolist()
        assert shards.offsets[-1] == len(shards) == shards.counts["tokens"]
        texts = [corpus.tokenizer.decode(shards.document(i)[1:]) for i in range(shards.documents)]
        assert shards.counts["characters"] == sum(map(len, texts))
        assert shards.sha256 == hashlib.sha256(tokens_N.tobytes()).hexdigest()
        found += texts
    assert sorted(found) == sorted(small_texts(200))


def test_meta_and_description_say_everything_that_matters(corpus: Corpus) -> None:
    meta = json.loads((corpus.folder / "meta.json").read_text())
    assert meta["vocab_size"] == corpus.vocab_size == 300 and meta["eot_id"] == 0 and meta["eot"] == "<|endoftext|>"
    file = (corpus.folder / "tokenizer.json").read_bytes()
    assert meta["tokenizer_sha256"] == hashlib.sha256(file).hexdigest()
    assert meta["python_version"] == platform.python_version() and meta["holdout_seed"] == 0
    assert meta["source"]["names"] == ["text.jsonl"] and str(corpus.folder.parent) not in json.dumps(meta)
    assert meta["splits"]["train"]["documents"] == corpus.train.documents
    assert corpus.description["seed"] == 3 and json.loads(json.dumps(corpus.description)) == corpus.description


def test_holdout_is_by_content_and_share(folder: Path, tmp_path: Path) -> None:
    texts = small_texts(300) + small_texts(20)  # twenty of them twice
    one = prepare(small_config(folder, source=str(write_jsonl(tmp_path / "a.jsonl", texts))))
    two = prepare(small_config(folder, source=str(write_jsonl(tmp_path / "b.jsonl", texts[::-1]))))
    other = prepare(small_config(folder, source=str(tmp_path / "a.jsonl"), holdout_seed=1))

    def held(corpus: Corpus) -> list[str]:
        shards = corpus.validation
        return sorted(corpus.tokenizer.decode(shards.document(i)[1:]) for i in range(shards.documents))

    assert held(one) == held(two) != held(other)
    assert 0.1 < one.validation.documents / 320 < 0.3
    trained = {one.tokenizer.decode(one.train.document(i)[1:]) for i in range(one.train.documents)}
    assert not trained & set(held(one))


def test_few_documents_still_give_validation_and_long_ones_do_not_fill_it(tmp_path: Path) -> None:
    texts = [f"document {i} " + "some words of it " * 6000 for i in range(3)]  # 100 k characters each
    cfg = small_config(tmp_path, source=str(write_jsonl(tmp_path / "a.jsonl", texts)), holdout=1e-6)
    made = prepare(cfg)
    assert made.train.documents == 2 and made.validation.documents == 1
    assert made.validation.counts["characters"] == sources.LONGEST_HELD_OUT
    assert made.train.counts["characters"] == sum(map(len, texts[:2]))


def test_the_cache_is_used_and_keyed_by_all_that_decides_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", small_texts(40))
    base = small_config(tmp_path, source=str(source), validation_tokens=32)
    first = prepare(base)
    stamp = (first.folder / "meta.json").stat().st_mtime_ns
    changed = {"vocab_size": 310, "holdout": 0.3, "holdout_seed": 1, "max_documents": 35, "tokenizer_characters": 500}
    folders = {first.folder}
    for name, value in changed.items():
        folders.add(
            prepare(small_config(tmp_path, **{"source": str(source), "validation_tokens": 32, name: value})).folder
        )
    assert len(folders) == 1 + len(changed)

    monkeypatch.setattr(data, "_build", lambda *_: pytest.fail("built again"))
    moved = tmp_path / "moved.jsonl"
    source.rename(moved)
    for same in ({"source": str(moved)}, {"source": str(moved), "seq_len": 8, "batch_size": 2, "epochs": 3}):
        assert prepare(small_config(tmp_path, **{"validation_tokens": 32, **same}), seed=9).folder == first.folder
    assert (first.folder / "meta.json").stat().st_mtime_ns == stamp
    text = moved.read_text()
    moved.write_text(text.replace("memory", "mummery", 1))
    with pytest.raises(pytest.fail.Exception, match="built again"):
        prepare(small_config(tmp_path, source=str(moved), validation_tokens=32))


def test_a_build_that_fails_or_comes_second_leaves_the_cache_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = small_config(tmp_path, source=str(write_jsonl(tmp_path / "a.jsonl", small_texts(40))), validation_tokens=32)
    cache = tmp_path / "cache"

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(data, "write_documents", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(cfg)
    assert [p.name for p in cache.iterdir() if not p.name.endswith(".lock")] == []

    made = prepare(cfg)
    before = {p.name: p.read_bytes() for p in made.folder.iterdir()}
    stale = cache / f".tmp-{made.folder.name}-dead"
    stale.mkdir()
    train, validation = sources.open_sources(cfg)
    identity = data._identity(cfg, train, validation, None)
    data._build(cfg, train, validation, None, made.folder, identity, lambda *_: None)  # as if the lock had not held
    assert {p.name: p.read_bytes() for p in made.folder.iterdir()} == before
    assert [p.name for p in cache.iterdir() if p.name.startswith(".tmp")] == []


def test_a_second_caller_waits_and_builds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = small_config(tmp_path, source=str(write_jsonl(tmp_path / "a.jsonl", small_texts(40))), validation_tokens=32)
    inside, release, built = threading.Event(), threading.Event(), []
    build = data._build

    def slow(*arguments: Any) -> None:
        built.append(1)
        inside.set()
        assert release.wait(30)
        build(*arguments)

    monkeypatch.setattr(data, "_build", slow)
    made: list[Corpus] = []
    callers = [threading.Thread(target=lambda: made.append(prepare(cfg))) for _ in range(2)]
    callers[0].start()
    assert inside.wait(30)
    monkeypatch.setattr(data, "say", lambda line: (print(line, file=sys.stderr), release.set()))
    callers[1].start()
    for caller in callers:
        caller.join(30)
    assert len(built) == 1 and len(made) == 2 and made[0].train.sha256 == made[1].train.sha256
    assert "another process is preparing" in capsys.readouterr().err


def test_progress_counts_characters_towards_a_known_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "BATCH_CHARACTERS", 2000)
    texts = small_texts(40)
    total, told = sum(map(len, texts)), []
    cfg = small_config(tmp_path, source=str(write_jsonl(tmp_path / "a.jsonl", texts)), validation_tokens=32)
    prepare(cfg, progress=lambda *step: told.append(step))
    assert len(told) > 3 and told[-1] == ("tokenizing", total, total)
    done = [step[1] for step in told]
    assert done == sorted(done) and all(step[2] == total for step in told)


@pytest.mark.slow
def test_two_processes_prepare_at_once(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", small_texts(3000))
    script = textwrap.dedent(
        """
        import json, sys
        from engram.train.data import DataConfig, prepare
        made = prepare(DataConfig(source=sys.argv[1], cache_dir=sys.argv[2], vocab_size=400, seq_len=16))
        print(json.dumps([made.folder.name, made.train.sha256, made.validation.sha256, made.description]))
        """
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}

    def start(cache: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", script, str(source), str(tmp_path / cache)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    running = [start("shared"), start("shared"), start("shared"), start("alone")]
    results = [json.loads(process.communicate(timeout=300)[0]) for process in running]
    assert all(process.returncode == 0 for process in running)
    assert results[0] == results[1] == results[2] == results[3]
    folders = [p for p in (tmp_path / "shared").iterdir() if not p.name.endswith(".lock")]
    assert [p.name for p in folders] == [results[0][0]]
    here = prepare(DataConfig(source=str(source), cache_dir=str(tmp_path / "here"), vocab_size=400, seq_len=16))
    assert here.train.sha256 == results[0][1]


@pytest.mark.parametrize("victim", ["train.tokens.bin", "validation.offsets.bin", "tokenizer.json", "meta.json"])
def test_a_damaged_cache_is_refused(tmp_path: Path, victim: str) -> None:
    cfg = small_config(tmp_path, source=str(write_jsonl(tmp_path / "a.jsonl", small_texts(40))), validation_tokens=32)
    path = prepare(cfg).folder / victim
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ConfigError, match=r"cache_dir: .*delete that folder to rebuild it"):
        prepare(cfg)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    source = str(write_jsonl(tmp_path / "a.jsonl", small_texts(40)))
    with pytest.raises(ConfigError, match=r"cache_dir: .*file.* cannot be written"):
        prepare(small_config(tmp_path, source=source, cache_dir=str(tmp_path / "file" / "cache")))


def test_long_documents_are_tokenized_in_pieces_of_one_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "BATCH_CHARACTERS", 700)
    texts = small_texts(30)
    bpe = tokens.train_bpe(texts, 300)
    writer = tokens.ShardWriter(tmp_path, "train", 300, 0)
    advanced: list[int] = []
    pieces = tokens._pieces
    monkeypatch.setattr(tokens, "_pieces", lambda text: pieces(text, 100))
    tokens.write_documents((("train", t) for t in texts), {"train": writer}, tokens.encoder(bpe), advanced.append)
    info = writer.close()
    meta = {"splits": {"train": info}, "dtype": "<u2", "eot_id": 0, "vocab_size": 300}
    shards = TokenShards.open(tmp_path, "train", meta)
    assert [bpe.decode(shards.document(i)[1:]) for i in range(shards.documents)] == texts
    assert sum(advanced) == sum(map(len, texts)) == info["characters"] and len(advanced) > 3
    assert info["bytes"] == sum(len(t.encode()) for t in texts)


def test_uint16_up_to_65536_ids_and_no_id_beyond_the_vocabulary(tmp_path: Path) -> None:
    assert tokens.token_dtype(65_536) == np.uint16 and tokens.token_dtype(65_537) == np.uint32
    writer = tokens.ShardWriter(tmp_path, "train", 65_536, 0)
    writer.add([65_535], 1, 1, True)
    with pytest.raises(ConfigError, match=r"outside 0\.\.65535"):
        writer.add([65_536], 1, 1, True)
    writer.close()


def test_offsets_and_windows_beyond_two_to_the_31(tmp_path: Path) -> None:
    total, seq_len = 2**31 + 1_500_000, 500_000
    with open(tmp_path / "train.tokens.bin", "wb") as handle:  # a hole: the file takes little space
        handle.seek((total - 2 * seq_len) * 2)
        handle.write((np.arange(2 * seq_len) % 900 + 1).astype("<u2").tobytes())
    np.array([0, total], dtype="<i8").tofile(tmp_path / "train.offsets.bin")
    info = {"tokens": total, "documents": 1, "sha256": "0", "eot_in_text": 0}
    meta = {"splits": {"train": info}, "dtype": "<u2", "eot_id": 0, "vocab_size": 1000}
    shards = TokenShards.open(tmp_path, "train", meta)
    reader = WindowReader(shards, seq_len, 1)
    last = reader.windows - 1
    reader.cursor = int(np.flatnonzero(permuted(np.arange(last + 1), last + 1, 0) == last)[0])
    want = np.asarray(shards.tokens[last * seq_len : (last + 1) * seq_len]).astype(np.int64)
    assert last * seq_len > 2**31 and want.min() > 0
    assert torch.equal(next(reader)["input_ids"][0], torch.from_numpy(want))


# --- real text -----------------------------------------------------------------------------------------------------


def test_builtin_end_to_end(tmp_path: Path) -> None:
    made = prepare(
        DataConfig(max_documents=60, vocab_size=400, seq_len=32, validation_tokens=512, cache_dir=str(tmp_path))
    )
    assert made.vocab_size == 400 and made.train.documents + made.validation.documents == 60
    assert made.description["source"]["kind"] == "builtin" and len(made.description["source"]["sha256"]) == 64
    first = sources._stdlib(Path(os.__file__).parent)[0][1].read_text(encoding="utf-8")
    held = {made.tokenizer.decode(s.document(0)[1:]) for s in (made.train, made.validation)}
    assert first in held
    assert next(made.reader())["input_ids"].shape == (16, 32)


@pytest.mark.skipif(not (REAL / "debian-docs-en").is_dir(), reason="ENGRAM_CORPUS has no debian-docs-en")
def test_real_english_parquet(tmp_path: Path) -> None:
    where = REAL / "debian-docs-en"
    cfg = DataConfig(
        source=str(where / "train.parquet"),
        validation=str(where / "validation.parquet"),
        max_documents=400,
        vocab_size=500,
        seq_len=32,
        validation_tokens=2048,
        cache_dir=str(tmp_path),
    )
    made = prepare(cfg)
    assert made.train.documents == made.validation.documents == 400
    assert made.description["source"]["names"] == ["train.parquet"]
    assert sum(b["labels"].numel() for b in made.validation_batches()) == 2048
