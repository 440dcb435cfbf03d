"""Every kernel compiled for four GPUs with none present: no spills, wide accesses, few registers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from engram.kernels import aot
from engram.kernels.launch import INSTALLED, INTERPRETED

pytestmark = pytest.mark.skipif(not INSTALLED or INTERPRETED, reason="needs Triton, outside its interpreter")


def _check(found: dict[str, Any]) -> None:
    assert not found["failed"], "\n".join(found["failed"])
    assert found["targets"] == list(aot.TARGETS) and found["compiled"] == len(found["rows"])
    kernels = {row["kernel"].split()[0] for row in found["rows"]}
    assert kernels >= {"rows", "gather", "hash+gather", "put", "sum", "rowwise_adam", "partial", "atomic"}
    assert kernels >= {"gate", "conv"}
    for row in found["rows"]:
        assert row["spills"] == 0 and 0 < row["registers"] <= 255 and row["instructions"] > 20
    wide = [row for row in found["rows"] if row["kernel"] == "gather bf16 64 -> bf16"]
    assert len(wide) == 4 and all(row["wide_loads"] and row["wide_stores"] for row in wide)


def test_the_representative_set(tmp_path: Path) -> None:
    assert len(aot.variants()) * len(aot.TARGETS) <= 120
    _check(aot.compile_report())


@pytest.mark.slow
def test_the_full_matrix() -> None:
    assert len(aot.variants(full=True)) > 200
    _check(aot.compile_report(full=True))


def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    """Without the hint of 16-byte pointers rows are read in pieces; with a limit of 8 registers too many are needed."""
    one = next(variant for variant in aot.variants() if variant.name == "gather bf16 64 -> bf16")
    narrow = dataclasses.replace(one, aligned=("ids",), registers=8)
    for target in ("sm_90", "gfx942"):
        row = aot.compile_variant(narrow, target, tmp_path)
        assert "no 16-byte loads" in row["problems"] and "no 16-byte stores" in row["problems"]
        assert any("at most 8" in problem for problem in row["problems"]) == (target == "sm_90")
        assert row["loads"] > 4 * aot.compile_variant(one, target, tmp_path)["loads"]


def test_a_spill_is_a_problem() -> None:
    one = aot.variants()[0]
    row = {"spills": 16, "registers": 20, "wide_loads": 1, "wide_stores": 1}
    assert aot._problems(one, row, nvidia=True) == ["spills 16 bytes"]
    assert aot._problems(one, {**row, "spills": 0}, nvidia=True) == []


def test_the_interpreter_cannot_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "INTERPRETED", True)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1 is set"):
        aot.compile_report()
