"""Saving and loading when something is wrong, the card, the Hub: all or nothing, and clear errors."""

from __future__ import annotations

import inspect
import json
import logging
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from saved_memory import CFG, TinyModel, assert_same_rows, changed, edit_index, logits, save_small, some_ids

import engram
import engram.optim
from engram import checkpoint, saving
from engram.checkpoint import fill, load
from engram.config import ConfigError
from engram.saving import size_in_bytes
from engram.stores.tensors import TensorFiles


@pytest.fixture
def saved(tiny_model: TinyModel, tmp_path: Path) -> Path:
    return save_small(tiny_model, tmp_path)


@pytest.mark.parametrize("at", ["rows", "index"])
def test_an_older_memory_survives_a_save_that_fails(
    at: str, saved: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    handle = load(tiny_model("llama"), saved)
    changed(handle)
    calls = []

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) < (4 if at == "rows" else 1):
            return original(*args, **kwargs)
        raise OSError(28, "No space left on device")

    if at == "rows":
        original: Any = saving.write_tensors
        monkeypatch.setattr(saving, "write_tensors", broken)
    else:
        original = saving.replace_text
        monkeypatch.setattr(saving, "replace_text", broken)
    with pytest.raises(OSError, match="No space"):
        handle.save_pretrained(saved)
    with pytest.raises(OSError, match="No space"):
        handle.save_pretrained(saved.parent / "new")
    assert not (saved.parent / "new").exists()
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    monkeypatch.undo()
    for left in ("memory.5.safetensors", "rows-layer-0-00001-of-00002.5.safetensors.writing-1"):  # after a kill
        shutil.copy(saved / "memory.safetensors", saved / left)
    handle.save_pretrained(saved)
    assert not list(saved.glob("*.5.*"))
    assert_same_rows(handle.memory, load(tiny_model("llama"), saved).memory)
    assert len(list(saved.glob("*.safetensors"))) == 4, "files of the save before are gone"


def test_a_save_leaves_other_files_alone(tiny_model: TinyModel, tmp_path: Path) -> None:
    handle = engram.attach(tiny_model("llama"), CFG)
    (tmp_path / "README.md").write_text("mine", encoding="utf-8")
    (tmp_path / "memory.safetensors").write_text("also mine", encoding="utf-8")
    handle.save_pretrained(tmp_path)
    handle.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == "mine"
    assert (tmp_path / "memory.safetensors").read_text(encoding="utf-8") == "also mine"
    load(tiny_model("llama"), tmp_path)
    with pytest.raises(ConfigError, match="is a file"):
        handle.save_pretrained(tmp_path / "README.md")


