"""Studies: pairing by seed, skipping, resuming, failures recorded; and the quickstart as a user runs it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from engram.cli import main
from engram.eval.report import read_result
from engram.strict import ConfigError, from_dict, load_yaml, merge
from engram.train import ablate
from engram.train.ablate import AblationConfig, run_study, study_table, summarise
from engram.train.evaluate import open_run
from engram.train.quickstart import rebuild_report

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
TOY = {
    "steps": 6,
    "data": {"max_characters": 200_000, "tokenizer_characters": 100_000, "vocab_size": 300, "validation_tokens": 512},
    "log_every": 2,
    "eval_every": 2,
    "study": {"lens_tokens": 128, "gate_tokens": 128},
}


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGRAM_CACHE", str(tmp_path_factory.getbasetemp() / "engram-cache"))


def _study(**changes: Any) -> AblationConfig:
    data = load_yaml(CONFIGS / "ablations" / "smoke.yaml")
    return from_dict(AblationConfig, merge(merge(data, {"run": TOY}), changes))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[AblationConfig, Path, dict[str, Any]]:
    """The smoke grid, two arms by two seeds, done once in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENGRAM_CACHE", str(tmp_path_factory.getbasetemp() / "engram-cache"))
        study, out = _study(), tmp_path_factory.mktemp("study")
        return study, out, run_study(study, out, workers=0, quiet=True)


def test_the_smoke_grid_leaves_results_table_and_figures(
    finished: tuple[AblationConfig, Path, dict[str, Any]],
) -> None:
    study, out, summary = finished
    for name in (
        "report.html",
        "table.md",
        "summary.json",
        "differences.png",
        "kl_by_depth.png",
        "loss.png",
        "gates.png",
    ):
        assert (out / name).stat().st_size > 200, name
    assert set(summary["arms"]) == {"rho=1.0", "rho=0.5"} and not summary["failed"] and not summary["missing"]
    arm = summary["arms"]["rho=0.5"]
    losses = {
        name: [read_result(out / name / f"seed-{seed}" / "result.json")["metrics"]["loss"] for seed in study.seeds]
        for name in ("rho=1.0", "rho=0.5")
    }
    differences = [a - b for a, b in zip(losses["rho=0.5"], losses["rho=1.0"], strict=True)]
    assert arm["difference"]["mean"] == pytest.approx(sum(differences) / 2) and arm["difference"]["n"] == 2
    # t quantile of one degree of freedom, 12.706, times the standard error of two values
    assert arm["difference"]["half"] == pytest.approx(12.7062 * abs(differences[0] - differences[1]) / 2, rel=1e-4)
    assert arm["loss_at_equal_time"]["n"] == 2 and len(arm["lens_kl"]) == 2
    assert "2 paired seeds" in summary["verdict"]
    columns, rows = study_table(summary)
    assert [row[:2] for row in rows] == [["rho=1.0", "2"], ["rho=0.5", "2"]]
    assert rows[1][3].startswith(f"{arm['difference']['mean']:+.4f} [") and "equal time" in columns[4]
    assert " | ".join(rows[1]) in (out / "table.md").read_text(encoding="utf-8")


def test_every_arm_of_a_seed_sees_the_same_data_and_starts_equal(
    finished: tuple[AblationConfig, Path, dict[str, Any]],
) -> None:
    _, out, _ = finished
    results = {p: read_result(p)["metrics"] for p in out.rglob("result.json")}
    by_seed: dict[str, set[str]] = {}
    for path, metrics in results.items():
        by_seed.setdefault(path.parent.name, set()).add(metrics["consumed_sha256"])
    assert [len(digests) for digests in by_seed.values()] == [1, 1] and by_seed["seed-0"] != by_seed["seed-1"]
    totals = {metrics["parameters"]["total"] for metrics in results.values()}
    assert max(totals) / min(totals) < 1.005
    config = from_dict(ablate.TrainConfig, read_result(next(iter(results)))["config"])
    models = [
        ablate_model(merge(config.to_dict(), {"rho": rho, "seed": 0}), config.data.vocab_size) for rho in (1.0, 0.5)
    ]
    shared = [name for name in models[0] if name in models[1] and models[0][name].shape == models[1][name].shape]
    assert len(shared) > 10 and all((models[0][name] == models[1][name]).all() for name in shared)


