"""`engram attach` from the command line: memory trained into a model of a folder, written without it, seen again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from small_corpus import small_texts, write_jsonl

import engram
from engram.cli import main
from engram.train.tokens import train_bpe

OVERRIDES = [
    "steps=12", "memory.rows=500", "memory.heads=2", "memory.head_dim=8", "data.seq_len=16", "data.batch_size=4",
    "data.holdout=0.2", "data.validation_tokens=256", "optimizer.lr=1e-2", "eval_every=0", "checkpoint_every=4",
    "study.gate_tokens=256", "threads=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama, its tokenizer, and texts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("base")
    texts = small_texts(200)
    write_jsonl(folder / "texts.jsonl", texts)
    tokenizer = train_bpe(texts, 300)
    tokenizer.save_pretrained(str(folder / "model"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(str(folder / "model"))
    return folder


def _run(base: Path, *more: str, sets: tuple[str, ...] = ()) -> list[str]:
    changes = [f"data.cache_dir={base / 'cache'}", *OVERRIDES, *sets]
    options = [part for change in changes for part in ("--set", change)]
    config = "configs/attach/memory.yaml"
    return ["attach", str(base / "model"), "--config", config, "--data", str(base / "texts.jsonl"), *options, *more]


def _json(capsys: pytest.CaptureFixture[str], arguments: list[str], status: int = 0) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture(autouse=True)
def _in_the_root(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repo_root)


def test_memory_is_trained_written_without_the_model_and_added_again(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    metrics = _json(capsys, _run(base, "--out", str(tmp_path / "run")))["metrics"]
    assert metrics["loss"] < metrics["loss_without_memory"] - 0.01
    assert metrics["parameters"]["host"] == 0 and metrics["parameters"]["rows"] > 0
    plain = AutoModelForCausalLM.from_pretrained(str(base / "model")).eval()
    ids = torch.randint(0, 300, (1, 9))
    with torch.no_grad():
        without = plain(ids, use_cache=False).logits
        engram.load(plain, tmp_path / "run" / "memory")
        assert not torch.equal(plain(ids, use_cache=False).logits, without)
    found = _json(capsys, ["eval", "loss", str(tmp_path / "run")])
    assert found["nats"] == pytest.approx(metrics["loss"], abs=1e-6)
    checkpoint = (tmp_path / "run" / "checkpoint" / "model.safetensors").stat().st_size
    weights = (base / "model" / "model.safetensors").stat().st_size
    rows = metrics["parameters"]["rows"] * 4
    assert checkpoint < rows + weights / 2, "the frozen model is not in the checkpoint"


def test_an_interrupted_run_goes_on_to_the_same_loss(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from engram.train.loop import Run

    whole = _json(capsys, _run(base, "--out", str(tmp_path / "whole")))["metrics"]["loss"]
    step = Run._one_step

    def dies(run: Run) -> dict[str, Any]:
        if run.step == 7:
            raise RuntimeError("killed")
        return step(run)

    monkeypatch.setattr(Run, "_one_step", dies)
    assert "killed" in _json(capsys, _run(base, "--out", str(tmp_path / "parts")), status=1)["error"]
    monkeypatch.setattr(Run, "_one_step", step)
    error = _json(capsys, _run(base, "--out", str(tmp_path / "parts")), status=2)["error"]
    assert "add --resume" in error
    other = _run(base, "--out", str(tmp_path / "parts"), "--resume", sets=("trainable=all",))
    assert "another trainable" in _json(capsys, other, status=2)["error"]
    assert _json(capsys, _run(base, "--out", str(tmp_path / "parts"), "--resume"))["metrics"]["loss"] == whole


def test_what_will_be_trained_is_shown_without_training(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = _json(capsys, _run(base, "--dry-run", sets=("trainable=memory+norms",)))
    assert plan["memory"]["hidden_size"] == 32 and plan["config"]["data"]["tokenizer"] == str(base / "model")
    assert plan["parameters"]["host"] == 32 * 5 and plan["tokens"] == 12 * 4 * 16


def test_what_cannot_be_is_said(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["attach", str(tmp_path / "none"), *_run(base)[2:]], "model: .* could not be loaded"),
        (_run(base, sets=("memory.layers=[5]",)), r"layers: block 5 does not exist"),
        (_run(base, sets=("data.seq_len=128",)), "seq_len: 128 exceeds the 64 positions"),
        (
            _run(base, sets=("data.tokenizer=bpe", "data.vocab_size=400")),
            "it has .* ids, the model's embedding has 320",
        ),
        (_run(base, sets=("rho=0.5",)), "rho: 0.5 plans a backbone"),
        (_run(base, sets=("memory=null",)), "no `memory` section"),
    ):
        error = _json(capsys, [*arguments, "--out", str(tmp_path / "run")], status=2)["error"]
        assert re.search(message, error), error