def test_a_failed_load_leaves_model_and_folder_as_they_were(
    saved: Path, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = tiny_model("llama"), tmp_path / "rows"

    pieces = TensorFiles.pieces

    def broken(*args: Any) -> Any:
        yield from list(pieces(*args))[:1]
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(TensorFiles, "pieces", broken)
    with pytest.raises(OSError, match="Input/output"):
        load(model, saved, placement="disk", path=path)
    assert not hasattr(model, "engram") and "save_pretrained" not in model.__dict__ and not list(path.iterdir())
    monkeypatch.undo()
    load(model, saved, placement="disk", path=path).detach()
    with pytest.raises(ConfigError, match=r"layer-0.safetensors is there already"):
        load(model, saved, placement="disk", path=path)
    for given, message in (({"placement": "disk"}, "need the folder"), ({"path": path}, "have none; leave it out")):
        with pytest.raises(ConfigError, match=message):
            load(model, saved, **given)
    with pytest.raises(ConfigError, match="placement"):
        load(model, saved, placement="floppy")


def _set(*keys: Any) -> Callable[[dict[str, Any]], None]:
    *way, last, value = keys

    def change(data: Any) -> None:
        for key in way:
            data = data[key]
        data[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("format", 2), "layout version 2, this code reads 1"),
        (_set("format", "1"), "layout version '1'"),
        (_set("surprise", 1), "surprise: unknown key"),
        (_set("config", "layers", [0]), r"tables of layers \[0, 1\], the configuration has \[0\]"),
        (_set("config", "layers", [1, 0]), r"the configuration has \[1, 0\]"),
        (_set("config", "seed", 1), "another hash"),
        (_set("config", "boundary", "none"), "another hash"),
        (_set("config", "rows", 311), "its configuration makes"),
        (_set("config", "row_dtype", "bf16"), "its configuration makes"),
        (_set("config", "compress", False), "one belongs to the other"),
        (_set("config", "hidden_size", 16), "differs from the model's 32"),
        (_set("config", "conv_kernel", 3), r"layers.0.conv has shape"),
        (_set("config", "bias", True), r"layers.0.key.bias has shape None"),
        (_set("token_map_sha256", "0" * 64), "sha256"),
        (_set("tables", 0, "identity", "0" * 64), "belongs elsewhere"),
        (_set("tables", 0, "scale", 0.0), "must be above 0"),
        (_set("tables", 0, "shards", 1, "first", 0), "a shard is missing"),
        (_set("tables", 0, "shards", 1, "file", "rows-layer-1-00002-of-00002.safetensors"), "index says"),
        (_set("tables", 0, "shards", 0, "file", "../memory.safetensors"), "not in its own folder; refused"),
        (_set("dense", "file", "/etc/passwd"), "not in its own folder; refused"),
        (_set("dense", "file", ".."), "not in its own folder; refused"),
        (_set("dense", "file", "gone.safetensors"), "is missing"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(
    change: Callable[[dict[str, Any]], None], message: str, saved: Path, tiny_model: TinyModel
) -> None:
    model = tiny_model("llama")
    keys, attributes = list(model.state_dict()), set(model.__dict__)
    edit_index(saved, change)
    with pytest.raises(ConfigError, match=message):
        load(model, saved)
    assert list(model.state_dict()) == keys and set(model.__dict__) == attributes
    assert not model.model._forward_pre_hooks


def test_files_that_are_gone_cut_or_others_are_refused(saved: Path, tiny_model: TinyModel, tmp_path: Path) -> None:
    shard = saved / "rows-layer-1-00002-of-00002.safetensors"
    whole = shard.read_bytes()

    def refused(message: str, folder: Path = saved) -> None:
        model = tiny_model("llama")
        with pytest.raises(ConfigError, match=message):
            load(model, folder)
        assert not hasattr(model, "engram")

    shard.write_bytes(whole[:-1])
    refused("truncated")
    shard.unlink()
    refused("00002-of-00002.safetensors: this file of the memory is missing")
    first = (saved / "rows-layer-1-00001-of-00002.safetensors").read_bytes()
    shard.write_bytes(first)
    refused("not as it was written")
    length = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + length])
    header["rows"]["shape"][0] -= 1  # a shape that its bytes do not have
    text = json.dumps(header).encode().ljust(length)[:length]
    shard.write_bytes(whole[:8] + text + whole[8 + length :])
    refused("the header is damaged|holds")
    shard.write_bytes(whole)
    load(tiny_model("llama"), saved)
    token_map = (saved / "token_map.safetensors").read_bytes()
    for key, damage in ((b"unmapped", "KeyError"), (b"sha256", "KeyError"), (b"engram_token_map", "no token map")):
        (saved / "token_map.safetensors").write_bytes(token_map.replace(key, key[::-1]))
        refused(damage)
    (saved / "token_map.safetensors").write_bytes(token_map)
    refused("no folder of this name", tmp_path / "no" / "where")
    (tmp_path / "empty").mkdir()
    refused("holds no memory", tmp_path / "empty")
    (saved / "engram.json").write_text("{", encoding="utf-8")
    refused("the index is damaged")


