"""The training loop: a golden loss curve, resume bit for bit, interruption, and every error before anything is lost."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import engram.optim
from engram.eval.report import read_result
from engram.strict import ConfigError, from_dict
from engram.train import loop, snapshots
from engram.train.evaluate import open_run
from engram.train.evaluate import run as evaluate
from engram.train.loop import Interrupted, train_run
from engram.train.quantize import convert_run
from engram.train.recipe import OptimizerConfig, TrainConfig, changed_fields

STEPS = 10


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A text with n-gram structure that is the same on every machine, and a cache for its tokens."""
    folder = tmp_path_factory.mktemp("text")
    words = [f"{a}{b}" for a in ("ka", "lo", "mi", "su", "te") for b in ("n", "r", "st", "ve", "x")]
    draw = random.Random(7)
    follows = {word: draw.sample(words, 4) for word in words}
    lines = []
    for _ in range(400):
        line = [draw.choice(words)]
        while len(line) < 40:
            line.append(draw.choice(follows[line[-1]]))
        lines.append(json.dumps({"text": " ".join(line)}))
    path = folder / "text.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return {
        "source": str(path), "vocab_size": 300, "seq_len": 32, "batch_size": 4, "validation_tokens": 1024,
        "cache_dir": str(folder / "cache"),
    }  # fmt: skip


@pytest.fixture
def recipe(data: dict[str, Any]) -> dict[str, Any]:
    """The smallest run with everything in it: mixture of experts, memory, accumulation."""
    return {
        "name": "tiny",
        "seed": 3,
        "steps": STEPS,
        "accumulate": 2,
        "rho": 0.5,
        "data": data,
        "backbone": {
            "hidden_size": 16, "blocks": 2, "heads": 2, "ffn_width": 96, "experts": 6, "expert_width": 16,
            "max_position": 32,
        },
        "memory": {"layers": [1], "heads": 1, "head_dim": 8},
        "optimizer": {"lr": 1e-2},
        "study": {"lens_tokens": 128, "gate_tokens": 128},
        "log_every": 1,
        "eval_every": 5,
        "device": "cpu",
        "threads": 1,
    }  # fmt: skip


def _config(recipe: dict[str, Any], **changes: Any) -> TrainConfig:
    return from_dict(TrainConfig, {**recipe, **changes})


def _losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return snapshots._load_tensors(folder / "checkpoint" / "model.safetensors")


GOLDEN = [5.70411, 5.5982, 5.43517, 5.24607, 5.06105, 4.89488, 4.7875, 4.66486, 4.60172, 4.56982]


def test_the_loss_curve_is_golden(recipe: dict[str, Any], tmp_path: Path) -> None:
    result = train_run(_config(recipe), tmp_path, quiet=True)
    assert _losses(tmp_path) == pytest.approx(GOLDEN, rel=1e-3)
    assert result == read_result(tmp_path / "result.json")
    metrics = result["metrics"]
    assert metrics["loss"] == pytest.approx(metrics["validation"][-1][1])
    assert metrics["baselines"]["trigram"] < metrics["baselines"]["bigram"] < metrics["baselines"]["unigram"]
    assert metrics["tags"] == ["short-training"] and metrics["memory_layers"] == [1]
    assert len(metrics["lens"]["kl"]) == 3 and metrics["rows_touched"]["1"][0] > 0
    assert metrics["tokens"] == STEPS * 2 * 4 * 32 and metrics["budget"]["achieved_rho"] == pytest.approx(0.5, abs=0.02)
    kinds = {path.suffix for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}
    assert kinds <= {".json", ".jsonl", ".safetensors", ".jinja"}, "plain data only, nothing that is unpickled"


