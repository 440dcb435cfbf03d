"""The benchmark's arithmetic and shape; its times are no test."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from engram.cli import main
from engram.eval import bench, bench_disk, bench_gather, bench_raw
from engram.eval.report import read_result
from engram.stores import DiskStore
from engram.stores.access import RowAccess
from engram.stores.reading import PageBuffer
from engram.stores.rowfile import PAGE
from engram.strict import ConfigError


def test_a_claim_is_the_ratio_of_medians() -> None:
    one = bench.claim("x", [2.0, 4.0, 3.0], [1.0, 2.0, 4.0], target=2.0)
    assert (one["value"], one["against"], one["ratio"], one["ok"]) == (3.0, 2.0, 1.5, True)
    assert one["rounds"] == 3 and one["quartiles"][0] <= 2.0 <= one["quartiles"][1]
    assert not bench.claim("x", [2.2, 2.2], [1.0, 1.0], target=2.0)["ok"]


def test_sides_take_turns_and_warm_up_is_not_counted() -> None:
    calls: list[str] = []
    times = bench.alternate({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=4, warm_up=1)
    assert calls == ["b", "a", "a", "b", "b", "a", "a", "b", "b", "a"] and [len(t) for t in times.values()] == [4, 4]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes at which times mean nothing."""
    monkeypatch.setattr(bench, "LARGE", 20_000)
    monkeypatch.setattr(bench_gather, "TABLE_BYTES", 2**22)
    monkeypatch.setattr(bench_disk, "FILE_BYTES", 2**20)
    monkeypatch.setattr(bench_disk, "LOOKUPS", 200)
    monkeypatch.setattr(bench_disk, "PIECE", 300)


