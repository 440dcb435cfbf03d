"""Saving and loading: bit-equal through every store and format, read by transformers and safetensors, or refused."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import os
import shutil
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import engram
import engram.optim
from engram import checkpoint, saving, tensorfiles
from engram.checkpoint import fill, find_memory, load
from engram.config import ConfigError, EngramConfig
from engram.memory import Memory
from engram.saving import save, size_in_bytes
from engram.stores.formats import FORMATS
from engram.tensorfiles import Stream, read_header, read_pieces, write_tensors

VOCAB = 64
CFG = EngramConfig(hidden_size=32, layers=(0, 1), heads=2, head_dim=8, rows=211, init="normal", init_std=1.0)
PLACEMENTS = ("device", "host", "pinned", "disk")
TinyModel = Callable[..., Any]


def _ids() -> Tensor:
    return torch.randint(0, VOCAB, (2, 12))


def _logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def _placed(cfg: EngramConfig, placement: str, folder: Path) -> EngramConfig:
    return cfg.replace(placement=placement, path=str(folder) if placement == "disk" else None)


def _rows(memory: Memory) -> dict[int, Tensor]:
    tables = {module.layer: module.table for module in memory.modules_by_layer()}
    return {n: table.read(torch.arange(table.store.spec.rows)).clone() for n, table in tables.items()}


def _changed(handle: engram.Handle) -> engram.Handle:
    """Dense weights and some rows as no initialisation makes them."""
    for module in handle.memory.modules_by_layer():
        for parameter in module.parameters():
            if parameter.numel():
                parameter.data.add_(torch.randn_like(parameter))
        ids = torch.arange(0, module.table.store.spec.rows, 3)
        module.table.write(ids, torch.randn(len(ids), module.table.cfg.head_dim))
    return handle


def _assert_same_rows(a: Memory, b: Memory) -> None:
    ours, theirs = _rows(a), _rows(b)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[layer], theirs[layer]) for layer in ours)


@pytest.fixture
def saved(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """A small memory in a folder, several shards a layer, with a token map."""
    handle = engram.attach(tiny_model("llama"), CFG.replace(compress=True), token_map=_map())
    return _changed(handle).save_pretrained(tmp_path / "saved", max_shard_size=20_000)


def _map() -> engram.TokenMap:
    return engram.TokenMap([i // 2 for i in range(VOCAB)])


# ---- round trips ----


@pytest.mark.parametrize("row_dtype", list(FORMATS))
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_logits_and_rows_come_back_bit_for_bit(
    placement: str, row_dtype: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    kind = "gpt2" if placement in ("host", "disk") else "llama"
    model, ids = tiny_model(kind), _ids()
    cfg = _placed(CFG.replace(row_dtype=row_dtype), placement, tmp_path / "rows")
    handle = _changed(engram.attach(model, cfg))
    expected, base = _logits(model, ids), _logits(tiny_model(kind), ids)
    handle.save_pretrained(tmp_path / "saved", max_shard_size=5_000)
    assert len(list((tmp_path / "saved").glob("rows-layer-0-*"))) > 1, "the test wants several shards"
    fresh = tiny_model(kind)
    there = load(fresh, tmp_path / "saved", path=tmp_path / "other" if placement == "disk" else None)
    assert there.memory.cfg == _placed(cfg, placement, tmp_path / "other")
    assert torch.equal(_logits(fresh, ids), expected) and not torch.equal(expected, base)
    _assert_same_rows(handle.memory, there.memory)
    assert torch.equal(_logits(there.detach(), ids), base)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_rows_may_move_to_another_store(placement: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    handle = _changed(engram.attach(tiny_model("llama"), CFG.replace(row_dtype="bf16")))
    handle.save_pretrained(tmp_path / "saved")
    path = tmp_path / "rows" if placement == "disk" else None
    there = load(tiny_model("llama"), tmp_path / "saved", placement=placement, path=path)
    _assert_same_rows(handle.memory, there.memory)
    there.memory.close()
    if path is not None:  # a file goes back to its last checkpoint when it is opened
        again = engram.attach(tiny_model("llama"), _placed(CFG.replace(row_dtype="bf16"), "disk", path))
        _assert_same_rows(handle.memory, again.memory)


def test_safetensors_reads_the_same_rows(saved: Path, tiny_model: TinyModel) -> None:
    handle = load(tiny_model("llama"), saved)
    shards = sorted(saved.glob("rows-layer-1-*.safetensors"))
    rows = torch.cat([load_file(shard)["rows"] for shard in shards])
    assert len(shards) == 2 and torch.equal(rows, _rows(handle.memory)[1])
    dense = load_file(saved / "memory.safetensors")
    assert torch.equal(dense["layers.0.value.weight"], handle.memory.layer(0).value.weight)
    assert dense["layers.0.hash.multipliers"].dtype == torch.int64


def test_decayed_rows_come_back_as_they_were_read(tiny_model: TinyModel, tmp_path: Path) -> None:
    model, ids = tiny_model("llama").train(), _ids()
    handle = engram.attach(model, CFG)
    optimizer = engram.optim.build(model, lr=1e-2, row_weight_decay=0.5, row_decay="global")
    for _ in range(3):
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert handle.memory.layer(0).table.scale < 1
    handle.save_pretrained(tmp_path)
    there = load(tiny_model("llama"), tmp_path)
    assert there.memory.layer(0).table.scale == handle.memory.layer(0).table.scale
    _assert_same_rows(handle.memory, there.memory)


def test_rows_that_are_no_numbers_come_back_too(tiny_model: TinyModel, tmp_path: Path) -> None:
    handle = engram.attach(tiny_model("llama"), CFG)
    rows = handle.memory.layer(0).table.store.rows
    rows[3] = float("nan")
    rows[4].view(torch.int32)[:] = 0x7F800001  # a signalling NaN
    handle.save_pretrained(tmp_path)
    there = load(tiny_model("llama"), tmp_path).memory.layer(0).table.store.rows
    assert torch.equal(there.view(torch.int32), rows.view(torch.int32))


def test_a_memory_of_ones_own_is_saved_and_filled(tmp_path: Path) -> None:
    first, second = Memory(CFG, VOCAB), Memory(CFG.replace(placement="host"), VOCAB)
    first.layer(1).table.write(torch.tensor([5]), torch.ones(1, 8))
    save(first, tmp_path)
    ticket = second.layer(1).table.fetcher.launch(torch.tensor([5]), ahead=True)  # type: ignore[union-attr]
    fill(second, tmp_path)
    assert torch.equal(ticket.wait(), torch.ones(1, 8)), "a fetch under way is read again"
    _assert_same_rows(first, second)
    with pytest.raises(ConfigError, match="another hash"):
        fill(Memory(CFG, VOCAB + 1), tmp_path)


def test_a_sparse_table_stays_sparse(tmp_path: Path) -> None:
    cfg = EngramConfig(hidden_size=8, layers=(0,), heads=1, orders=(2,), head_dim=64, rows=400_000)
    memory = Memory(_placed(cfg, "disk", tmp_path / "rows"), VOCAB)
    memory.layer(0).table.write(torch.tensor([300_000]), torch.ones(1, 64))
    save(memory, tmp_path / "saved")
    shard = next((tmp_path / "saved").glob("rows-*"))
    assert shard.stat().st_size > 100e6 and shard.stat().st_blocks * 512 < 20e6
    other = Memory(_placed(cfg, "disk", tmp_path / "other"), VOCAB)
    fill(other, tmp_path / "saved")
    assert other.layer(0).table.store.open().rows_touched() == 1
    assert torch.equal(
        other.layer(0).table.read(torch.tensor([300_000, 1])), torch.tensor([[1.0], [0.0]]).expand(2, 64)
    )


# ---- memory and time ----


def _peak_above(call: Callable[[], Any]) -> int:
    """Bytes of resident memory that `call` takes at most, beyond those before it."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    except OSError:
        pytest.skip("the system does not let the peak of memory be read")
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def test_a_table_is_never_there_twice(tmp_path: Path) -> None:
    cfg = EngramConfig(hidden_size=8, layers=(0,), heads=1, orders=(2,), head_dim=64, rows=800_000, placement="host")
    memory = Memory(cfg, VOCAB)
    memory.layer(0).table.store.rows.fill_(1.5)
    assert memory.layer(0).table.store.bytes_held()["host"] > 200e6
    assert _peak_above(lambda: save(memory, tmp_path, max_shard_size="60MB")) < 40e6
    memory.layer(0).table.store.rows.fill_(0)
    assert _peak_above(lambda: fill(memory, tmp_path)) < 40e6
    assert bool((memory.layer(0).table.store.rows == 1.5).all())


