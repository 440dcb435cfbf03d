"""The command line: a frozen list of commands and options, exit statuses, and what `--json` prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from engram import __version__, cli, families
from engram.cli import main
from engram.strict import ConfigError

COMMON = {"--json", "--debug", "--help"}
COMMANDS = {
    "quickstart": {"--out", "--toy", "--set", *COMMON},
    "train": {"config", "--set", "--dry-run", "--out", "--resume", *COMMON},
    "ablate": {"config", "--set", "--dry-run", "--out", "--workers", *COMMON},
    "attach": {"model", "--config", "--data", "--set", "--dry-run", "--out", "--resume", *COMMON},
    "eval": {"kind", "run", "--out", "--text", *COMMON},
    "report": {"run", *COMMON},
    "rows": {"--family", "--layer", "--ids", "--text", "--tokenizer", "--blocked", *COMMON},
    "verify": COMMON,
    "inspect": {"path", *COMMON},
    "info": COMMON,
    "bench": {"--rounds", "--only", "--out", "--compile-only", "--full", "--peers", *COMMON},
    "overlap": {"config", "--set", "--out", *COMMON},
    "plan": {"config", "--set", *COMMON},
    "quantize": {"run", "--format", "--out", *COMMON},
}
"""Frozen: whoever adds or renames a command or an option changes this table, the README and the changelog with it."""


def options_of(command: Any) -> set[str]:
    """Long options and argument names of one command."""
    names = set()
    for parameter in command.params:
        long = [name for name in parameter.opts if name.startswith("--")]
        names.add(long[0] if long else parameter.name)
    return names | {"--help"}


def test_commands_and_options_are_the_frozen_ones() -> None:
    group: Any = typer.main.get_command(cli.app)
    assert {name: options_of(command) for name, command in group.commands.items()} == COMMANDS
    assert options_of(group) == {"--version", "--help"}
    assert set(cli.TARGETS) == set(COMMANDS)


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)
    for name in COMMANDS:
        assert main([name, "--help"]) == 0
        assert "--json" in capsys.readouterr().out


def test_version_and_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"engram {__version__}\n"
    assert main([]) == 0
    assert "Usage" in capsys.readouterr().out


def test_rows_prints_the_golden_rows(capsys: pytest.CaptureFixture[str]) -> None:
    facts = families.golden()["deepseek-v4.1"]
    ids = ",".join(map(str, facts["ids"]))
    for layer in ("1", "14"):
        status = main(["rows", "--family", "deepseek-v4.1", "--layer", layer, "--ids", ids, "--blocked", "3", "--json"])
        out = capsys.readouterr().out
        assert status == 0
        assert json.loads(out) == {
            "family": "deepseek-v4.1",
            "layer": int(layer),
            "rows": facts["by_layer"][layer]["rows"],
        }


def test_rows_counts_ids_outside_the_vocabulary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rows", "--family", "toy", "--layer", "1", "--ids", "5,1000,-3,17", "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["masked"] == 2 and "2 of 4 ids" in captured.err
    assert main(["rows", "--family", "toy", "--layer", "1", "--ids", "5,2,2,17", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == result["rows"]  # the toy family's filler is class 2


def test_rows_of_a_text_shows_each_ngram(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["rows", "--family", "deepseek-v4.1", "--layer", "1", "--text", "The cat sat. the CAT"]
    assert main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    positions, orders = len(result["ids"]), (2, 3, 4)
    assert len(result["rows"]) == positions and len(result["ngrams"]) == positions * len(orders)
    entry = result["ngrams"][5]
    assert entry["position"] == 1 and entry["order"] == 4 and entry["tokens"] == ["The", " cat"]
    assert entry["rows"] == result["rows"][1][16:24]
    # Compression folds case: "The" and "the" are one class.
    assert main(["rows", "--family", "deepseek-v4.1", "--layer", "1", "--text", "the CAT sat. the CAT", "--json"]) == 0
    folded = json.loads(capsys.readouterr().out)["rows"]
    assert folded[0] == result["rows"][0]
    assert main(command) == 0
    assert "n-gram" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rows", "--family", "toy", "--layer", "1", "--ids", "1,x"], "no list of integers"),
        (["rows", "--family", "toy", "--layer", "1", "--ids", f"{2**63}"], "beyond 64 bits"),
        (["rows", "--family", "toy", "--layer", "2", "--ids", "1"], "choose one of 1, 15"),
        (["rows", "--family", "toi", "--layer", "1", "--ids", "1"], "did you mean 'toy'"),
        (["rows", "--family", "toy", "--layer", "1"], "--ids, --text"),
        (["rows", "--family", "toy", "--layer", "1", "--ids", "1", "--text", "a"], "--ids, --text"),
        (["rows", "--family", "toy", "--layer", "1", "--ids", "1", "--blocked", "1"], "position 1 does not exist"),
        (["rows", "--family", "toy", "--layer", "1", "--ids", "1", "--tokenizer", "x"], "--tokenizer"),
        (["rows", "--family", "toy", "--layer", "1", "--text", "a"], "raw ids of its own tokenizer"),
        (["rows", "--family", "deepseek-v4.1", "--layer", "1", "--text", ""], "no token"),
        (["rows", "--family", "deepseek-v4.1", "--layer", "1", "--text", "a", "--tokenizer", "/none"], "/none"),
        (["rows", "--layer", "1"], "--family"),
        (["rows", "--family", "toy", "--layer", "one", "--ids", "1"], "--layer"),
        (["eval", "colour", "runs/x"], "lens"),
        (["ablate", "x.yaml", "--workers", "0"], "--workers"),
        (["verify", "--colour"], "--colour"),
        (["no-such-command"], "no-such-command"),
        (["train"], "CONFIG"),
    ],
)
def test_misuse_is_one_line_and_status_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err and captured.err.startswith("engram: ") and captured.err.count("\n") == 1
    assert main([*arguments, "--json"]) == 2
    assert said in json.loads(capsys.readouterr().out)["error"]


def test_verify_passes_and_notices_a_changed_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["verify", "--json"]) == 0
    verdicts = json.loads(capsys.readouterr().out)["families"]
    golden = families.golden()
    assert set(verdicts) == set(golden)
    assert all(verdict["ok"] for verdict in verdicts.values())
    numbers = {name: len(facts["ids"]) for name, facts in golden.items()}
    assert all(verdicts[name]["checked"] > count for name, count in numbers.items())
    golden["blt"]["rows"][2][3] += 1
    golden["toy"]["by_layer"]["15"]["multipliers"][0] += 2
    monkeypatch.setattr(families, "golden", lambda: golden)
    assert main(["verify", "--json"]) == 1
    verdicts = json.loads(capsys.readouterr().out)["families"]
    assert sorted(name for name, verdict in verdicts.items() if not verdict["ok"]) == ["blt", "toy"]
    assert main(["verify"]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_info_names_versions_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["engram"] == __version__ and about["packages"]["torch"]
    assert about["memory"]["total"] > about["memory"]["available"] > 0
    assert {"python", "cpu", "pin_limit", "devices", "kernels"} <= set(about)
    assert main(["info"]) == 0
    assert "kernels" in capsys.readouterr().out


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Puts a function in the place of what `engram train` calls."""

    def put(function: Callable[..., Any]) -> None:
        module = types.ModuleType("engram_test_target")
        module.go = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "engram_test_target", module)
        monkeypatch.setitem(cli.TARGETS, "train", "engram_test_target:go")

    return put