def test_swapped_shards_of_equal_size_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    handle = engram.attach(tiny_model("llama"), CFG.replace(heads=1, orders=(2,)))
    handle.save_pretrained(tmp_path, max_shard_size=100 * 32)
    a, b = (tmp_path / f"rows-layer-0-0000{n}-of-00003.safetensors" for n in (1, 2))
    content = a.read_bytes(), b.read_bytes()
    pad = max(map(len, content)) - len(content[0])
    assert abs(pad) <= 8, "the headers differ in one number"
    a.write_bytes(content[1])
    b.write_bytes(content[0])
    sizes = {a.name: len(content[1]), b.name: len(content[0])}

    def swap(data: dict[str, Any]) -> None:
        for shard in data["tables"][0]["shards"]:
            shard["bytes"] = sizes.get(shard["file"], shard["bytes"])

    edit_index(tmp_path, swap)
    with pytest.raises(ConfigError, match="the file belongs elsewhere"):
        load(tiny_model("llama"), tmp_path)


def test_other_models_and_tokenizers_are_refused(saved: Path, tiny_model: TinyModel) -> None:
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(50)}, unk_token="w0"))
    with pytest.raises(ConfigError, match="is not the map of this tokenizer"):
        load(tiny_model("llama"), saved, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="it covers 64 ids, the model has 72"):
        load(tiny_model("llama", vocab_size=72), saved)
    with pytest.raises(ConfigError, match="block 1 does not exist"):
        load(tiny_model("llama", layers=1), saved)
    model = tiny_model("llama")
    load(model, saved)
    with pytest.raises(ConfigError, match="has a memory already"):
        load(model, saved)