# ---- the plain base beside it ----


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_saved_model_is_the_plain_base_with_the_memory_beside_it(
    kind: str, tied: bool, tiny_model: TinyModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = tiny_model(kind, tie_word_embeddings=tied), _ids()
    base = _logits(model, ids)
    handle = _changed(engram.attach(model, CFG))
    expected = _logits(model, ids)
    model.save_pretrained(tmp_path)
    assert list(model.state_dict())[-1].startswith("engram.") and model.engram is handle.memory
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert not [name for name in file.keys() if name.startswith("engram")]  # noqa: SIM118
    transformers.utils.logging.enable_propagation()
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        plain, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    transformers.utils.logging.disable_propagation()
    assert not any(info[name] for name in info) and not caplog.records
    assert torch.equal(_logits(plain.eval(), ids), base)
    assert not hasattr(plain, "engram")
    load(plain, tmp_path)
    assert torch.equal(_logits(plain, ids), expected)
    both, there = engram.from_pretrained(tmp_path, device_map="auto", low_cpu_mem_usage=True)
    assert torch.equal(_logits(both.eval(), ids), expected) and there.model is both
    if tied:
        assert both.get_output_embeddings().weight is both.get_input_embeddings().weight


def test_detach_gives_the_model_its_own_save_pretrained_back(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model("llama")
    handle = engram.attach(model, CFG)
    assert "save_pretrained" in model.__dict__
    handle.detach()
    assert "save_pretrained" not in model.__dict__
    model.save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain" / "engram").exists()
    calls = []
    model.save_pretrained = lambda folder, *args, **kwargs: calls.append(folder)
    own = model.save_pretrained
    handle = engram.attach(model, CFG)
    model.save_pretrained(tmp_path / "both")
    assert calls == [tmp_path / "both"] and find_memory(tmp_path / "both").name == "engram"
    handle.detach()
    assert model.save_pretrained is own


def test_a_copied_model_saves_its_own_memory(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model("llama")
    engram.attach(model, CFG)
    twin = copy.deepcopy(model)
    twin.engram.layer(0).table.write(torch.tensor([7]), torch.full((1, 8), 3.0))
    twin.save_pretrained(tmp_path)
    assert torch.equal(_rows(load(tiny_model("llama"), tmp_path).memory)[0][7], torch.full((8,), 3.0))


def test_given_weights_are_saved_without_the_memory_as_trainers_do(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model("llama")
    engram.attach(model, CFG)
    weights = {name: value + 1 for name, value in model.state_dict().items() if not name.endswith("digest")}
    model.save_pretrained(tmp_path, state_dict=weights, max_shard_size="40KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert not [name for name in index["weight_map"] if name.startswith("engram")]
    assert index["metadata"]["total_parameters"] == tiny_model("llama").num_parameters()
    assert len(list((tmp_path / "engram").glob("rows-layer-0-*"))) == 1
    model.save_pretrained(tmp_path / "rank1", is_main_process=False)
    assert not (tmp_path / "rank1" / "engram").exists()
    with pytest.raises(ConfigError, match="model.push_to_hub"):
        model.save_pretrained(tmp_path / "hub", push_to_hub=True)
    assert not (tmp_path / "hub").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_from_the_meta_device_and_casts(
    dtype: torch.dtype, tiny_model: TinyModel, tmp_path: Path, nan_empty: None
) -> None:
    model, ids = tiny_model("llama").to(dtype), _ids()
    handle = _changed(engram.attach(model, CFG))
    expected = _logits(model, ids)
    handle.save_pretrained(tmp_path)
    assert load_file(tmp_path / "memory.safetensors")["layers.0.value.weight"].dtype == dtype
    assert load_file(tmp_path / "rows-layer-0-00001-of-00001.safetensors")["rows"].dtype == torch.float32
    with torch.device("meta"):
        fresh = transformers.LlamaForCausalLM(model.config).eval()
    with pytest.raises(ConfigError, match="meta device"):
        load(fresh, tmp_path)
    assert not hasattr(fresh, "engram")
    fresh.to_empty(device="cpu")
    plain = {name: value for name, value in model.state_dict().items() if not name.startswith("engram.")}
    fresh.load_state_dict(plain)
    fresh.model.rotary_emb = model.model.rotary_emb  # its buffers are not in any file
    there = load(fresh.to(dtype), tmp_path)
    assert torch.equal(_logits(fresh, ids), expected)
    _assert_same_rows(handle.memory, there.memory)
    # a memory that was itself on the meta device, over memory full of junk
    with torch.device("meta"):
        memory = Memory(CFG, VOCAB)
    with pytest.raises(ConfigError, match="lie on the meta device"):
        save(memory, tmp_path / "meta")
    assert not (tmp_path / "meta").exists()
    memory.to_empty(device="cpu")
    fill(memory, tmp_path)
    _assert_same_rows(handle.memory, memory)


# ---- all or nothing ----


@pytest.mark.parametrize("at", ["rows", "index"])
def test_an_older_memory_survives_a_save_that_fails(
    at: str, saved: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    handle = load(tiny_model("llama"), saved)
    _changed(handle)
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
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    monkeypatch.undo()
    handle.save_pretrained(saved)
    _assert_same_rows(handle.memory, load(tiny_model("llama"), saved).memory)
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

    def broken(*args: Any) -> Any:
        yield from list(read_pieces(*args))[:1]
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(checkpoint, "read_pieces", broken)
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


# ---- what is refused ----


def _edit_index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads((folder / "engram.json").read_text(encoding="utf-8"))
    change(data)
    (folder / "engram.json").write_text(json.dumps(data), encoding="utf-8")


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
    _edit_index(saved, change)
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
    _edit_index(
        tmp_path, lambda d: [s.update(bytes=sizes.get(s["file"], s["bytes"])) for t in d["tables"] for s in t["shards"]]
    )
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


def test_raw_ids_of_another_vocabulary_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    engram.attach(tiny_model("llama"), CFG).save_pretrained(tmp_path)
    model = tiny_model("llama", vocab_size=72)
    with pytest.raises(ConfigError, match="vocabulary of 64 ids there, 72 here"):
        load(model, tmp_path)
    assert not hasattr(model, "engram")


def test_an_older_layout_is_migrated(saved: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def older(data: dict[str, Any]) -> None:
        data["format"], data["weights"] = 0, data.pop("dense")

    _edit_index(saved, older)
    with pytest.raises(ConfigError, match="layout version 0, this code reads 1"):
        load(tiny_model("llama"), saved)

    def newer(data: dict[str, Any]) -> dict[str, Any]:
        return {"dense" if key == "weights" else key: value for key, value in data.items()} | {"format": 1}

    monkeypatch.setitem(checkpoint.MIGRATIONS, 0, newer)
    load(tiny_model("llama"), saved)


# ---- the card and the Hub ----


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
    handle = _changed(engram.attach(tiny_model("llama"), CFG))
    assert handle.push_to_hub("memory", private=True, token="t", commit_message="first").endswith("commit/1")
    assert calls[:2] == ["t", ("memory", {"private": True, "exist_ok": True})]
    assert set(calls[2]) <= set(real) and calls[2]["repo_id"] == "someone/memory"
    assert calls[2]["commit_message"] == "first" and "rows-layer-*.safetensors" in calls[2]["delete_patterns"]
    assert {path.name for path in (tmp_path / "hub").iterdir()} >= {"README.md", "engram.json", "memory.safetensors"}
    _assert_same_rows(handle.memory, load(tiny_model("llama"), tmp_path / "hub").memory)


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
    _edit_index(saved, _set("base_model", str(tmp_path / "base")))
    assert isinstance(engram.from_pretrained(saved).model, transformers.LlamaForCausalLM)


# ---- files in pieces ----


def test_streams_are_what_safetensors_writes_and_reads(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(5, 3), "a": torch.arange(7), "none": torch.empty(0, 4), "one": torch.tensor(2.5)}
    tensors |= {"h": torch.randn(3).bfloat16(), "u": torch.arange(3, dtype=torch.uint8), "t": torch.randn(4, 3).T}
    size = write_tensors(tmp_path / "f", {name: Stream.of(tensor) for name, tensor in tensors.items()}, {"x": "y"})
    back = load_file(tmp_path / "f")
    assert size == (tmp_path / "f").stat().st_size and back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype for name, tensor in tensors.items())
    with safe_open(tmp_path / "f", "pt") as file:
        assert file.metadata() == {"x": "y"}
    header = read_header(tmp_path / "f")
    assert torch.equal(tensorfiles.read_tensor(tmp_path / "f", header.tensors["t"]), tensors["t"])
    pieces = [(first, piece.clone()) for first, piece in read_pieces(tmp_path / "f", header.tensors["b"], 24)]
    assert [first for first, _ in pieces] == [0, 2, 4]
    assert torch.equal(torch.cat([piece for _, piece in pieces]).view(torch.float32), tensors["b"])
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "f", {}, {})
    for pieces_of in ([torch.ones(2)], [torch.ones(2), torch.ones(2)]):
        with pytest.raises(ValueError, match="bytes"):
            write_tensors(tmp_path / "g", {"x": Stream(torch.float32, (3,), pieces_of)}, {})
        assert not (tmp_path / "g").exists()


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}',
        b'{"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}}',
        b'{"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}, "b": {"dtype": "U8", "shape": [4], '
        b'"data_offsets": [4, 8]}}',
        b'{"a": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}',
    ],
)
def test_headers_that_lie_are_refused(header: bytes, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ConfigError, match=str(tmp_path / "f")):
        read_header(tmp_path / "f")
    (tmp_path / "f").write_bytes(struct.pack("<Q", 1 << 40) + header)
    with pytest.raises(ConfigError, match="no safetensors file, or a truncated one"):
        read_header(tmp_path / "f")


def test_sizes_as_people_write_them() -> None:
    assert [size_in_bytes(text) for text in (7, "5GB", "200 mb", "1.5KiB")] == [7, 5 * 10**9, 2 * 10**8, 1536]
    for text in ("5", "GB", "5XB", 0, -1, True, 1.5):
        with pytest.raises(ConfigError, match="max_shard_size"):
            size_in_bytes(text)  # type: ignore[arg-type]


def test_nothing_that_is_read_is_longer_than_its_header_says(tmp_path: Path) -> None:
    write_tensors(tmp_path / "f", {"rows": Stream.of(torch.ones(4, 2))}, {})
    header = read_header(tmp_path / "f")
    os.truncate(tmp_path / "f", header.size - 3)
    with pytest.raises(RuntimeError, match="ends at byte"):
        list(read_pieces(tmp_path / "f", header.tensors["rows"]))
