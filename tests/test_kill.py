"""Real kills of a process that trains a disk store: afterwards the checkpoint that the caller recorded is there, bit
for bit. Rows are compared with a plain tensor that goes through the same updates.

One helper process imports torch once and forks a child for every kill; the child says where it is, the test kills it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from torch import Tensor

from engram.stores.base import TableSpec
from engram.stores.disk import DiskStore
from engram.stores.queues import IoUring, queue_works
from engram.strict import ConfigError

pytestmark = pytest.mark.slow
SPEC = TableSpec(3000, 66, seed=8)
EVERY = 5  # steps between checkpoints
POINTS = ["before rows", "within rows", "after rows", "after prepare", "after rename", "after commit"]
WAYS = [
    pytest.param({"backend": "mapping"}, id="mapping"),
    pytest.param({"backend": "threads", "threads": 4}, id="threads"),
    pytest.param(
        {"backend": "io_uring"},
        id="io_uring",
        marks=pytest.mark.skipif(not queue_works(IoUring), reason="io_uring is not permitted here"),
    ),
]

STEP = '''
import torch

def step(seed, number, rows, width):
    """The rows of one update and their values."""
    draw = torch.Generator().manual_seed(1000 * seed + number)
    ids = torch.randperm(rows, generator=draw)[:200]
    return ids, torch.randn(200, width, generator=draw)
'''

CHILD = (
    STEP
    + '''
import json, os, sys, time
from pathlib import Path
from engram.stores.access import RowAccess
from engram.stores.disk import DiskStore
from engram.stores.base import TableSpec

def say(text):
    os.write(1, (text + "\\n").encode())

def train(job):
    """Update and checkpoint for ever; stop to be killed at `point`, the time number `times` that it comes by."""
    folder, spec = Path(job["folder"]), TableSpec(**job["spec"])
    passed = 0

    def at(point):
        nonlocal passed
        passed += point == job["point"]
        if point == job["point"] and passed == job["times"]:
            say("there")
            time.sleep(60)

    write = RowAccess.write
    def watched(self, ids, rows):
        at("before rows")
        if job["point"] == "within rows":
            write(self, ids[: len(ids) // 2], rows[: len(ids) // 2])
            at("within rows")
        write(self, ids, rows)
        at("after rows")
    RowAccess.write = watched

    saved = folder / "state.json"
    state = json.loads(saved.read_text()) if saved.exists() else {"step": 0, "generation": None}
    store = DiskStore(folder / "rows", spec, generation=state["generation"], **job["options"])
    say("open")
    for number in range(state["step"] + 1, 10**6):
        store.gather(torch.randint(0, spec.rows, (50,)))
        store.update(*step(job["seed"], number, spec.rows, spec.width))
        if number % job["every"] == 0:
            generation = store.prepare_checkpoint()
            at("after prepare")
            (folder / "state.new").write_text(json.dumps({"step": number, "generation": generation}))
            os.rename(folder / "state.new", saved)
            at("after rename")
            store.commit_checkpoint(generation)
            at("after commit")

torch.set_num_threads(1)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        try:
            train(json.loads(line))
        finally:
            os._exit(1)
    say(f"child {child}")
    say(f"ended {os.waitpid(child, 0)[1]}")
'''
)
space: dict[str, Any] = {}
exec(STEP, space)
step = space["step"]


class Helper:
    """The process that forks children to be killed."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def start(self, **job: Any) -> int:
        """Fork a child for `job` -> its process number, once its store is open."""
        stdin: IO[str] = self.process.stdin  # type: ignore[assignment]
        job = {"spec": vars(SPEC), "every": EVERY, "times": 1, "point": "", **job}
        stdin.write(json.dumps(job, default=str) + "\n")
        first = {self.line(), self.line()}  # the child may be faster
        assert "open" in first, first
        return int(next(line for line in first if line.startswith("child ")).split()[1])

    def line(self) -> str:
        stdout: IO[str] = self.process.stdout  # type: ignore[assignment]
        return stdout.readline().strip()

    def kill(self, child: int) -> None:
        """SIGKILL, and wait until nothing of it is left."""
        os.kill(child, signal.SIGKILL)
        while not (line := self.line()).startswith("ended"):
            assert line == "there", line
        assert int(line.split()[1]) == signal.SIGKILL


@pytest.fixture(scope="module")
def helper() -> Iterator[Helper]:
    helper = Helper()
    yield helper
    helper.process.stdin.close()  # type: ignore[union-attr]
    assert helper.process.wait(timeout=20) == 0


def recorded(folder: Path) -> dict[str, Any]:
    path = folder / "state.json"
    return json.loads(path.read_text()) if path.exists() else {"step": 0, "generation": None}


class Oracle:
    """A plain tensor that goes through the same updates."""

    def __init__(self, seed: int) -> None:
        self.seed, self.done = seed, 0
        self.rows = SPEC.initial(torch.arange(SPEC.rows))

    def at(self, wanted: int) -> Tensor:
        assert wanted >= self.done
        for number in range(self.done + 1, wanted + 1):
            ids, values = step(self.seed, number, SPEC.rows, SPEC.width)
            self.rows[ids] = values
        self.done = wanted
        return self.rows


def check(folder: Path, oracle: Oracle) -> None:
    """Opening with the recorded generation gives the rows of that step."""
    state = recorded(folder)
    with DiskStore(folder / "rows", SPEC, generation=state["generation"]) as store:
        assert torch.equal(store.gather(torch.arange(SPEC.rows)), oracle.at(state["step"]))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_a_chosen_point(tmp_path: Path, helper: Helper, point: str, way: dict[str, Any]) -> None:
    oracle = Oracle(seed=1)
    for times in (1, 2, 4):  # before the first checkpoint, then after some
        child = helper.start(folder=tmp_path, seed=1, point=point, times=times, options=way)
        assert helper.line() == "there"
        helper.kill(child)
        check(tmp_path, oracle)
    assert point not in ("after rename", "after commit") or oracle.done >= 7 * EVERY


@pytest.mark.parametrize("way", WAYS)
def test_twenty_kills_at_random_moments(tmp_path: Path, helper: Helper, way: dict[str, Any]) -> None:
    oracle, moment = Oracle(seed=2), random.Random(5)
    for turn in range(20):
        child = helper.start(folder=tmp_path, seed=2, options=way)
        time.sleep(moment.random() * 0.15)
        helper.kill(child)
        if turn % 3:  # otherwise the next child finds what is left, and goes back itself
            check(tmp_path, oracle)
    check(tmp_path, oracle)
    assert oracle.done >= EVERY, "no checkpoint was reached: this shows nothing"


def test_another_process_cannot_open_what_is_open(tmp_path: Path, helper: Helper) -> None:
    child = helper.start(folder=tmp_path, seed=3, point="after commit", options={})
    assert helper.line() == "there"
    before = (tmp_path / "rows").read_bytes()
    for read_only in (False, True):
        with pytest.raises(ConfigError, match="another store has this file open"):
            DiskStore(tmp_path / "rows", SPEC, read_only=read_only)
    assert (tmp_path / "rows").read_bytes() == before
    helper.kill(child)
    check(tmp_path, Oracle(seed=3))
