"""The benchmark's arithmetic and shape; its times are no test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engram.cli import main
from engram.eval import bench, bench_gather


def test_a_claim_is_the_ratio_of_medians() -> None:
    one = bench.claim("x", [2.0, 4.0, 3.0], [1.0, 2.0, 4.0], target=2.0)
    assert (one["value"], one["against"], one["ratio"], one["ok"]) == (3.0, 2.0, 1.5, True)
    assert one["rounds"] == 3 and one["quartiles"][0] <= 2.0 <= one["quartiles"][1]
    assert not bench.claim("x", [2.2, 2.2], [1.0, 1.0], target=2.0)["ok"]


def test_sides_take_turns_and_warm_up_is_not_counted() -> None:
    calls: list[str] = []
    times = bench.alternate({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=4, warm_up=1)
    assert calls == ["b", "a", "a", "b", "b", "a", "a", "b", "b", "a"] and [len(t) for t in times.values()] == [4, 4]


def test_the_command_prints_claims(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench.run, "__defaults__", (2, 20_000))
    monkeypatch.setattr(bench_gather, "TABLE_BYTES", 2**22)
    assert main(["bench", "--rounds", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hardware"]["cpu"]["cores"] >= 1
    for one in found["claims"]:
        assert {"id", "value", "against", "ratio", "target", "ok"} <= set(one)
    names = ["model-step-at-2e+04-rows", "layer-step-at-2e+04-rows"]
    names += ["row-update-against-sparse-adam", "row-update-against-dense-adam"]
    targets = {one["id"]: one["target"] for one in found["claims"]}
    assert list(targets)[:4] == names and len(targets) in (7, 10)
    assert [targets[name] for name in names] == pytest.approx([1.05, 1.05, 1 / 3, 0.01])
    for size in (256, 1024, 4096):
        assert targets[f"host-gather-{size}-B-against-index_select"] == pytest.approx(1.11, abs=0.005)
        assert targets.get(f"host-gather-{size}-B-against-ceiling", 2) == 2  # absent without a C compiler
    assert main(["bench", "--rounds", "2"]) == 0
    assert "…" not in capsys.readouterr().out  # names are whole in a narrow terminal too


def test_the_c_loop_reads_the_very_rows(tmp_path: Path) -> None:
    reader = bench_gather.compile_reader(tmp_path)
    if reader is None:
        pytest.skip("no C compiler here")
    table = torch.arange(1, 65, dtype=torch.int64).view(16, 4)
    ids = torch.tensor([3, 0, 15])
    expected = 0
    for value in table[ids].flatten().tolist():
        expected ^= value
    assert reader(table.data_ptr(), ids.data_ptr(), 3, 32) == expected


def test_a_step_that_does_not_update_is_no_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", lambda *_, **__: None)
    monkeypatch.setattr(bench.engram.optim.EngramOptimizer, "_step_rows", lambda *_: None)
    with pytest.raises(RuntimeError, match="did not update"):
        bench.step_time("layer", 2, 20_000)