def test_arguments_reach_the_target(
    target: Callable[[Callable[..., Any]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, Any] = {}
    target(lambda **arguments: seen.update(arguments))
    assert main(["train", "a.yaml", "--set", "seed=1", "--set", "memory.heads=2", "--dry-run", "--resume"]) == 0
    assert seen == {
        "config": "a.yaml",
        "overrides": ["seed=1", "memory.heads=2"],
        "dry_run": True,
        "out": None,
        "resume": True,
    }
    assert capsys.readouterr().out == ""


def test_json_is_the_only_thing_on_stdout(
    target: Callable[[Callable[..., Any]], None], capfd: pytest.CaptureFixture[str]
) -> None:
    def noisy(**_: Any) -> dict[str, Any]:
        print("a line of progress")
        subprocess.run([sys.executable, "-c", "print('a child speaks')"], check=True)
        return {"loss": 1.5, "worst": float("nan"), "sizes": (1, 2)}

    target(noisy)
    assert main(["train", "a.yaml", "--json"]) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out) == {"loss": 1.5, "worst": None, "sizes": [1, 2]}
    assert "a line of progress" in captured.err and "a child speaks" in captured.err
    assert main(["train", "a.yaml"]) == 0
    captured = capfd.readouterr()
    assert "a line of progress" in captured.out and "loss" in captured.out and "1.5" in captured.out


@pytest.mark.parametrize(
    ("error", "status"),
    [(ConfigError("field: 3 is wrong;\nuse 4"), 2), (ValueError("broken"), 1), (OSError(28, "disk full"), 1)],
)
def test_errors_give_a_status_and_one_line(
    error: Exception,
    status: int,
    target: Callable[[Callable[..., Any]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(**_: Any) -> None:
        raise error

    target(fail)
    assert main(["train", "a.yaml"]) == status
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and "Traceback" not in captured.err
    assert main(["train", "a.yaml", "--json"]) == status
    assert json.loads(capsys.readouterr().out)["status"] == status
    assert main(["train", "a.yaml", "--debug"]) == status
    assert "Traceback" in capsys.readouterr().err


def test_a_dry_run_prints_everything_and_a_result_its_plain_values(
    target: Callable[[Callable[..., Any]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    result = {"config": {"steps": 7, "memory": {"layers": [1, 2]}}, "metrics": {"loss": 1.5, "lens": {"kl": [0.5]}}}
    target(lambda **_: result)
    assert main(["train", "a.yaml", "--dry-run"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == result
    assert main(["train", "a.yaml"]) == 0
    assert capsys.readouterr().out.split() == ["loss", "1.5"]


def test_interruption_is_130(target: Callable[[Callable[..., Any]], None], capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(**_: Any) -> None:
        raise KeyboardInterrupt("saved; go on with --resume")

    target(interrupted)
    assert main(["train", "a.yaml"]) == 130
    assert "go on with --resume" in capsys.readouterr().err
    assert main(["train", "a.yaml", "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["status"] == 130


def test_a_result_with_failures_is_status_1(target: Callable[[Callable[..., Any]], None]) -> None:
    target(lambda **_: {"done": ["a"], "failed": ["b"]})
    assert main(["train", "a.yaml"]) == 1
    target(lambda **_: {"done": ["a"], "failed": []})
    assert main(["train", "a.yaml"]) == 0


def test_the_installed_command_runs_from_anywhere(tmp_path: Path) -> None:
    command = Path(sys.executable).with_name("engram")
    assert command.exists(), "install the package first: make setup"

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([command, *arguments], cwd=tmp_path, env=os.environ, capture_output=True, text=True)

    good = call("rows", "--family", "toy", "--layer", "1", "--ids", "5,17,999,0,3", "--json")
    assert good.returncode == 0
    assert json.loads(good.stdout)["rows"] == families.golden()["toy"]["by_layer"]["1"]["rows"]
    bad = call("rows", "--layer", "1")
    assert bad.returncode == 2 and bad.stdout == "" and "--family" in bad.stderr