@pytest.mark.parametrize("stop", ["kill", "ctrl-c"])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    stop: str, recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = _config(recipe, checkpoint_every=5)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = train_run(cfg, whole, quiet=True)
    after_step = loop.Run._after_step

    def interrupt(self: loop.Run, *args: Any) -> None:
        after_step(self, *args)
        if self.step == 7:
            if stop == "kill":  # nothing of steps 6 and 7 is saved
                raise MemoryError("killed")
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(loop.Run, "_after_step", interrupt)
    with pytest.raises(MemoryError if stop == "kill" else Interrupted) as stopped:
        train_run(cfg, parts, quiet=True)
    if stop == "ctrl-c":
        assert "stopped at step 7" in str(stopped.value) and "--resume" in str(stopped.value)
    monkeypatch.undo()
    saved = snapshots.read_state(parts)
    assert saved is not None and saved["step"] == (5 if stop == "kill" else 7)
    torch.manual_seed(99)  # whatever happened in between must not matter
    random.seed(99)
    with pytest.raises(ConfigError, match="--resume"):
        train_run(cfg, parts, quiet=True)
    resumed = train_run(cfg, parts, resume=True, quiet=True)
    assert _losses(parts) == _losses(whole)
    ours, theirs = _weights(parts), _weights(whole)
    assert ours.keys() == theirs.keys() and any("table.store.rows" in name for name in ours)
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    for name in ("loss", "consumed_sha256", "lens", "rows_touched", "curve", "baselines"):
        assert resumed["metrics"][name] == expected["metrics"][name], name


