"""Fetches that fail: an error that names store, rows and cause, in the layer that waits; no zeros, no hang."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from engram.config import EngramConfig
from engram.memory import Memory
from engram.prefetch import Fetcher
from engram.stores import HostStore, TableSpec

SPEC = TableSpec(rows=500, width=12, seed=3, std=0.5)
CFG = EngramConfig(hidden_size=16, layers=(0, 2), heads=2, head_dim=6, rows=61, init="normal", init_std=1.0)


class Broken(HostStore):
    """Fails when told to."""

    failing: str | None = None

    def gather(self, ids_n: Tensor, out: Tensor | None = None) -> Tensor:
        if self.failing == "gather":
            raise OSError(5, "Input/output error")
        return super().gather(ids_n, out)

    def update(self, ids_U: Tensor, values_UW: Tensor) -> None:
        if self.failing == "update":
            raise OSError(28, "No space left on device")
        super().update(ids_U, values_UW)


def test_a_failed_gather_raises_in_the_layer_that_waits() -> None:
    memory = Memory(CFG.replace(placement="host"), 100)
    table = memory.layer(2).table
    broken = Broken(table.store.spec)
    broken.failing = "gather"
    table.fetcher = Fetcher(broken, "memory layer 2")
    memory.start(torch.randint(0, 100, (2, 9)))
    memory(0, torch.randn(2, 9, 16))
    with pytest.raises(
        RuntimeError, match=r"host store of memory layer 2: fetching rows \d+\.\.\d+ failed: OSError\(5"
    ):
        memory(2, torch.randn(2, 9, 16))


def test_a_failed_write_is_never_forgotten() -> None:
    broken = Broken(SPEC)
    fetcher = Fetcher(broken, "memory layer 1")
    broken.failing = "update"
    fetcher.write(torch.tensor([1]), torch.ones(1, 12))
    with pytest.raises(RuntimeError, match=r"writing rows failed: OSError\(28"):
        fetcher.flush()
    broken.failing = None
    for again in (fetcher.flush, lambda: fetcher.read(torch.tensor([1]))):
        with pytest.raises(RuntimeError, match="an earlier write failed"):
            again()
    other = Fetcher(broken, "memory layer 1")
    broken.failing = "update"
    other.write(torch.tensor([1]), torch.ones(1, 12))
    other._writes[0].exception()  # it has ended
    with pytest.raises(RuntimeError, match="No space left"):
        other.read(torch.tensor([2]))


def test_a_process_that_was_forked_is_told_and_does_not_hang() -> None:
    fetcher = Fetcher(HostStore(SPEC), "memory layer 1")
    fetcher._pid = -1  # as a child sees it: another process made this
    with pytest.raises(RuntimeError, match="made by process -1; build the memory in this one"):
        fetcher.launch(torch.tensor([1]))


def test_an_ended_worker_is_an_error() -> None:
    fetcher = Fetcher(HostStore(SPEC), "memory layer 1")
    fetcher._worker.shutdown()
    with pytest.raises(RuntimeError, match="host store of memory layer 1: its worker has ended"):
        fetcher.launch(torch.tensor([1]))


def test_a_lost_worker_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    from engram import prefetch

    monkeypatch.setattr(prefetch, "TIMEOUT", 0.05)
    stuck = threading.Event()
    fetcher = Fetcher(HostStore(SPEC), "memory layer 1")
    fetcher._worker.submit(stuck.wait)
    try:
        with pytest.raises(RuntimeError, match=r"fetching rows 4\.\.9 did not end within"):
            fetcher.launch(torch.tensor([9, 4])).wait()
    finally:
        stuck.set()


def test_a_row_outside_the_table_is_named_by_the_fetch() -> None:
    fetcher = Fetcher(HostStore(SPEC), "memory layer 1")
    with pytest.raises(RuntimeError, match=r"fetching rows 3\.\.500 failed: IndexError"):
        fetcher.read(torch.tensor([3, 500]))
