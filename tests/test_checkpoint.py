"""Saving and loading: bit-equal through every store and format, read by transformers and safetensors."""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from saved_memory import CFG, VOCAB, TinyModel, assert_same_rows, changed, logits, placed, rows_of, save_small, some_ids

import engram
import engram.optim
from engram.checkpoint import fill, find_memory, load
from engram.config import ConfigError, EngramConfig
from engram.memory import Memory
from engram.saving import save
from engram.stores import TableSpec
from engram.stores.formats import FORMATS

PLACEMENTS = ("device", "host", "pinned", "disk")


@pytest.fixture
def saved(tiny_model: TinyModel, tmp_path: Path) -> Path:
    return save_small(tiny_model, tmp_path)


@pytest.mark.parametrize("row_dtype", list(FORMATS))
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_logits_and_rows_come_back_bit_for_bit(
    placement: str, row_dtype: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    kind = "gpt2" if placement in ("host", "disk") else "llama"
    model, ids = tiny_model(kind), some_ids()
    cfg = placed(CFG.replace(row_dtype=row_dtype), placement, tmp_path / "rows")
    handle = changed(engram.attach(model, cfg))
    expected, base = logits(model, ids), logits(tiny_model(kind), ids)
    handle.save_pretrained(tmp_path / "saved", max_shard_size=5_000)
    assert len(list((tmp_path / "saved").glob("rows-layer-0-*"))) > 1, "the test wants several shards"
    assert str(tmp_path) not in (tmp_path / "saved" / "engram.json").read_text(encoding="utf-8")
    fresh = tiny_model(kind)
    there = load(fresh, tmp_path / "saved", path=tmp_path / "other" if placement == "disk" else None)
    assert there.memory.cfg == placed(cfg, placement, tmp_path / "other")
    assert torch.equal(logits(fresh, ids), expected) and not torch.equal(expected, base)
    assert_same_rows(handle.memory, there.memory)
    assert torch.equal(logits(there.detach(), ids), base)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_rows_may_move_to_another_store(placement: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    handle = changed(engram.attach(tiny_model("llama"), CFG.replace(row_dtype="bf16")))
    handle.save_pretrained(tmp_path / "saved")
    path = tmp_path / "rows" if placement == "disk" else None
    there = load(tiny_model("llama"), tmp_path / "saved", placement=placement, path=path)
    assert_same_rows(handle.memory, there.memory)
    there.memory.close()
    if path is not None:  # a file goes back to its last checkpoint when it is opened
        again = engram.attach(tiny_model("llama"), placed(CFG.replace(row_dtype="bf16"), "disk", path))
        assert_same_rows(handle.memory, again.memory)


@pytest.mark.parametrize("placement", ["device", "host", "pinned"])
def test_loading_makes_no_initial_values_that_it_would_overwrite(
    placement: str, saved: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def initial(*args: Any) -> Any:
        raise AssertionError("initial values were asked for")

    monkeypatch.setattr(TableSpec, "initial", initial)
    load(tiny_model("llama"), saved, placement=placement)
    with pytest.raises(AssertionError, match="initial values"):
        engram.attach(tiny_model("llama"), CFG)


def test_safetensors_reads_the_same_rows(saved: Path, tiny_model: TinyModel) -> None:
    handle = load(tiny_model("llama"), saved)
    shards = sorted(saved.glob("rows-layer-1-*.safetensors"))
    rows = torch.cat([load_file(shard)["rows"] for shard in shards])
    assert len(shards) == 2 and torch.equal(rows, rows_of(handle.memory)[1])
    dense = load_file(saved / "memory.safetensors")
    assert torch.equal(dense["layers.0.value.weight"], handle.memory.state_dict()["layers.0.value.weight"])
    assert dense["layers.0.hash.multipliers"].dtype == torch.int64


def test_decayed_rows_come_back_as_they_were_read(tiny_model: TinyModel, tmp_path: Path) -> None:
    model, ids = tiny_model("llama").train(), some_ids()
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
    assert_same_rows(handle.memory, there.memory)


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
    assert_same_rows(first, second)
    with pytest.raises(ConfigError, match="another hash"):
        fill(Memory(CFG, VOCAB + 1), tmp_path)


def test_a_sparse_table_stays_sparse(tmp_path: Path) -> None:
    cfg = EngramConfig(hidden_size=8, layers=(0,), heads=1, orders=(2,), head_dim=64, rows=400_000)
    memory = Memory(placed(cfg, "disk", tmp_path / "rows"), VOCAB)
    memory.layer(0).table.write(torch.tensor([300_000]), torch.ones(1, 64))
    save(memory, tmp_path / "saved")
    shard = next((tmp_path / "saved").glob("rows-*"))
    assert shard.stat().st_size > 100e6 and shard.stat().st_blocks * 512 < 20e6
    other = Memory(placed(cfg, "disk", tmp_path / "other"), VOCAB)
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


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_saved_model_is_the_plain_base_with_the_memory_beside_it(
    kind: str, tied: bool, tiny_model: TinyModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = tiny_model(kind, tie_word_embeddings=tied), some_ids()
    base = logits(model, ids)
    handle = changed(engram.attach(model, CFG))
    expected = logits(model, ids)
    model.save_pretrained(tmp_path)
    assert list(model.state_dict())[-1].startswith("engram.") and model.engram is handle.memory
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert not [name for name in file.keys() if name.startswith("engram")]  # noqa: SIM118
    transformers.utils.logging.enable_propagation()
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    transformers.utils.logging.disable_propagation()
    plain, info = loaded
    assert not any(info[name] for name in info) and not caplog.records
    assert torch.equal(logits(plain.eval(), ids), base)
    assert not hasattr(plain, "engram")
    load(plain, tmp_path)
    assert torch.equal(logits(plain, ids), expected)
    both, there = engram.from_pretrained(tmp_path, device_map="auto", low_cpu_mem_usage=True)
    assert torch.equal(logits(both.eval(), ids), expected) and there.model is both
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
    assert torch.equal(rows_of(load(tiny_model("llama"), tmp_path).memory)[0][7], torch.full((8,), 3.0))


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
    model, ids = tiny_model("llama").to(dtype), some_ids()
    handle = changed(engram.attach(model, CFG))
    expected = logits(model, ids)
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
    assert torch.equal(logits(fresh, ids), expected)
    assert_same_rows(handle.memory, there.memory)
    # a memory that was itself on the meta device, over memory full of junk
    with torch.device("meta"):
        memory = Memory(CFG, VOCAB)
    with pytest.raises(ConfigError, match="lie on the meta device"):
        save(memory, tmp_path / "meta")
    assert not (tmp_path / "meta").exists()
    memory.to_empty(device="cpu")
    fill(memory, tmp_path)
    assert_same_rows(handle.memory, memory)


def test_a_trainer_saves_both_and_a_run_goes_on_from_there(tiny_model: TinyModel, tmp_path: Path) -> None:
    texts, ids = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, VOCAB, (8, 12))], some_ids()

    def trained(resume: Path | None = None) -> engram.Handle:
        model = tiny_model("llama")
        handle = engram.attach(model, CFG.replace(init="zeros"))
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=4, save_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to=[]
        )
        both: Any = (engram.optim.build(model, lr=1e-2), None)
        trainer = transformers.Trainer(model, arguments, train_dataset=texts, optimizers=both)  # type: ignore[arg-type]
        if resume is not None:
            fill(handle.memory, resume)
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        model.eval()
        return handle

    handle = trained()
    expected = logits(handle.model, ids)
    assert torch.equal(logits(engram.from_pretrained(tmp_path / "checkpoint-4").model.eval(), ids), expected)
    again = trained(resume=tmp_path / "checkpoint-2")
    assert_same_rows(handle.memory, again.memory)
    assert torch.equal(logits(again.model, ids), expected), "as if it had never been interrupted"


PARTS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")


@pytest.mark.parametrize("away", [("model.layers.1",), PARTS])
def test_bases_whose_weights_are_fetched_when_they_run(away: Any, tiny_model: TinyModel, tmp_path: Path) -> None:
    model, ids = tiny_model("llama"), some_ids()
    changed(engram.attach(model, CFG))
    expected = logits(model, ids)
    model.save_pretrained(tmp_path / "saved")
    spread = {"": "disk"} if away == PARTS else {part: "disk" if part in away else "cpu" for part in PARTS}
    both = engram.from_pretrained(tmp_path / "saved", device_map=spread, offload_folder=str(tmp_path / "away"))
    assert any(parameter.is_meta for parameter in both.model.parameters())
    assert torch.equal(logits(both.model.eval(), ids), expected)
    both.model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(engram.from_pretrained(tmp_path / "again").model.eval(), ids), expected)