@pytest.mark.parametrize(("placement", "decay"), [("host", "touched"), ("disk", "touched"), ("disk", "global")])
def test_rows_elsewhere_train_and_resume_like_rows_on_the_device(
    placement: str, decay: str, recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next batch is prefetched all the time: a checkpoint is taken while a fetch is under way."""
    device, host = tmp_path / "device", tmp_path / "host"
    recipe["optimizer"].update(row_weight_decay=2.0 if decay == "global" else 0.0, row_decay=decay)
    expected = train_run(_config(recipe, checkpoint_every=4), device, quiet=True)
    elsewhere = {"placement": placement, "path": str(tmp_path / "rows") if placement == "disk" else None}
    cfg = _config(recipe, memory={**recipe["memory"], **elsewhere}, checkpoint_every=4)
    after_step = loop.Run._after_step

    def interrupt(self: loop.Run, *args: Any) -> None:
        after_step(self, *args)
        if self.step == 6:
            raise MemoryError("killed")

    monkeypatch.setattr(loop.Run, "_after_step", interrupt)
    with pytest.raises(MemoryError):
        train_run(cfg, host, quiet=True)
    monkeypatch.undo()
    found = train_run(cfg, host, resume=True, quiet=True)
    assert _losses(host) == _losses(device)
    ours, theirs = _weights(host), _weights(device)
    assert theirs.keys() - ours.keys() <= {"engram.layers.1.table.store.rows"}
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    if placement == "disk":
        _, _, built, _ = open_run(str(host))
        assert built.handle is not None
        rows, table = theirs["engram.layers.1.table.store.rows"], built.handle.memory.layer(1).table
        assert torch.equal(table.stored(torch.arange(len(rows))), rows)
        assert (table.scale < 0.9) == (decay == "global")
        with pytest.raises(ConfigError, match="rows of an earlier run"):
            train_run(cfg, tmp_path / "another", quiet=True)
    assert found["metrics"]["loss"] == expected["metrics"]["loss"]
    fetch = found["metrics"]["fetch"]["1"]
    assert fetch["store"] == placement and fetch["ahead"] > 0 and fetch["patched_rows"] > 0


def test_a_finished_run_is_resumed_without_training(recipe: dict[str, Any], tmp_path: Path) -> None:
    cfg = _config(recipe)
    first = train_run(cfg, tmp_path, quiet=True)
    again = train_run(cfg, tmp_path, resume=True, quiet=True)
    assert again["metrics"]["loss"] == first["metrics"]["loss"] and len(_losses(tmp_path)) == STEPS


def test_a_checkpoint_of_another_configuration_is_refused(recipe: dict[str, Any], tmp_path: Path) -> None:
    train_run(_config(recipe), tmp_path, quiet=True)
    before = (tmp_path / "checkpoint" / "state.json").read_bytes()
    with pytest.raises(ConfigError, match="another seed"):
        train_run(_config(recipe, seed=4), tmp_path, resume=True, quiet=True)
    with pytest.raises(ConfigError, match="another memory"):
        train_run(_config(recipe, memory={"layers": [0], "heads": 1, "head_dim": 8}), tmp_path, resume=True, quiet=True)
    assert (tmp_path / "checkpoint" / "state.json").read_bytes() == before


def test_a_field_that_a_saved_configuration_does_not_have_is_no_change(recipe: dict[str, Any]) -> None:
    saved = _config(recipe).to_dict()
    del saved["optimizer"]["row_decay"], saved["wandb"], saved["precision"]
    assert changed_fields(_config(recipe), saved) == []
    decayed = _config(recipe, optimizer={**recipe["optimizer"], "row_decay": "global"}, precision="fp32")
    assert changed_fields(decayed, saved) == ["optimizer", "precision"]


def test_the_last_good_checkpoint_survives_a_failing_write(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file, calls = snapshots.save_file, []

    def full_disk(tensors: Any, path: Path) -> None:
        calls.append(path)
        if len(calls) == 5:  # the optimizer state of the second checkpoint
            raise OSError(28, "No space left on device")
        save_file(tensors, path)

    monkeypatch.setattr(snapshots, "save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        train_run(_config(recipe, checkpoint_every=3), tmp_path, quiet=True)
    monkeypatch.undo()
    state = snapshots.read_state(tmp_path)
    assert state is not None and state["step"] == 3
    assert train_run(_config(recipe), tmp_path, resume=True, quiet=True)["metrics"]["tokens"] == STEPS * 256


def test_a_kill_between_the_two_renames_loses_nothing(recipe: dict[str, Any], tmp_path: Path) -> None:
    train_run(_config(recipe), tmp_path, quiet=True)
    (tmp_path / "checkpoint").rename(tmp_path / "checkpoint.old")
    state = snapshots.read_state(tmp_path)
    assert state is not None and state["step"] == STEPS
    _, _, built, _ = open_run(str(tmp_path))
    assert built.handle is not None
    shutil.rmtree(tmp_path / "checkpoint.old")
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        open_run(str(tmp_path))


def test_a_damaged_checkpoint_is_an_error(recipe: dict[str, Any], tmp_path: Path) -> None:
    train_run(_config(recipe), tmp_path, quiet=True)
    weights = tmp_path / "checkpoint" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ConfigError, match=r"checkpoint.*does not fit"):
        train_run(_config(recipe), tmp_path, resume=True, quiet=True)


def test_an_unusable_folder_is_found_before_training(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr(loop.Run, "go", lambda *_: pytest.fail("training began"))
    with pytest.raises(ConfigError, match="cannot be written"):
        train_run(_config(recipe), tmp_path / "file" / "run", quiet=True)
    monkeypatch.setattr(loop.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match="1,000 bytes free, two checkpoints of this run need"):
        train_run(_config(recipe), tmp_path / "run", quiet=True)


def test_more_steps_than_data_is_an_error(recipe: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"steps: 100000 .* data.epochs"):
        train_run(_config(recipe, steps=100_000), tmp_path, quiet=True)


def test_a_diverged_loss_stops_the_run(recipe: dict[str, Any], tmp_path: Path) -> None:
    wild = {"lr": 1e30, "clip": 0, "schedule": "constant", "warmup": 0}
    with pytest.raises(loop.Diverged, match="lower optimizer.lr"):
        train_run(_config(recipe, optimizer=wild), tmp_path, quiet=True)


def test_a_run_that_diverges_in_its_last_step_has_no_result(recipe: dict[str, Any], tmp_path: Path) -> None:
    wild = {"lr": 1e30, "clip": 0, "schedule": "constant", "warmup": 0}
    with pytest.raises(loop.Diverged, match="held-out loss: nan at step"):
        train_run(_config(recipe, optimizer=wild, steps=1), tmp_path, quiet=True)
    assert not (tmp_path / "result.json").exists() and not (tmp_path / "checkpoint").exists()


def test_one_process_trains_in_a_folder(recipe: dict[str, Any], tmp_path: Path) -> None:
    with loop.only_one(tmp_path), pytest.raises(ConfigError, match="another process is training"):
        train_run(_config(recipe), tmp_path, quiet=True)
    train_run(_config(recipe), tmp_path, quiet=True)


def test_two_kills_while_a_checkpoint_is_exchanged_lose_nothing(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_run(_config(recipe), tmp_path, quiet=True)
    (tmp_path / "checkpoint").rename(tmp_path / "checkpoint.old")  # the first kill, between the renames
    _, _, built, _ = open_run(str(tmp_path))
    monkeypatch.setattr(snapshots, "save_file", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):  # the second, while the next is written
        snapshots.save(tmp_path, built.model, engram.optim.build(built.model), {"step": 11})
    state = snapshots.read_state(tmp_path)
    assert state is not None and state["step"] == STEPS
    (tmp_path / "checkpoint" / "model.safetensors").unlink()
    assert snapshots.find(tmp_path) is None, "a part of a checkpoint is none"


def test_a_run_is_evaluated_without_its_source(recipe: dict[str, Any], tmp_path: Path, data: dict[str, Any]) -> None:
    metrics = train_run(_config(recipe), tmp_path, quiet=True)["metrics"]
    moved = Path(data["source"]).with_suffix(".moved")
    Path(data["source"]).rename(moved)
    try:
        assert evaluate("loss", str(tmp_path))["nats"] == pytest.approx(metrics["loss"], rel=1e-6)
    finally:
        moved.rename(data["source"])


def test_the_dry_run_counts_the_bytes_of_its_placement(recipe: dict[str, Any]) -> None:
    placed = {**recipe["memory"], "placement": "host", "row_dtype": "bf16"}
    plan = loop.dry(_config(recipe, memory=placed, optimizer={"row_rule": "adam"}))
    rows = plan["arm"]["parameters"]["table"] // 8
    assert plan["bytes"] == {"host": rows * 16, "host, optimizer state": rows * 64}


def test_wandb_is_used_when_asked_and_its_failure_never_stops_a_run(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[dict[str, Any]] = []

    class Broken:
        def log(self, line: dict[str, Any], step: int) -> None:
            seen.append(line)
            if len(seen) == 3:
                raise ConnectionError("offline")

        def finish(self, exit_code: int) -> None:
            raise AssertionError("not called once it has failed")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **_: Broken()))
    train_run(_config(recipe), tmp_path / "plain", quiet=True)
    assert not seen
    train_run(_config(recipe, wandb="project"), tmp_path / "tracked", quiet=True)
    assert len(seen) == 3 and len(_losses(tmp_path / "tracked")) == STEPS
    assert "the run goes on" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "wandb", None)
    train_run(_config(recipe, wandb="project"), tmp_path / "missing", quiet=True)


def test_a_dense_backbone_with_memory_on_top(recipe: dict[str, Any], tmp_path: Path) -> None:
    dense = {"kind": "dense", "hidden_size": 16, "blocks": 2, "heads": 2, "ffn_width": 32, "max_position": 32}
    cfg = _config(
        recipe, rho=None, backbone=dense, memory={**recipe["memory"], "rows": 50, "compress": True}, accumulate=1
    )
    metrics = train_run(cfg, tmp_path, quiet=True)["metrics"]
    assert metrics["budget"]["mode"] == "on_top" and metrics["routing"] == {}
    _, corpus, built, _ = open_run(str(tmp_path))
    assert built.handle is not None and built.handle.memory.token_map is not None
    assert len(built.handle.memory.token_map) == corpus.vocab_size


def test_evaluating_a_run_again_gives_its_own_numbers(recipe: dict[str, Any], tmp_path: Path) -> None:
    metrics = train_run(_config(recipe), tmp_path, quiet=True)["metrics"]
    assert evaluate("loss", str(tmp_path))["nats"] == pytest.approx(metrics["loss"], rel=1e-6)
    assert evaluate("lens", str(tmp_path))["kl"] == pytest.approx(metrics["lens"]["kl"], rel=1e-4, abs=1e-7)
    gates = evaluate("gates", str(tmp_path), text="kan lor kan")
    assert "".join(gates["sample"]["tokens"]) == "kan lor kan"
    rows = evaluate("rows", str(tmp_path), out=str(tmp_path / "rows.json"))
    assert rows["usage"] and (tmp_path / "rows.json").is_file() and (tmp_path / "eval-gates.json").is_file()
    with pytest.raises(ConfigError, match="holds no run"):
        evaluate("loss", str(tmp_path / "nothing"))


def test_quantised_rows_are_read_from_their_file_and_cost_what_is_reported(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    memory = {**recipe["memory"], "head_dim": 32, "rows": 50}
    recipe["optimizer"].update(row_weight_decay=2.0, row_decay="global")  # the files hold stored rows, less the scale
    metrics = train_run(_config(recipe, rho=None, memory=memory), tmp_path, quiet=True)["metrics"]
    reports = {name: convert_run(str(tmp_path), name) for name in ("fp32", "bf16", "fp8_e4m3", "int8", "lut3")}
    assert reports["fp32"]["difference"] == 0.0 and reports["fp32"]["layers"]["1"]["error"]["q100"] == 0.0
    errors = [reports[name]["layers"]["1"]["error"]["q50"] for name in ("bf16", "int8", "fp8_e4m3", "lut3")]
    assert errors == sorted(errors) and 0 < errors[0] < 0.01 < errors[-1] < 0.4
    for report in reports.values():
        assert report["loss_before"] == pytest.approx(metrics["loss"], rel=1e-6)
        assert (
            report["layers"]["1"]["bytes_after"] == report["layers"]["1"]["rows"] * report["layers"]["1"]["row_bytes"]
        )
    assert 0 < abs(reports["lut3"]["difference"]) < 0.5
    assert (tmp_path / "lut3" / "quantized.json").is_file()
    with pytest.raises(ConfigError, match="exists; choose another folder"):
        convert_run(str(tmp_path), "lut3")
    with pytest.raises(ConfigError, match="format: 'fp4'"):
        convert_run(str(tmp_path), "fp4")


def test_a_run_without_memory_has_no_gates(recipe: dict[str, Any], tmp_path: Path) -> None:
    metrics = train_run(_config(recipe, rho=1.0), tmp_path, quiet=True)["metrics"]
    assert "gates" not in metrics and metrics["budget"]["memory"] is None
    with pytest.raises(ConfigError, match="has no memory"):
        evaluate("gates", str(tmp_path))


def test_memory_that_never_learns_stops_the_run(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = loop.engram.optim.build

    def without_rows(model: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = build(model, *args, **kwargs)
        optimizer.param_groups[:] = [g for g in optimizer.param_groups if g["name"] != "rows"]
        return optimizer

    monkeypatch.setattr(loop.engram.optim, "build", without_rows)
    with pytest.raises(RuntimeError, match="not been updated by any training step"):
        train_run(_config(recipe), tmp_path, quiet=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stepz": 3}, "stepz: unknown key"),
        ({"optimizer": {"lr": -1}}, "optimizer.lr: -1.0 must be greater than 0"),
        ({"optimizer": {"schedule": "cosin"}}, "optimizer.schedule: 'cosin'"),
        ({"memory": {"layers": [2]}}, "memory.layers: block 2"),
        ({"memory": {"head": 2}}, "memory.head: unknown key"),
        ({"memory": None}, "rho: below 1"),
        ({"rho": 0.4}, "inactive experts"),
        ({"backbone": {"hidden_size": 30, "heads": 4}}, "heads: 4 does not divide hidden_size 30"),
        ({"steps": 0}, "steps: 0"),
        ({"data": {"seq_len": 2048}}, "seq_len: 2048 exceeds"),
    ],
)
def test_bad_configurations_name_field_value_and_remedy(
    changes: dict[str, Any], message: str, recipe: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as error:
        _config(recipe, **changes).arm(300)
    assert message in str(error.value)


def test_schedules() -> None:
    cosine = OptimizerConfig(warmup=0.1, final_lr=0.1)
    factors = [cosine.factor(step, 100) for step in range(100)]
    assert factors[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert factors[10] == 1.0 and factors[55] == pytest.approx(0.55) and 0.1 < factors[99] < 0.102
    assert OptimizerConfig(schedule="constant", warmup=0).factor(70, 100) == 1.0
    assert OptimizerConfig(schedule="linear", warmup=0, final_lr=0).factor(75, 100) == pytest.approx(0.25)
