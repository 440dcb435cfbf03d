"""The scripts of docs/examples, run as they are, and what they print."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXPECTED = {
    "attach_and_finetune.py": ["the fresh copy computes the same: True", "trainable:"],
    "read_released.py": [
        "qwen3.8-flash-next: block 1, 40,320 rows of 8 values, bf16",
        "exported, and read back bit for bit\n",
    ],
    "generate.py": ["drafts of another model give the greedy text: True", "largest difference"],
}


def test_every_script_is_here(repo_root: Path) -> None:
    assert {path.name for path in (repo_root / "docs" / "examples").glob("*.py")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_script_runs_and_says_what_it_should(
    name: str, repo_root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repo_root)
    runpy.run_path(str(repo_root / "docs" / "examples" / name), run_name="__main__")
    shown = capsys.readouterr().out
    for line in EXPECTED[name]:
        assert line in shown, shown
    if "largest difference" in EXPECTED[name]:
        assert float(shown.split()[-1]) < 1e-5
