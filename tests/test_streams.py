"""The side stream's worker with streams that write down what they are told: order, waits, lifetimes; then exactness.

What a GPU does with it is in tests/gpu.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import engram
from engram import prefetch, streams
from engram.config import EngramConfig
from engram.memory import Memory
from engram.prefetch import Fetcher
from engram.stores import HostStore, TableSpec
from engram.streams import StreamWorker

CPU = torch.device("cpu")


class Events:
    """Stands in for torch.cuda: two streams and their events, and a list of everything that was asked of them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.finished, self.capturing = True, False
        self.clock = 0.0
        self.thread = threading.local()

    @property
    def now(self) -> str:
        """The current stream, of which every thread has its own."""
        return getattr(self.thread, "now", "main")

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

            def synchronize(self) -> None:
                events.log.append(f"the host waits for the event of {self.stream}")

            def elapsed_time(self, later: Any) -> float:
                return 1e3 * (later.at - self.at)

        return Event()

    @contextmanager
    def inside(self, stream: Any) -> Iterator[None]:
        before, self.thread.now = self.now, str(stream)
        yield
        self.thread.now = before


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    made = Events()
    monkeypatch.setattr(streams, "side_stream", lambda device, use="side": made.stream_named(use))
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


@pytest.fixture
def link(events: Events, monkeypatch: pytest.MonkeyPatch) -> Events:
    """The CPU is its own GPU: numbers of rows come over a link, and values go back."""
    monkeypatch.setattr(prefetch, "over_the_link", lambda host, gpu: gpu is not None)
    return events


def test_values_go_to_a_gpu_beside_what_it_computes(link: Events) -> None:
    """Only the row numbers wait for the stream that computes, and only the layer waits for the copy."""
    store = HostStore(TableSpec(50, 8, seed=3))
    fetcher, ids = Fetcher(store, "layer"), torch.tensor([4, 9, 4])
    ticket = fetcher.launch(ids, device=CPU)
    ticket.arrive()
    copied = ["event on side, timed"] * 2
    numbers = ["numbers waits for main", "event on numbers, not timed", "the host waits for the event of numbers"]
    assert link.log == [*numbers, *copied, "the host waits for the event of side"]
    link.log.clear()
    values = ticket.wait()
    assert link.log == [] and torch.equal(values, store.rows[ids])
    sent = ticket.sent()
    assert sent is not None and torch.equal(sent, values) and sent.data_ptr() != values.data_ptr()
    assert link.log == ["event on main, timed", "main waits for the event of side", "event on main, timed"]
    counters = fetcher.settle()
    assert counters.exposed_seconds > 0.4 and counters.fetch_seconds > 0.4  # half a second between two events
    fetcher.close()


@pytest.mark.parametrize("exact", [True, False])
def test_values_on_a_gpu_are_patched_too(exact: bool, link: Events) -> None:
    fetcher = Fetcher(HostStore(TableSpec(50, 8, seed=3)), "layer", exact=exact)
    ids = torch.tensor([4, 9, 4, 30])
    ticket = fetcher.launch(ids, ahead=True, device=CPU)
    ticket.arrive()
    fetcher.write(torch.tensor([4, 7]), torch.ones(2, 8))
    values, sent = ticket.wait(), ticket.sent()
    assert sent is not None and torch.equal(sent, values)
    assert bool((sent[[0, 2]] == 1).all()) == exact and not bool((sent[1] == 1).any())
    fetcher.write(torch.tensor([9]), torch.full((1, 8), 2.0))  # after it was handed out
    values, again = ticket.wait(), ticket.sent()
    assert again is not None and torch.equal(again, values) and bool((again[1] == 2).all()) == exact
    assert not bool((sent[1] == 2).any()), "a tensor that was handed out has changed"
    fetcher.close()


@pytest.mark.parametrize("decay", [0.0, 2.0])
def test_training_over_the_link_is_the_same_bit_for_bit(decay: float, events: Events, monkeypatch: Any) -> None:
    found = []
    for linked in (False, True):
        monkeypatch.setattr(prefetch, "over_the_link", lambda host, gpu, linked=linked: linked and gpu is not None)
        torch.manual_seed(0)
        cfg = EngramConfig(hidden_size=16, layers=(0, 1), heads=2, head_dim=4, rows=50, placement="host")
        memory = Memory(cfg, vocab_size=30)
        options = {"row_weight_decay": decay, "row_decay": "global"} if decay else {}
        optimizer = engram.optim.build(memory, lr=1e-2, **options)
        for step in range(5):
            ids = [torch.randint(0, 30, (2, 7), generator=torch.Generator().manual_seed(step + n)) for n in (0, 1)]
            memory.prefetch(ids[0])
            memory.prefetch(ids[1])
            memory.start(ids[0])
            x = torch.ones(2, 7, 16)
            for layer in cfg.layers:
                x = x + memory(layer, x)
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        memory.flush()
        fetches = memory.stats()[1]["fetch"]
        assert fetches["ahead"] == 5 and fetches["patched_rows"] > 0
        for line in ("numbers waits for main", "main waits for the event of side"):
            assert (line in events.log) == linked
        found.append({**memory.state_dict(), "x": x.detach()})
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name
