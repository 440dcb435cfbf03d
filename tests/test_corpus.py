"""Where text comes from: the standard library, local files of every kind, Hugging Face names, and every bad input."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_corpus import small_config, small_texts, write_jsonl

from engram.strict import ConfigError, from_dict, to_dict
from engram.train import corpus as sources
from engram.train import textfiles
from engram.train.data import DataConfig, prepare


def _read(cfg: DataConfig) -> list[str]:
    return list(sources.documents(sources.open_sources(cfg)[0], cfg))


# --- config --------------------------------------------------------------------------------------------------------


def test_config_is_strict_and_round_trips() -> None:
    cfg = from_dict(DataConfig, {"source": ["a.txt", "b.txt"], "holdout": 0.1, "validation": "v.txt"})
    assert cfg.source == ("a.txt", "b.txt") and from_dict(DataConfig, to_dict(cfg)) == cfg
    for bad, message in (
        ({"sourc": "x"}, "sourc: unknown key"),
        ({"seq_len": "long"}, "seq_len: expected int"),
        ({"seq_len": 0}, "seq_len: 0 must be at least 1"),
        ({"epochs": 0}, "epochs: 0"),
        ({"holdout": 0.0}, "holdout: 0.0"),
        ({"vocab_size": 256}, "vocab_size: 256 must be at least 257"),
        ({"max_documents": 0}, "max_documents: 0"),
        ({"source": ""}, "source: empty"),
        ({"validation_tokens": 10}, "validation_tokens: 10 must be at least seq_len 256"),
    ):
        with pytest.raises(ConfigError, match=message):
            from_dict(DataConfig, bad)


# --- sources -------------------------------------------------------------------------------------------------------


def test_builtin_is_the_standard_library_without_tests_and_encodings() -> None:
    source, _ = sources.open_sources(DataConfig())
    identity = source.identity
    assert identity["python_version"] == platform.python_version() and identity["bytes"] > 2_000_000
    files = sources._stdlib(Path(os.__file__).parent)
    names = [name for name, _ in files]
    assert len(names) == identity["files"] > 300 and names == sorted(names) and "argparse.py" in names
    for part in ("test/", "tests/", "idle_test/", "encodings/", "site-packages/", "_sysconfigdata"):
        assert not any((part in f"/{name}"[1:] and name.startswith(part)) or f"/{part}" in name for name in names), part
    digest = hashlib.sha256()
    for name, path in files:
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    assert identity["sha256"] == digest.hexdigest()
    text = next(iter(sources.documents(source, DataConfig(max_documents=1))))
    assert text == files[0][1].read_text(encoding="utf-8")


def test_builtin_needs_no_datasets_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(textfiles, "has_module", lambda name: name != "datasets")
    assert len(_read(DataConfig(max_documents=3))) == 3
    with pytest.raises(ConfigError, match="needs 'datasets'"):
        _read(small_config(tmp_path, source=str(write_jsonl(tmp_path / "a.jsonl", small_texts(2)))))


def test_every_file_kind_compressed_and_plain_gives_the_same_documents(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [t.strip() + " é€\u2028x" for t in small_texts(12)]
    plain: dict[str, bytes] = {
        "a.jsonl": write_jsonl(tmp_path / "a.jsonl", texts).read_bytes(),
        "b.ndjson": b"".join(json.dumps({"text": t}, ensure_ascii=False).encode() + b"\n\n" for t in texts),
        "c.json": json.dumps([{"text": t, "k": 1} for t in texts]).encode(),
        "d.json": (tmp_path / "a.jsonl").read_bytes(),
    }
    pq.write_table(pa.table({"text": texts, "other": list(range(12))}), tmp_path / "e.parquet", row_group_size=5)
    plain["e.parquet"] = (tmp_path / "e.parquet").read_bytes()
    compress: dict[str, Callable[[bytes], bytes]] = {
        "": bytes,
        ".gz": gzip.compress,
        ".bz2": bz2.compress,
        ".xz": lzma.compress,
    }
    for name, content in plain.items():
        for ending, pack in compress.items():
            path = tmp_path / (name + ending)
            path.write_bytes(pack(content))
            assert _read(DataConfig(source=str(path))) == texts, path.name
    for ending, pack in compress.items():
        path = tmp_path / ("f.txt" + ending)
        path.write_bytes(pack(("\ufeff" + "\r\n".join(texts)).encode()))
        assert _read(DataConfig(source=str(path))) == ["\n".join(texts)], path.name


def test_zst_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt.zst").write_bytes(b"x")
    monkeypatch.setattr(textfiles, "has_module", lambda name: name != "zstandard")
    with pytest.raises(ConfigError, match="pip install zstandard"):
        _read(DataConfig(source=str(tmp_path / "a.txt.zst")))


def test_lists_folders_and_globs_in_order_each_file_once(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("b.txt", "a.txt", "in/c.txt", "in/skip.bin", ".hidden.txt"):
        (tmp_path / name).write_text(f"text of {name}")
    assert _read(DataConfig(source=str(tmp_path))) == ["text of a.txt", "text of b.txt", "text of in/c.txt"]
    assert _read(DataConfig(source=str(tmp_path / "*.txt"))) == ["text of a.txt", "text of b.txt"]
    both = (str(tmp_path / "b.txt"), str(tmp_path / "**" / "*.txt"))
    assert _read(DataConfig(source=both)) == ["text of b.txt", "text of a.txt", "text of in/c.txt"]


@pytest.mark.parametrize("name", ["we[1]rd *?.txt", "a::b#c.txt", ".hidden.txt", "sp ace.TXT"])
def test_names_that_look_like_patterns_are_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("all of it")
    assert _read(DataConfig(source=str(tmp_path / name))) == ["all of it"]


def test_long_txt_is_cut_at_blank_lines_and_loses_nothing(tmp_path: Path) -> None:
    text = "\n\n".join("line of words\n" * 5 for _ in range(40)) + "\n" + "x" * 700 + "\n"
    (tmp_path / "a.txt").write_text(text)
    pieces = _read(DataConfig(source=str(tmp_path / "a.txt"), txt_characters=300))
    assert "".join(pieces) == text and len(pieces) > 5
    assert all(len(p) <= 300 for p in pieces)
    assert all(p.endswith("\n\n") for p in pieces[:10])
    assert _read(DataConfig(source=str(tmp_path / "a.txt"), txt_characters=0)) == [text]


def test_limits_empty_rows_and_broken_surrogates(tmp_path: Path) -> None:
    rows = ['{"text": "first"}', '{"text": null}', '{"text": "  \\n"}', '{"text": "se\\ud800c"}', '{"text": "third"}']
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(rows))
    cfg = DataConfig(source=str(path))
    tally = sources.Tally()
    got = list(sources.documents(sources.open_sources(cfg)[0], cfg, tally))
    assert got == ["first", "se\ufffdc", "third"]
    assert (tally.rows, tally.empty, tally.documents, tally.characters) == (5, 2, 3, 14)
    assert _read(DataConfig(source=str(path), max_documents=2)) == got[:2]
    assert _read(DataConfig(source=str(path), max_characters=7)) == ["first", "se"]


def test_a_field_that_first_comes_late_is_no_problem(tmp_path: Path) -> None:
    rows = [{"text": f"document {i} " + "x" * 200, **({"late": 1} if i > 58_000 else {})} for i in range(60_000)]
    path = tmp_path / "late.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))  # above the 10 MB after which a schema is fixed
    assert len(_read(DataConfig(source=str(path)))) == 60_000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", bytes(range(128, 256)) * 20, "is no UTF-8 text"),
        ("a.txt", b"text\0with zeros\n", "holds NUL bytes"),
        ("a.txt.gz", gzip.compress("hé".encode("latin-1")), "is no UTF-8 text"),
        ("a.txt.gz", b"this is not compressed", "could not be read"),
        ("a.txt.gz", gzip.compress(os.urandom(4000).hex().encode())[:1000], "could not be read"),
        ("a.parquet", b"no parquet at all", "could not be read"),
        ("a.jsonl", b'{"text": "x"}\n{broken\n', "line 2 is not JSON"),
        ("a.jsonl", b'{"text": "x"}\n[1]\n', "line 2 is no JSON object"),
        ("a.jsonl", b'{"text": "x"}\n{"text": 7}\n', "line 2: text_column 'text' holds int, not text"),
        ("a.jsonl", b'{"body": "x", "id": 1}\n', "no text_column 'text'; present are 'body', 'id'"),
        ("a.json", b'[{"body": "x", "id": 1}]', "no text_column 'text'; present are 'body', 'id'"),
        ("a.csv", b"text\nx\n", "unknown ending; known are .txt"),
        ("a.txt", b"", "is empty"),
        ("a.jsonl", b"", "is empty"),
        ("a.json", b"", "is empty"),
        ("a.jsonl", b'{"text": " "}\n{"text": null}\n', "is empty: 2 rows were read and none holds text"),
        ("a.jsonl", b'{"text": "only one document"}\n', "is a single document"),
    ],
)
def test_bad_files_are_named_with_the_reason(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        prepare(small_config(tmp_path, source=str(tmp_path / name)))
    assert name in str(error.value)
    cache = tmp_path / "cache"
    assert not cache.exists() or [p.name for p in cache.iterdir() if p.suffix != ".lock"] == []


def test_an_empty_parquet_and_a_missing_parquet_column(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "none.parquet")
    with pytest.raises(ConfigError, match=r"none\.parquet is empty"):
        prepare(small_config(tmp_path, source=str(tmp_path / "none.parquet")))
    pq.write_table(pa.table({"body": ["x"], "n": [1]}), tmp_path / "other.parquet")
    with pytest.raises(ConfigError, match="no text_column 'text'; present are 'body', 'n'"):
        prepare(small_config(tmp_path, source=str(tmp_path / "other.parquet")))
    assert _read(DataConfig(source=str(tmp_path / "other.parquet"), text_column="body")) == ["x"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.txt", "'missing.txt' does not exist"),
        ("./nowhere", "'./nowhere' does not exist"),
        ("nothing/*.txt", "matches no file of a known ending"),
        ("a/b/c", "no existing path and no Hugging Face data set name"),
        (("builtin", "x.txt"), "'builtin' is a training source by itself"),
        (("",), "empty path"),
    ],
)
def test_unknown_paths(source: str | tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sources.open_sources(DataConfig(source=source))


def test_validation_must_not_be_training_text(tmp_path: Path) -> None:
    one = write_jsonl(tmp_path / "a.jsonl", small_texts(4))
    two = write_jsonl(tmp_path / "b.jsonl", small_texts(3, seed=1))
    with pytest.raises(ConfigError, match=r"b\.jsonl is in source too"):
        sources.open_sources(DataConfig(source=str(tmp_path), validation=str(two)))
    train, held = sources.open_sources(DataConfig(source=str(one), validation=str(two)))
    assert held is not None and len(list(held.read())) == 3 and len(list(train.read())) == 4


@pytest.mark.parametrize("streaming", [False, True])
def test_hugging_face_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    import datasets

    asked: list[tuple[str, dict[str, Any]]] = []

    def load(path: str, **options: Any) -> Any:
        asked.append((path, options))
        if path != "someone/some-data":
            raise ValueError("no such data set")
        table = datasets.Dataset.from_dict({"text": small_texts(30, seed=len(options["split"])), "n": list(range(30))})
        return table.to_iterable_dataset() if options["streaming"] else table

    monkeypatch.setattr(datasets, "load_dataset", load)
    cfg = small_config(
        tmp_path,
        source="someone/some-data",
        subset="en",
        revision="v1",
        validation="test",
        streaming=streaming,
        max_documents=20,
        validation_tokens=64,
    )
    made = prepare(cfg)
    assert made.train.documents == made.validation.documents == 20
    assert {o["split"] for _, o in asked} == {"train", "test"}
    assert all(o["name"] == "en" and o["revision"] == "v1" and o["streaming"] is streaming for _, o in asked)
    assert made.description["source"]["name"] == "someone/some-data"
    assert made.description["validation"]["split"] == "test"
    before = len(asked)
    prepare(cfg)
    assert len(asked) == before  # the cache answers without the network
    with pytest.raises(ConfigError, match=r"no existing path, and as a Hugging Face data set .* could not be loaded"):
        prepare(small_config(tmp_path, source="nobody/nothing"))
    with pytest.raises(ConfigError, match="present are 'text', 'n'"):
        prepare(small_config(tmp_path, source="someone/some-data", text_column="body"))
    with pytest.raises(ConfigError, match="is the training split"):
        prepare(small_config(tmp_path, source="someone/some-data", validation="train"))


def _leftovers() -> Iterator[Path]:
    yield from Path(os.environ.get("TMPDIR", "/tmp")).glob("engram-*/file.*")


def test_reading_part_of_a_file_leaves_no_temporary_folder(tmp_path: Path) -> None:
    before = set(_leftovers())
    _read(DataConfig(source=str(write_jsonl(tmp_path / "a.jsonl", small_texts(50))), max_documents=2))
    assert set(_leftovers()) <= before
