"""The Makefile's set-up, with an interpreter that only notes what it is asked: order, stamp, locks, choices."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

INTERPRETER = """#!/bin/sh
# Notes each call in calls.txt; `-m venv` makes a .venv whose python is this file again.
case "$*" in
  *"-m venv"*) echo venv >> calls.txt; rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python
               echo "#!`pwd -P`/.venv/bin/python" > .venv/bin/pip ;;
  *"-m pip"*) echo "$*" >> calls.txt; [ ! -e pip-fails ] ;;
  *"version("*) echo torch==2.13.0+cpu ;;
  *"import sys"*|*fcntl*|*ensurepip*) exec %PYTHON% "$@" ;;
esac
"""
# The question for `sys, pip` needs a pip: the interpreter running the tests has one.


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with a space in its name that holds the Makefile, pyproject.toml and the noting interpreter."""
    folder = tmp_path / "a tree"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    python = folder / "noting-python"
    python.write_text(INTERPRETER.replace("%PYTHON%", sys.executable), encoding="utf-8")
    python.chmod(0o755)
    return folder


def make(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("TORCH", "PYTHON", "MAKEFLAGS")}
    command = ["make", "setup", "PYTHON=./noting-python", *arguments]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)


def calls(tree: Path) -> list[str]:
    """What was asked of the interpreter since the last look."""
    path = tree / "calls.txt"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return lines


def test_torch_comes_first_and_stays(tree: Path) -> None:
    done = make(tree, "TORCH=torch==2.13.0")
    assert done.returncode == 0, done.stderr
    venv, torch, package = calls(tree)
    assert venv == "venv"
    assert torch.endswith("torch==2.13.0")
    assert "--constraint .venv/torch-installed" in package and "--editable .[dev]" in package
    assert (tree / ".venv" / "torch-installed").read_text(encoding="utf-8") == "torch==2.13.0+cpu\n"


def test_a_second_call_does_nothing_and_remembers_torch(tree: Path) -> None:
    make(tree, "TORCH=torch==2.13.0")
    calls(tree)
    for arguments in (["TORCH=torch==2.13.0"], []):
        assert make(tree, *arguments).returncode == 0
        assert calls(tree) == []
    make(tree, "TORCH=torch>=2.12")
    assert [line.split()[-1] for line in calls(tree)] == ["torch>=2.12", ".[dev]"]


def test_a_changed_pyproject_installs_again_in_the_same_environment(tree: Path) -> None:
    make(tree)
    calls(tree)
    with (tree / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    assert make(tree).returncode == 0
    assert len(calls(tree)) == 2
    assert len(list((tree / ".venv").glob("ready-*"))) == 1


def test_a_failed_set_up_is_taken_up_again(tree: Path) -> None:
    (tree / "pip-fails").touch()
    assert make(tree).returncode != 0
    assert not list((tree / ".venv").glob("ready-*"))
    (tree / "pip-fails").unlink()
    calls(tree)
    assert make(tree).returncode == 0
    assert len(calls(tree)) == 2


def test_a_moved_environment_is_made_anew(tree: Path) -> None:
    make(tree)
    calls(tree)
    moved = tree.rename(tree.with_name("moved"))
    assert make(moved).returncode == 0
    assert calls(moved)[0] == "venv"


def test_two_calls_at_once_set_up_once(tree: Path) -> None:
    command = ["make", "setup", "PYTHON=./noting-python"]
    both = [subprocess.Popen(command, cwd=tree, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert len(calls(tree)) == 3


def test_a_missing_interpreter_is_said(tree: Path) -> None:
    done = make(tree, "PYTHON=no-such-python")
    assert done.returncode != 0 and "no-such-python" in done.stderr and "PYTHON=" in done.stderr
