"""The comparison with another package: its arithmetic, its checks (each shown to fail), its processes.

What needs the package engram-peft is skipped without it; a stand-in takes its place in the tests of the comparison.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import engram.attaching
import engram.checkpoint
import engram.handles
import engram.hashing
import engram.optim
from engram.caches import StateLayer
from engram.cli import main
from engram.decoding import DecodeState
from engram.eval import bench, peer_worker, peers
from engram.eval.peer_checks import CHECKS, Kit, NotOffered, Verdict, run_checks
from engram.eval.peer_sides import LEARNING_RATE, Ours, Shape
from engram.eval.report import read_result
from engram.hashing import NgramHash
from engram.memory import Memory
from engram.strict import ConfigError
from engram.table import RowProxy

PEER = importlib.util.find_spec("engram_peft") is not None
SMALL = Shape(
    300, 16, 3, 1, 16, layers=(1, 2), orders=(2, 3), heads=1, head_dim=2, rows=11, batch=2, length=8
)  # byte-level BPE begins with 256 tokens and the padding


# ---------------------------------------------------------------------------------------------- correctness, our side


@pytest.fixture(scope="module")
def verdicts() -> dict[str, dict[str, Any]]:
    return run_checks(Ours)


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_is_green_for_us(name: str, verdicts: dict[str, dict[str, Any]]) -> None:
    assert verdicts[name]["ok"] is True, verdicts[name]


def _other_multipliers(self: NgramHash, fn: Any, recurse: bool = True) -> NgramHash:
    self._constants["multipliers"] = tuple(number + 2 for number in self._constants["multipliers"])
    self._build(self.sizes.device)
    return self


def _all_but_one(self: RowProxy, ids_n: Tensor, grads_nW: Tensor, *rest: Any) -> None:
    COLLECT(self, ids_n[:-1], grads_nW[:-1], *rest)


def _decays_all(self: Ours, lr: float = LEARNING_RATE) -> torch.optim.Optimizer:
    return engram.optim.build(self.base, lr=lr, row_weight_decay=0.1, row_decay="global")


COLLECT, HASH = RowProxy.collect, Memory.hash_ids
BREAKS: dict[str, tuple[Any, str, Any]] = {
    "row numbers are those of the paper's demo": (engram.hashing, "LAYER_STRIDE", 10_009),
    "freshly attached, the logits are unchanged": (engram.attaching, "_start_silent", lambda memory: None),
    "cached greedy generation is the full forward": (
        DecodeState,
        "before",
        lambda self, layer, x: x.new_zeros(x.shape[0], self.taps, *x.shape[2:]),
    ),
    "a prompt read in pieces is the full forward": (DecodeState, "history", lambda self, batch: self.settle()),
    "a left-padded batch is its single prompts": (
        Memory,
        "hash_ids",
        lambda self, ids, segments, blocked, mask, history: HASH(self, ids, segments, blocked, None, history),
    ),
    "beam search is beam search without a cache": (StateLayer, "reorder_cache", lambda self, beam_idx: None),
    "assisted decoding is greedy decoding": (StateLayer, "crop", lambda self, count: None),
    "packed documents do not leak": (engram.handles, "_documents", lambda *args: None),
    "saved and loaded, bit-equal": (engram.checkpoint, "_fill", lambda memory, saved: None),
    "saved, a file is lost: loading is an error": (
        Ours,
        "load",
        classmethod(lambda cls, base, shape, folder: cls(base, shape)),
    ),
    "cast to bf16, the same rows": (NgramHash, "_apply", _other_multipliers),
    "a row touched 1,000 times gets the exact sum": (RowProxy, "collect", _all_but_one),
    "a step leaves other rows as they are": (Ours, "optimizer", _decays_all),
}
"""Check -> what is broken for it: where, its name, what stands there instead."""


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_can_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BREAKS[name])
    monkeypatch.setattr("engram.eval.peer_checks.CHECKS", {name: CHECKS[name]})
    found = run_checks(Ours)[name]
    assert found["ok"] is False
    assert "Error" not in found["found"] or name.startswith("assisted"), "red for another reason than the broken one"


def test_a_memory_that_does_nothing_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ours, "fill", lambda self, taps=True, seed=1: None)
    with pytest.raises(RuntimeError, match="does not change the logits"):
        Kit(Ours).filled()


def test_what_is_not_offered_is_neither_green_nor_red(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(kit: Kit) -> Verdict:
        raise NotOffered("no way to say it")

    def breaks(kit: Kit) -> Verdict:
        raise ValueError("first line\nsecond line")

    monkeypatch.setattr("engram.eval.peer_checks.CHECKS", {"a": cannot, "b": breaks})
    assert run_checks(Ours) == {
        "a": {"ok": None, "found": "no way to say it"},
        "b": {"ok": False, "found": "ValueError: first line"},
    }


# ---------------------------------------------------------------------------------------- the comparison, a stand-in


class StandIn:
    """A process that is none: answers with fixed numbers, and notes in which order it was asked."""

    asked: ClassVar[list[tuple[str, str]]] = []
    red: str | None = None
    missing = False
    rows = 100

    def __init__(self, name: str, folder: Path, shape: Shape) -> None:
        self.name, self.slow = name, 2.0 if name == "theirs" else 1.0

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *error: Any) -> None: ...

    def ask(self, what: str) -> Any:
        StandIn.asked.append((self.name, what))
        if what == "about" and self.name == "theirs" and self.missing:
            raise RuntimeError("peers: theirs, about: ModuleNotFoundError: No module named 'engram_peft'")
        rows = self.rows if self.name == "theirs" else 100
        memory = {"imports": 1000, "model": 1010, "bare": 1100, "peak": 1100 + int(200 * self.slow)}
        green = {"ok": True, "found": "fine"}
        mine = {"ok": what != self.red, "found": "not so"}
        answers: dict[str, Any] = {
            "about": {"package": self.name},
            "prepare": {"memory": memory, "distinct": {"1": 7}, "tables": {"1": [rows, 2]}},
            "step": [3.0 * self.slow, 2.0 * self.slow],
            "bare_step": [1.0, 1.0],
            "hash": [0.1 * self.slow, 0.1 * self.slow],
            "save": {"bytes": 500, "files": {}},
            "busy": 0.0,
            "checks": {"one": green, "two": {"ok": None, "found": "none"} if self.name == "theirs" else mine},
        }
        if what == "checks" and self.name == "ours" and self.red:
            answers["checks"]["two"] = {"ok": False, "found": "not so"}
        return answers[what]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    monkeypatch.setattr(peers, "write_text", lambda folder, shape: None)
    fresh: dict[str, Any] = {"asked": [], "red": None, "missing": False, "rows": 100}
    for name, value in fresh.items():
        monkeypatch.setattr(StandIn, name, value)
    return StandIn


def test_claims_are_ratios_of_medians(stand_in: type[StandIn], tmp_path: Path) -> None:
    found = peers.measure_peers(6, str(tmp_path), SMALL, stand_in)
    by_id = {one["id"]: one for one in found["claims"]}
    assert set(by_id) == set(peers.CLAIMS)
    step = by_id["peer-step"]
    assert (step["value"], step["against"], step["ratio"], step["target"], step["ok"]) == (3.0, 6.0, 0.5, 0.5, True)
    assert step["turns"] == 6 and step["pairs"] == [0.5] * 3 and step["quartiles"] == [0.5, 0.5]
    assert by_id["peer-step-busy"]["ratio"] == 0.5 and by_id["peer-step-busy"]["ok"] is None
    assert by_id["peer-step-added"]["value"] == 1.0 and by_id["peer-step-added"]["against"] == 3.0
    assert by_id["peer-memory"]["value"] == 300 and by_id["peer-memory"]["against"] == 500
    assert by_id["peer-memory-added"]["ratio"] == 0.5 and not by_id["peer-memory-added"]["ok"]
    assert by_id["peer-checkpoint"]["ratio"] == 1
    assert found["checks"][1] == {
        "check": "two",
        "ours": {"ok": True, "found": "not so"},
        "theirs": {"ok": None, "found": "none"},
    }
    assert found["failed"] == {} and set(found["beyond"]) == set(peers.VARIANTS)
    written = read_result(tmp_path / "peers.json")
    assert written["metrics"]["claims"] == found["claims"] and written["config"]["rounds"] == 6


def test_pairs_change_their_order_and_take_turns(stand_in: type[StandIn]) -> None:
    peers.measure_peers(6, None, SMALL, stand_in)
    steps = [name for name, what in stand_in.asked if what == "step"]
    prepared = [name for name, what in stand_in.asked if what == "prepare"]
    assert prepared[:6] == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert steps[:8] == ["theirs", "ours", "ours", "theirs", "ours", "theirs", "theirs", "ours"]


def test_a_red_check_of_ours_fails_the_command(stand_in: type[StandIn]) -> None:
    stand_in.red = "two"
    assert peers.measure_peers(2, None, SMALL, stand_in)["failed"] == {"two": "not so"}


def test_other_tables_are_not_compared(stand_in: type[StandIn]) -> None:
    stand_in.rows = 99
    with pytest.raises(RuntimeError, match="tables of ours and theirs differ"):
        peers.measure_peers(2, None, SMALL, stand_in)


def test_without_the_peer_the_command_says_what_to_install(
    stand_in: type[StandIn], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in.missing = True
    monkeypatch.setattr(bench, "measure_peers", lambda rounds, out: peers.measure_peers(rounds, out, SMALL, stand_in))
    assert main(["bench", "--peers", "--json"]) == 2
    said = json.loads(capsys.readouterr().out)["error"]
    assert "No module named 'engram_peft'" in said and f"`{peers.INSTALL}`" in said and "installs nothing" in said
    with pytest.raises(ConfigError, match="leave out --only"):
        bench.run(peers=True, only=["x"])


def test_tables_for_people_and_pages(stand_in: type[StandIn], capsys: pytest.CaptureFixture[str]) -> None:
    found = peers.measure_peers(6, None, SMALL, stand_in)
    line = "| training step | 3000.0 ms | 6000.0 ms | 0.50 | 0.50 to 0.50 | at most 0.50: met |\n"
    assert line in peers.measured_table(found)
    assert "| two | green: not so | not offered: none |\n" in peers.checks_table(found)
    assert "| bf16 rows: training step | 3000.0 ms | 6000.0 ms | 0.50 | 0.50 to 0.50 |\n" in peers.beyond_table(found)
    bench.show(found)
    shown = capsys.readouterr().out
    assert "not offered theirs two: none" in shown and "green ours   one: fine" in shown


# ------------------------------------------------------------------------------------------------------- the processes


def test_a_worker_measures_our_side(tmp_path: Path) -> None:
    peers.write_text(tmp_path, SMALL)
    worker = peer_worker.Worker("ours", tmp_path, SMALL)
    found = worker.prepare()
    memory = found["memory"]
    assert memory["imports"] <= memory["model"] <= memory["bare"] and memory["peak"] > 0
    assert found["tables"] == {"1": [11 + 13, 2], "2": [17 + 19, 2]}
    assert all(0 < count <= 24 for count in found["distinct"].values())
    before = worker.side.values(1)
    for measure in (worker.step, worker.bare_step, worker.hash):
        assert min(measure()) > 0
    assert not torch.equal(worker.side.values(1), before)
    saved = worker.save()
    assert saved["bytes"] == sum(saved["files"].values()) > 24 * 2 * 4


def test_memory_is_that_of_the_system() -> None:
    peer_worker.tidy()
    peer_worker.forget_peak()
    before = peer_worker.resident("VmHWM")
    block: Tensor | None = torch.ones(2**24)
    assert 0.9 < (peer_worker.resident("VmHWM") - before) / 2**26 < 1.5
    block = None
    assert (peer_worker.resident() - before) / 2**26 < 0.5 < 0.9 < (peer_worker.resident("VmHWM") - before) / 2**26
    peer_worker.forget_peak()
    assert (peer_worker.resident("VmHWM") - before) / 2**26 < 0.5 and block is None


def test_a_process_answers_and_says_what_fails(tmp_path: Path) -> None:
    with peers.Process("ours", tmp_path, SMALL) as side:
        assert side.ask("about")["package"] == "engram"
        with pytest.raises(RuntimeError, match="peers: ours, nonsense: AttributeError"):
            side.ask("nonsense")
        side.process.kill()
        side.process.wait()
        with pytest.raises(RuntimeError, match="the process of ours ended"):
            side.ask("about")


@pytest.mark.slow
@pytest.mark.skipif(PEER, reason="engram-peft is installed")
def test_a_missing_peer_is_noticed_by_its_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--peers", "--json"]) == 2
    assert "No module named 'engram_peft'" in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.slow
@pytest.mark.skipif(not PEER, reason="engram-peft is not installed")
def test_the_peer_is_asked_the_same(tmp_path: Path) -> None:
    with peers.Process("theirs", tmp_path, SMALL) as side:
        found = side.ask("checks")
    committed = read_result(Path(__file__).resolve().parents[1] / "eval" / "results" / "peers.json")["metrics"]
    assert {name: one["ok"] for name, one in found.items()} == {
        one["check"]: one["theirs"]["ok"] for one in committed["checks"]
    }


@pytest.mark.slow
@pytest.mark.skipif(not PEER, reason="engram-peft is not installed")
def test_the_whole_comparison_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = peers.measure_peers(3, str(tmp_path), SMALL)
    assert found["failed"] == {} and len(found["claims"]) == len(peers.CLAIMS)
    assert read_result(tmp_path / "peers.json")["metrics"]["sides"]["theirs"]["package"] == "engram-peft"
    peers.show_peers(found)
    assert "engram-peft" in capsys.readouterr().out
