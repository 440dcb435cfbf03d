"""What gets installed: only `engram` and its metadata, every Python file, every config, and a command that works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("engram", "kernels", "train", "eval")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution of a copy of the tree, with what is installed (no download)."""
    copy = tmp_path_factory.mktemp("source") / "engram-lab"
    made_here = {"runs", "build", "dist"}

    def ignored(folder: str, names: list[str]) -> set[str]:
        top = made_here if Path(folder) == ROOT else set()
        return {n for n in names if n in top or n == "__pycache__" or n.startswith(".") or n.endswith(".egg-info")}

    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    done = subprocess.run(build, cwd=copy.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = out.glob("*.whl")
    assert len(list(out.glob("*.tar.gz"))) == 1
    return found


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as file:
        return set(file.namelist())


def test_only_engram_is_installed(wheel: Path) -> None:
    assert wheel.name.startswith("engram_lab-")
    top = {name.split("/")[0] for name in names(wheel)}
    assert top == {"engram", wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"}


def test_every_file_is_in_the_wheel(wheel: Path) -> None:
    inside = names(wheel)
    for part in PARTS:
        for path in (ROOT / part).rglob("*.py"):
            relative = path.relative_to(ROOT).as_posix()
            wanted = relative if part == "engram" else f"engram/{relative}"
            assert wanted in inside
    for path in (ROOT / "configs").rglob("*.yaml"):
        assert f"engram/{path.relative_to(ROOT).as_posix()}" in inside
    assert "engram/golden.json" in inside
    assert not [name for name in inside if "tests" in name or name.endswith(".pyc")]


def test_the_wheel_runs_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path)
    program = "import sys, engram; from engram.cli import main; print(engram.__file__); sys.exit(main(sys.argv[1:]))"
    # -S -I would lose the installed libraries; a path entry in front wins over the editable finder.
    done = subprocess.run(
        [sys.executable, "-c", program, "verify", "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    place, verdicts = done.stdout.splitlines()
    assert Path(place).is_relative_to(tmp_path)
    assert all(verdict["ok"] for verdict in json.loads(verdicts)["families"].values())


def test_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        (metadata,) = [name for name in file.namelist() if name.endswith(".dist-info/METADATA")]
        (entry_points,) = [name for name in file.namelist() if name.endswith(".dist-info/entry_points.txt")]
        text, entries = file.read(metadata).decode(), file.read(entry_points).decode()
        assert any(name.endswith("licenses/LICENSE") for name in file.namelist())
    assert "engram = engram.cli:main" in entries
    assert "License-Expression: Apache-2.0" in text and "Requires-Python: <3.14,>=3.10" in text
    assert "Requires-Dist: torch>=2.10" in text and "Requires-Dist: transformers>=5.24" in text
    assert "Provides-Extra: dev" in text and "Provides-Extra: wandb" in text


def test_ci_runs_exactly_the_whole_suite() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = script.read_text(encoding="utf-8").splitlines()
    assert lines[:2] == ["#!/usr/bin/env bash", "set -euo pipefail"]
    assert lines[-1] == "exec make test-all TORCH=torch==2.13.0"