def ablate_model(data: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    from engram.train.assembly import assemble

    return dict(assemble(from_dict(ablate.TrainConfig, data), vocab_size).model.named_parameters())


def test_finished_runs_are_skipped_and_another_configuration_is_refused(
    finished: tuple[AblationConfig, Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    study, out, summary = finished
    monkeypatch.setattr(ablate, "train_run", lambda *_, **__: pytest.fail("trained again"))
    assert run_study(study, out, workers=0, quiet=True)["arms"] == summary["arms"]
    with pytest.raises(ConfigError, match=r"another configuration \(steps\)"):
        run_study(_study(run={"steps": 7}), out, workers=0, quiet=True)


def test_an_arm_that_cannot_be_built_stops_the_study_before_it_trains(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="inactive experts"):
        run_study(_study(grid={"rho": [1.0, 0.33]}), tmp_path, workers=0, quiet=True)
    assert not list(tmp_path.rglob("log.jsonl"))


def test_a_report_shows_the_runs_of_its_study_alone(
    finished: tuple[AblationConfig, Path, dict[str, Any]], tmp_path: Path
) -> None:
    _, out, _ = finished
    copy = tmp_path / "study"
    shutil.copytree(out, copy)
    shutil.copytree(copy / "rho=0.5" / "seed-0", copy / "an earlier arm" / "seed-0")
    study = (copy / "study.yaml").read_text().replace("- 0\n- 1\n", "- 1\n")
    (copy / "study.yaml").write_text(study)
    assert rebuild_report(str(copy))["verdict"].startswith("one seed, no verdict")


def test_a_failing_run_is_recorded_and_the_rest_goes_on(tmp_path: Path) -> None:
    wild = ("rho=1.0", "optimizer.lr=1e30", "optimizer.clip=0", "optimizer.warmup=0", "optimizer.schedule=constant")
    study = _study(grid={"rho": [1.0]}, arms={"wild": wild}, seeds=[0], run={"steps": 12})
    summary = run_study(study, tmp_path, workers=0, quiet=True)
    assert list(summary["failed"]) == ["wild/seed-0"] and "lower optimizer.lr" in summary["failed"]["wild/seed-0"]
    assert summary["missing"] == ["wild/seed-0"] and summary["arms"]["wild"]["loss"] is None
    assert summary["arms"]["rho=1.0"]["loss"]["n"] == 1
    assert "traceback" in json.loads((tmp_path / "wild" / "seed-0" / "failed.json").read_text())


def test_a_study_without_a_finished_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no run of smoke-allocation is finished"):
        summarise(_study(), tmp_path, {})


def test_grids_of_several_keys_and_named_arms() -> None:
    study = _study(grid={"rho": [1.0, 0.5], "memory.heads": [1, 2]}, arms={"no gate": ("memory.gate=none", "rho=0.5")})
    names = [name for name, _ in study.overrides()]
    assert names[:2] == ["rho=1.0, memory.heads=1", "rho=1.0, memory.heads=2"] and names[-1] == "no gate"
    runs = study.runs()
    assert len(runs) == 10 and len({run.folder for run in runs}) == 10
    last = runs[-1].config
    assert last.memory is not None and last.memory["gate"] == "none" and last.seed == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": []}, "seeds: at least one"),
        ({"seeds": [1, 1]}, "names a seed twice"),
        ({"grid": {"rho": []}}, "grid.rho: needs at least one value"),
        ({"baseline": "rho=2"}, "baseline: 'rho=2' is none of"),
        ({"gird": {}}, "gird: unknown key"),
        ({"arms": {"a b": ["rho=1.0"], "a_b": ["rho=0.5"]}}, "shares its folder"),
        ({"grid": {"rho": [0.5, 0.50]}}, "shares its folder"),
        ({"arms": {"x": ["seed=7"]}}, "sets seed or name"),
    ],
)
def test_bad_studies_name_field_value_and_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _study(**changes)


def test_an_arm_that_cannot_be_planned_is_found_by_the_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(CONFIGS / "ablations" / "smoke.yaml")
    assert main(["ablate", path, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["runs"] == 4 and set(plan["arms"]) == {"rho=1.0", "rho=0.5"}
    assert main(["ablate", path, "--dry-run", "--set", "grid.rho=[1.0, 0.33]"]) == 2
    assert "inactive experts" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted((CONFIGS / "ablations").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_study_can_be_planned(path: Path) -> None:
    study = from_dict(AblationConfig, load_yaml(path))
    arms = {run.arm: run.config.arm(run.config.data.vocab_size) for run in study.runs()}
    for arm in arms.values():
        assert abs(arm.total_off) < 0.005 and abs(arm.flops_off) < 0.005


@pytest.mark.parametrize("path", sorted((CONFIGS / "runs").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_run_can_be_planned(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(path), "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["config"]["name"] and plan["arm"]["parameters"]["total"] > 0


def test_a_report_is_rebuilt_from_the_files_alone(
    finished: tuple[AblationConfig, Path, dict[str, Any]], tmp_path: Path
) -> None:
    _, out, _ = finished
    (out / "report.html").unlink()
    found = rebuild_report(str(out))
    assert Path(found["report"]).is_file() and "gates" in found["figures"]
    with pytest.raises(ConfigError, match="holds no result.json"):
        rebuild_report(str(tmp_path))


@pytest.mark.slow
def test_the_quickstart_at_a_toy_size_through_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "quickstart"
    assert main(["quickstart", "--toy", "--out", str(out), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["verdict"].startswith("one seed, no verdict") and set(printed["arms"]) == {
        "mixture of experts",
        "with memory",
    }
    page = (out / "report.html").read_text(encoding="utf-8")
    for words in ("one seed, no verdict", "Where the rows came from", "Gate values", "KL divergence"):
        assert words in page
    assert "http://" not in page and "https://" not in page, "the report makes no request"
    for name in ("loss", "kl_by_depth", "loss_by_depth", "gates"):
        assert (out / f"{name}.png").is_file()
    _, _, built, _ = open_run(str(out / "with_memory" / "seed-0"))
    assert built.handle is not None


@pytest.mark.slow
def test_killed_workers_are_recorded_and_a_stopped_study_goes_on(tmp_path: Path) -> None:
    """A real study in a process of its own: one worker is killed, then the study is asked to end, then it goes on."""
    config = tmp_path / "study.yaml"
    long = merge(TOY, {"steps": 3000, "checkpoint_every": 5, "data": {"epochs": 100}})
    data = merge(load_yaml(CONFIGS / "ablations" / "smoke.yaml"), {"run": long})
    config.write_text(json.dumps({**data, "seeds": [0]}), encoding="utf-8")
    out = tmp_path / "out"
    command = [sys.executable, "-c", "from engram.cli import main; raise SystemExit(main())", "ablate", str(config)]
    study = subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    states = [out / arm / "seed-0" / "checkpoint" / "state.json" for arm in ("rho=1.0", "rho=0.5")]
    try:
        _until(lambda: all(state.is_file() for state in states))
        children = psutil.Process(study.pid).children()
        assert len(children) == 2
        victim = next(child for child in children if "rho=1.0" in " ".join(child.cmdline()))
        victim.kill()
        _until((out / "rho=1.0" / "seed-0" / "failed.json").is_file)
        study.terminate()
        assert study.wait(60) == 130
        assert not psutil.pid_exists(next(child.pid for child in children if child != victim))
    finally:
        study.kill()
    step = json.loads(states[1].read_text())["state"]["step"]
    assert 0 < step < 3000 and not (out / "rho=0.5" / "seed-0" / "result.json").exists()
    from_dict(ablate.TrainConfig, json.loads(states[0].read_text())["state"]["config"])


def _until(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("waited for a minute")


@pytest.mark.slow
def test_runs_in_processes_equal_runs_in_this_process(
    finished: tuple[AblationConfig, Path, dict[str, Any]], tmp_path: Path
) -> None:
    study, _, summary = finished
    parallel = run_study(study, tmp_path, workers=2, quiet=True)
    for name, arm in summary["arms"].items():
        assert parallel["arms"][name]["loss"] == arm["loss"], name
    wild = _study(grid={"rho": [1.0]}, arms={"wild": ("data.source=/nonexistent/text.txt", "rho=1.0")}, seeds=[0])
    failed = run_study(wild, tmp_path / "wild", workers=2, quiet=True)["failed"]
    assert "nonexistent" in json.loads((tmp_path / "wild" / "wild" / "seed-0" / "failed.json").read_text())["error"]
    assert "exit status 1" in failed["wild/seed-0"] and "nonexistent" in failed["wild/seed-0"]