def test_a_memory_inside_an_adapter_is_refused_and_beside_one_saved(tiny_model: TinyModel, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model, ids = tiny_model("llama"), some_ids()
    handle = changed(engram.attach(model, CFG))
    beside = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    expected = logits(beside.eval(), ids)
    handle.save_pretrained(tmp_path / "memory")
    beside.save_pretrained(tmp_path / "adapter")
    other = tiny_model("llama")
    load(other, tmp_path / "memory")
    assert torch.equal(logits(peft.PeftModel.from_pretrained(other, tmp_path / "adapter").eval(), ids), expected)
    inside = tiny_model("llama")
    handle = engram.attach(inside, CFG)
    peft.get_peft_model(inside, peft.LoraConfig(target_modules=["value"]))
    for call in (handle.save_pretrained, lambda folder: fill(handle.memory, tmp_path / "memory")):
        with pytest.raises(ConfigError, match="its value projection is a peft"):
            call(tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_raw_ids_of_another_vocabulary_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    engram.attach(tiny_model("llama"), CFG).save_pretrained(tmp_path)
    model = tiny_model("llama", vocab_size=72)
    with pytest.raises(ConfigError, match="vocabulary of 64 ids there, 72 here"):
        load(model, tmp_path)
    assert not hasattr(model, "engram")


def test_an_older_layout_is_migrated(saved: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def older(data: dict[str, Any]) -> None:
        data["format"], data["weights"] = 0, data.pop("dense")

    edit_index(saved, older)
    with pytest.raises(ConfigError, match="layout version 0, this code reads 1"):
        load(tiny_model("llama"), saved)

    def newer(data: dict[str, Any]) -> dict[str, Any]:
        return {"dense" if key == "weights" else key: value for key, value in data.items()} | {"format": 1}

    monkeypatch.setitem(checkpoint.MIGRATIONS, 0, newer)
    load(tiny_model("llama"), saved)


def test_the_card_says_what_is_there(tiny_model: TinyModel, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    model.config._name_or_path = "someone/small-llama"
    handle = engram.attach(model, CFG)
    with caplog.at_level(logging.INFO, logger="engram"):
        handle.save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.library_name == "engram" and card.data.base_model == "someone/small-llama"
    assert card.data.tags is not None and "engram" in card.data.tags
    sizes = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert f"| together | 3 | {sizes / 1000:.1f} kB |" in card.text and sizes < 100_000, "a small table, a small memory"
    rows = {module.layer: module.table.store.spec.rows for module in handle.memory.modules_by_layer()}
    assert f"| layer 1: {rows[1]:,} rows of 8 values | 1 |" in card.text
    dense = sum(p.numel() for p in handle.memory.parameters())
    assert (
        f"{sum(rows.values()):,} rows, {8 * sum(rows.values()):,} values stored as fp32; {dense:,} dense" in card.text
    )
    assert f"{sizes / 1000:.1f} kB (rows: layer 0" in caplog.text
    model.config._name_or_path = str(tmp_path)
    handle.save_pretrained(tmp_path)
    assert "base_model" not in (tmp_path / "README.md").read_text(encoding="utf-8"), "a folder of this machine"
    assert str(tmp_path) not in (tmp_path / "engram.json").read_text(encoding="utf-8")


def test_push_uploads_one_whole_folder(tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Hub:
        """Keeps what huggingface_hub.HfApi would upload."""

        def __init__(self, token: Any) -> None:
            calls.append(token)

        def create_repo(self, repo_id: str, **options: Any) -> Any:
            calls.append((repo_id, options))
            return huggingface_hub.RepoUrl(f"https://huggingface.co/someone/{repo_id}")

        def upload_folder(self, folder_path: str, **options: Any) -> str:
            shutil.copytree(folder_path, tmp_path / "hub")
            calls.append(options)
            return "https://huggingface.co/someone/memory/commit/1"

    real = inspect.signature(huggingface_hub.HfApi.upload_folder).parameters
    monkeypatch.setattr(saving, "HfApi", Hub)
    handle = changed(engram.attach(tiny_model("llama"), CFG))
    assert handle.push_to_hub("memory", private=True, token="t", commit_message="first").endswith("commit/1")
    assert calls[:2] == ["t", ("memory", {"private": True, "exist_ok": True})]
    assert set(calls[2]) <= set(real) and calls[2]["repo_id"] == "someone/memory"
    assert calls[2]["commit_message"] == "first" and "rows-layer-*.safetensors" in calls[2]["delete_patterns"]
    assert {path.name for path in (tmp_path / "hub").iterdir()} >= {"README.md", "engram.json", "memory.safetensors"}
    assert_same_rows(handle.memory, load(tiny_model("llama"), tmp_path / "hub").memory)


def test_memories_come_from_the_hub(saved: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def download(name: str, revision: Any = None, allow_patterns: Any = None) -> str:
        asked.append((name, revision, allow_patterns))
        return str(saved)

    monkeypatch.setattr(checkpoint, "snapshot_download", download)
    load(tiny_model("llama"), "someone/memory", revision="v2")
    assert asked[0][:2] == ("someone/memory", "v2") and "rows-layer-*.safetensors" in asked[0][2]
    monkeypatch.undo()  # no network: what the library says, and what to do
    with pytest.raises(ConfigError, match="no folder of this name"):
        load(tiny_model("llama"), "someone/memory")


def test_a_memory_alone_needs_to_know_its_base(saved: Path, tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not know its name; give base=.*llama of hidden width 32"):
        engram.from_pretrained(saved)
    tiny_model("llama").save_pretrained(tmp_path / "base")
    both = engram.from_pretrained(saved, base=tmp_path / "base")
    assert isinstance(both.model, transformers.LlamaForCausalLM) and both.handle.memory.token_map is not None
    edit_index(saved, _set("base_model", str(tmp_path / "base")))
    assert isinstance(engram.from_pretrained(saved).model, transformers.LlamaForCausalLM)


def test_sizes_as_people_write_them() -> None:
    assert [size_in_bytes(text) for text in (7, "5GB", "200 mb", "1.5KiB")] == [7, 5 * 10**9, 2 * 10**8, 1536]
    for text in ("5", "GB", "5XB", 0, -1, True, 1.5):
        with pytest.raises(ConfigError, match="max_shard_size"):
            size_in_bytes(text)  # type: ignore[arg-type]