def test_the_command_prints_claims(tiny: None, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "--rounds", "2", "--json", "--out", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hardware"]["cpu"]["cores"] >= 1
    for one in found["claims"]:
        assert {"id", "value", "against", "ratio", "target", "ok"} <= set(one)
    names = ["model-step-at-2e+04-rows", "layer-step-at-2e+04-rows"]
    names += ["row-update-against-sparse-adam", "row-update-against-dense-adam"]
    targets = {one["id"]: one["target"] for one in found["claims"]}
    assert list(targets)[:4] == names
    assert [targets.pop(name) for name in names] == pytest.approx([1.05, 1.05, 1 / 3, 0.01])
    for size in (256, 1024, 4096):
        assert targets.pop(f"host-gather-{size}-B-against-index_select") == pytest.approx(1.11, abs=0.005)
        assert targets.pop(f"host-gather-{size}-B-against-ceiling", 2) == 2  # absent without a C compiler
    assert targets.pop("kernel-cpu-hash-against-torch") == 0.4
    targets = {name: target for name, target in targets.items() if not name.startswith("kernel-")}  # of a GPU
    disk = {f"disk-{way}-against-raw" for way in ("io_uring", "aio", "threads")}
    assert set(targets) <= disk and all(target == pytest.approx(1 / 0.85) for target in targets.values())
    assert [one["id"] for one in found["reported"]] in (["disk-warm-mapping"], [])

    written = read_result(tmp_path / "bench.json")
    kept = ("claims", "reported", "foreign", "failed")
    assert written["metrics"] == {"arm": "bench", **{name: found[name] for name in kept}} and found["failed"] == {}
    assert written["config"]["rounds"] == 2 and written["config"]["disk"]["lookups"] == 200 and written["seed"] == 0
    bench.show({**found, "foreign": 0.2})
    shown = capsys.readouterr().out
    assert "…" not in shown  # names are whole in a narrow terminal too
    assert "not a quiet machine: other programs took 20% of all cores" in " ".join(shown.split())
    bench.show({**found, "foreign": 0.01})
    assert "not a quiet" not in capsys.readouterr().out


def test_only_claims_that_are_asked_for_are_timed(
    tiny: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "step_time", lambda *_: pytest.fail("not asked for"))
    monkeypatch.setattr(bench_disk, "make_file", lambda *_: pytest.fail("not asked for"))
    command = ["bench", "--rounds", "2", "--only", "host-gather-256-B-against-index*", "--only", "*-sparse-adam"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ids = [one["id"] for one in found["claims"]]
    assert ids == ["row-update-against-sparse-adam", "host-gather-256-B-against-index_select"]
    assert main(["bench", "--only", "gather"]) == 2
    assert "'gather' fits no claim; there are model-step-at-2e+04-rows, " in capsys.readouterr().err


def test_a_kernel_that_fails_its_check_takes_no_other_claim_with_it() -> None:
    def claims(rounds: int, device: torch.device, names: list[str]) -> Any:
        if names == ["kernel-b"]:
            raise RuntimeError("bench: b is wrong")
        yield names[0], SimpleNamespace(value=[2.0, 2.0], against=[1.0, 1.0], target=1.0, value_bytes=0)

    kernels = SimpleNamespace(ids=lambda device: ["kernel-a", "kernel-b", "kernel-c", "kernel-d"], claims=claims)
    failed: dict[str, str] = {}
    wanted = ["kernel-a", "kernel-b", "kernel-c"]
    found = bench.kernel_claims(kernels, 2, torch.device("cpu"), wanted, failed)
    assert [one["id"] for one in found] == ["kernel-a", "kernel-c"] and failed == {"kernel-b": "bench: b is wrong"}


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


# ---- reads of rows from a file


def test_calls_of_the_disk_claims_share_no_page_and_have_no_neighbours() -> None:
    calls = [np.unique(ids // bench_disk.ROWS_OF_PAGE) for ids in itertools.islice(bench_disk.draws(2**16), 4)]
    for before, after in itertools.pairwise(calls):
        assert len(before) > 1000 and np.diff(before).min() >= 2 and not np.isin(after, before).any()
    assert max(pages.max() for pages in calls) < 2**16 // bench_disk.ROWS_OF_PAGE


def test_the_file_holds_what_it_is_said_to_hold(tiny: None, tmp_path: Path) -> None:
    path = bench_disk.make_file(tmp_path / "rows.safetensors")
    with DiskStore.open(path, read_only=True) as store:
        assert store.spec.rows == 2**10 == store.rows_touched()
        ids = torch.arange(store.spec.rows)
        rows = store.gather(ids)
    assert torch.equal(rows, bench_disk.written(ids)) and len(rows.unique(dim=0)) == len(ids)


@pytest.mark.parametrize("way", list(bench_disk.WAYS))
def test_a_raw_loop_reads_the_very_pages_and_says_when_it_cannot(way: str, tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, (64, PAGE), dtype=np.uint8)
    (tmp_path / "file").write_bytes(data.tobytes())
    fd, buffer = os.open(tmp_path / "file", os.O_RDONLY), PageBuffer().take(50 * PAGE)
    with bench_raw.raw_reader(way, 8, fd, tmp_path) as reader:
        if isinstance(reader, str):
            pytest.skip(f"{way}: {reader}")
        for seed in range(3):
            pages = np.random.default_rng(seed).permutation(64)[:50]
            buffer[:] = 0
            reader(pages * PAGE, buffer)
            assert np.array_equal(buffer.reshape(50, PAGE), data[pages])
        with pytest.raises(RuntimeError, match="could not read 2 pages"):
            reader(np.array([0, 99 * PAGE, PAGE, 64 * PAGE]), buffer)
    os.close(fd)


def test_a_side_that_reads_other_rows_is_no_claim(tiny: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = bench_disk.make_file(tmp_path / "rows.safetensors")
    with DiskStore.open(path, read_only=True) as store:
        monkeypatch.setattr(store, "gather", lambda ids, out: out.copy_(bench_disk.written(ids ^ 1)))
        with pytest.raises(RuntimeError, match="gave other rows"):
            bench_disk._our_side(store)
    with pytest.raises(RuntimeError, match="read other pages"):
        bench_disk._raw_side(lambda offsets, to: None, path)


def test_a_slow_disk_gives_fewer_rounds(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_disk, "BUDGET_S", 0.0)
    for sides in bench_disk.disk_times(7, ("threads",), warm=False).sides.values():
        assert [len(times) for times in sides.values()] == [bench_disk.LEAST_ROUNDS] * 2


def test_what_a_machine_lacks_is_said_and_left_out(
    tiny: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*patches: tuple[Any, str, Any]) -> str:
        with monkeypatch.context() as patch:
            for target, name, value in patches:
                patch.setattr(target, name, value)
            assert main(["bench", "--rounds", "2", "--only", "disk-*-raw", "--json"]) == 0
        captured = capsys.readouterr()
        assert json.loads(captured.out)["claims"] == []
        return captured.err

    no_queue, no_direct = (bench_disk, "queue_works", lambda kind: False), (RowAccess, "_open_direct", lambda self: -1)
    with monkeypatch.context() as patch:  # whatever the tests run on
        patch.setattr(bench_disk, "unfit", lambda folder: "")
        told = said(no_queue, no_direct)
        assert "disk-io_uring: not permitted here" in told and "disk-aio: not permitted" in told
        assert "disk-threads: " in told and "has no O_DIRECT; set TMPDIR" in told
        told = said(no_queue, (shutil, "which", lambda name: None))
        assert "no raw loop to compare with: no C compiler" in told or "has no O_DIRECT" in told
    memory = SimpleNamespace(mountpoint="/", fstype="tmpfs")
    told = said((psutil, "disk_partitions", lambda all: [memory]))
    assert "disk claims: " in told and "lies in memory (tmpfs); set TMPDIR to a folder on a disk" in told


def test_a_folder_without_room_is_refused_before_anything_is_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "step_time", lambda *_: pytest.fail("timed"))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**9))
    assert main(["bench"]) == 2
    said = capsys.readouterr().err
    assert "has 1,000,000,000; set TMPDIR to a folder with more room, or name other claims with --only" in said
    with pytest.raises(ConfigError, match=r"needs 1,140,850,688 bytes"):
        bench_disk.require_space()


def test_tables_show_ratios_and_misses() -> None:
    gather = bench.claim("host-gather-256-B-against-ceiling", [3.0, 3.0], [1.0, 1.0], 2.0)
    table = bench_gather.gather_table([gather]).splitlines()
    assert table[2] == "| 256 B | – | – | 3.00, missed | 3.00 to 3.00 |" and len(table) == 5
    disk = {**bench.claim("disk-aio-against-raw", [0.2, 0.2, 0.2], [0.1, 0.2, 0.15], 1 / 0.85), "way": "kernel aio"}
    lines = bench_disk.disk_table([gather, disk]).splitlines()
    assert lines[2:] == ["| kernel aio | 40,000 | 53,333 | 0.75, missed | 0.50 to 1.00 |"]
