"""The side stream's worker with streams that write down what they are told: order, waits, lifetimes; then exactness.

What a GPU does with it is in tests/gpu.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from engram import streams
from engram.prefetch import Fetcher
from engram.stores import HostStore, TableSpec
from engram.streams import StreamWorker

CPU = torch.device("cpu")


class Events:
    """Stands in for torch.cuda: two streams and their events, and a list of everything that was asked of them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now, self.finished, self.capturing = "main", True, False
        self.clock = 0.0

    def stream_named(self, name: str) -> Any:
        events = self

        class Stream:
            def wait_stream(self, other: Any) -> None:
                events.log.append(f"{name} waits for {other}")

            def wait_event(self, event: Any) -> None:
                events.log.append(f"{name} waits for the event of {event.stream}")

            def __str__(self) -> str:
                return name

        return Stream()

    def event(self, enable_timing: bool) -> Any:
        events = self

        class Event:
            stream = ""
            at = 0.0

            def record(self, stream: Any) -> None:
                events.clock += 0.5
                self.stream, self.at = str(stream), events.clock
                events.log.append(f"event on {stream}, {'timed' if enable_timing else 'not timed'}")

            def query(self) -> bool:
                return events.finished

            def elapsed_time(self, later: Any) -> float:
                return 1e3 * (later.at - self.at)

        return Event()

    @contextmanager
    def inside(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, str(stream)
        yield
        self.now = before


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    made = Events()
    monkeypatch.setattr(streams, "side_stream", lambda device: made.stream_named("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.stream_named(made.now))
    monkeypatch.setattr(torch.cuda, "stream", made.inside)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: made.event(enable_timing))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    return made


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU and writes down who keeps its memory."""

    log: list[str]
    is_cuda = True  # type: ignore[assignment]

    def record_stream(self, stream: Any) -> None:
        self.log.append(f"kept for {stream}")


def _on_gpu(events: Events) -> OnGpu:
    tensor = torch.zeros(2).as_subclass(OnGpu)
    tensor.log = events.log
    return tensor


def test_a_call_runs_on_the_side_after_what_was_queued_and_is_waited_for_without_the_host(events: Events) -> None:
    given, made = _on_gpu(events), _on_gpu(events)

    def call(tensor: torch.Tensor) -> torch.Tensor:
        events.log.append(f"call on {events.now}")
        return made

    future = StreamWorker(CPU).submit(call, given)
    timed = "event on side, timed"
    assert events.log == ["side waits for main", timed, "call on side", timed, "kept for side"]
    events.log.clear()
    assert future.result() is made
    wait = "main waits for the event of side"
    assert events.log == ["event on main, timed", wait, "event on main, timed", "kept for main"]


def test_times_are_those_of_events_and_a_capture_takes_none(events: Events) -> None:
    worker = StreamWorker(CPU)

    def fetch() -> None:
        return None

    futures = [worker.submit(fetch) for _ in range(2)]
    events.finished = False
    assert worker.times() == {} and not futures[0].done()
    events.finished = True
    assert worker.times() == {"fetch": 1.0} and futures[0].done()  # half a second between two events
    futures[1].result()
    assert worker.times() == {"wait": 0.5} and worker.times() == {}
    events.capturing, events.log = True, []
    assert not futures[0].done(), "an event must not be queried while a graph is captured"
    worker.submit(fetch).result()
    assert all("not timed" in line for line in events.log if line.startswith("event")) and worker.times() == {}


def test_an_error_of_a_call_is_raised_where_it_is_waited_for(events: Events) -> None:
    spec = TableSpec(10, 4)
    fetcher = Fetcher(HostStore(spec), "memory layer 3", worker=StreamWorker(CPU))
    with pytest.raises(RuntimeError, match=r"host store of memory layer 3: fetching rows 2\.\.99 failed: IndexError"):
        fetcher.launch(torch.tensor([2, 99])).wait()
    fetcher.close()
    with pytest.raises(RuntimeError, match="its worker has ended"):
        fetcher.launch(torch.tensor([2]))


@pytest.mark.parametrize("exact", [True, False])
def test_fetches_ahead_are_patched_as_on_a_thread(events: Events, exact: bool) -> None:
    """A gather that runs at once, and an update after it: exact sees the update, stale what was read."""
    spec = TableSpec(50, 8, seed=3)
    found = {}
    for name, worker in (("stream", StreamWorker(CPU)), ("thread", None)):
        fetcher = Fetcher(HostStore(spec), "layer", exact=exact, worker=worker)
        ids = torch.tensor([4, 9, 4, 30])
        ahead = fetcher.launch(ids, ahead=True)
        if worker is None:
            ahead.future.result()
        fetcher.write(torch.tensor([4, 7]), torch.ones(2, 8))
        values = ahead.wait().clone()
        fetcher.flush()
        counters = fetcher.settle()
        assert (counters.ahead, counters.updates, counters.patched_rows) == (1, 1, 2 if exact else 0)
        found[name] = (values, fetcher.read(ids).clone())
        fetcher.close()
    for ours, judge in zip(found["stream"], found["thread"], strict=True):
        assert torch.equal(ours, judge)
    assert bool((found["stream"][0][0] == 1).all()) == exact and bool((found["stream"][1][0] == 1).all())
