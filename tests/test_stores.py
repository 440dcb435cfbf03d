"""One suite for every store: the same rows, the same updates, the same trained model, bit for bit."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import engram
import engram.optim
from engram.config import ConfigError, EngramConfig
from engram.kernels.dispatch import BufferPool
from engram.memory import Memory
from engram.prefetch import Fetcher, patch, patch_on_gpu
from engram.stores import DeferredDiskStore, DeviceStore, HostStore, PinnedStore, TableSpec
from engram.stores.device import CPU_CHUNK
from engram.stores.formats import get_format

STORES: dict[str, Callable[[TableSpec, Path], Any]] = {
    "device": lambda spec, _: DeviceStore(spec),
    "host": lambda spec, _: HostStore(spec),
    "pinned": lambda spec, _: PinnedStore(spec),
    "disk": lambda spec, folder: DeferredDiskStore(folder / f"{spec.rows}.safetensors", spec, "test"),
}
SPEC = TableSpec(rows=500, width=12, seed=3, std=0.5)
CFG = EngramConfig(hidden_size=16, layers=(0, 2), heads=2, head_dim=6, rows=61, init="normal", init_std=1.0)


@pytest.fixture(params=STORES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store(kind: str, tmp_path: Path) -> Any:
    return STORES[kind](SPEC, tmp_path)


def test_rows_start_with_the_same_bits_everywhere(store: Any) -> None:
    ids = torch.tensor([0, 499, 3, 3, 250])
    assert torch.equal(store.gather(ids), SPEC.initial(ids))


def test_rows_made_in_chunks_are_those_made_at_once() -> None:
    spec = TableSpec(rows=2 * CPU_CHUNK // 12 + 7, width=12, seed=3, std=0.5)
    assert torch.equal(DeviceStore(spec).rows, spec.initial(torch.arange(spec.rows)))


def test_random_gathers_and_updates_equal_a_plain_tensor(store: Any) -> None:
    oracle = SPEC.initial(torch.arange(500))
    for _ in range(30):
        ids = torch.randint(0, 500, (40,))
        out = torch.empty(40, 12)
        assert torch.equal(store.gather(ids), oracle[ids])
        assert store.gather(ids, out) is out and torch.equal(out, oracle[ids])
        unique, values = torch.unique(ids), torch.randn(len(torch.unique(ids)), 12)
        store.update(unique, values)
        oracle[unique] = values
    store.flush()
    assert torch.equal(store.gather(torch.arange(500)), oracle)
    assert sum(store.bytes_held().values()) >= 500 * 12 * 4


def test_a_row_outside_the_table_is_an_error(store: Any) -> None:
    for bad in (500, -1):
        with pytest.raises(IndexError):
            store.gather(torch.tensor([bad]))


def test_zeros_and_empty_requests(kind: str, tmp_path: Path) -> None:
    zeros = STORES[kind](TableSpec(7, 3, zeros=True), tmp_path)
    assert not zeros.gather(torch.arange(7)).any()
    assert zeros.gather(torch.empty(0, dtype=torch.int64)).shape == (0, 3)
    zeros.update(torch.empty(0, dtype=torch.int64), torch.empty(0, 3))


def test_pinned_rows_without_a_device_stay_pageable_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine can pin")
    with caplog.at_level(logging.WARNING, logger="engram"):
        pinned = PinnedStore(SPEC)
    assert pinned.kind == "host" and len(caplog.records) == 1
    assert "24,000 bytes asked, 0 got (there is no CUDA device)" in caplog.text and "ulimit -l" in caplog.text


def test_the_self_test_of_pinned_rows_takes_any_table_and_any_default_device() -> None:
    """Row numbers beyond 2^24, and a model that is built under the context of its device."""
    store = PinnedStore(TableSpec(2**25 + 4, 1, zeros=True))
    with torch.device("meta"):
        store.self_test()
    store.rows[-1] = torch.nan  # the last row is among those that are read
    with pytest.raises(RuntimeError, match=f"row {2**25 + 3} came back different"):
        store.self_test()


def test_a_refused_registration_unlocks_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    from engram.stores import host

    calls: list[tuple[str, int]] = []

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            calls.append(("lock", size))
            return 0 if len(calls) < 3 else 2

        def cudaHostUnregister(self, address: int) -> None:
            calls.append(("unlock", address))

    monkeypatch.setattr(host, "REGISTER_CHUNK", 8192)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime())
    rows, launches = host.anonymous(500, 12), []

    def launch(*size: int, device: str) -> None:
        launches.append(device)
        raise RuntimeError("CUDA error: invalid argument")  # torch reports an old error at its next launch

    monkeypatch.setattr(torch, "zeros", launch)
    got, why = host.register(rows)
    assert got == 16_384 and "says 2" in why and [c[0] for c in calls] == ["lock"] * 3 + ["unlock"] * 2
    assert launches == ["cuda"], "the refused call's error must not wait for somebody else's launch"


def test_a_table_larger_than_the_machine_is_refused_before_it_is_made() -> None:
    with pytest.raises(ConfigError, match=r"needs 40,000,000,000,000 bytes .* use placement 'disk'"):
        HostStore(TableSpec(10**12, 10, zeros=True))


def test_host_rows_stay_where_they_are_and_are_saved_with_the_model() -> None:
    cfg = CFG.replace(placement="host")
    memory, other = Memory(cfg, 100), Memory(cfg.replace(init="zeros"), 100)
    rows = memory.layer(0).table.store.rows
    memory.half().to("cpu")
    assert memory.layer(0).table.store.rows is rows and rows.dtype == torch.float32
    other.load_state_dict(memory.state_dict())
    assert torch.equal(other.layer(2).table.store.rows, memory.layer(2).table.store.rows)
    with torch.device("meta"):
        late = Memory(cfg, 100)
    late.to_empty(device="cpu")
    assert torch.equal(late.layer(0).table.store.rows, rows)
    assert memory.layer(0).table.store.huge_page_bytes() >= 0


def test_buffers_are_reused_only_when_nothing_refers_to_them() -> None:
    pool = BufferPool()
    first = pool.take(100, 8)
    address = first.data_ptr()
    view = first.flatten()[:10]
    del first
    second = pool.take(100, 8)
    assert second.data_ptr() != address, "a view still holds the first"
    del view
    assert pool.take(90, 8).data_ptr() == address
    held = pool.held
    for _ in range(50):
        pool.take(100, 8)
    assert pool.held == held
    assert pool.take(0, 8).shape == (0, 8)


# ---- training through a store ----


def _train(
    placement: str,
    path: Path | None = None,
    steps: int = 50,
    ahead: str = "no",
    accumulate: int = 1,
    prefetch: str = "exact",
    row_dtype: str = "fp32",
) -> tuple[Memory, list[float]]:
    """A small model trained for `steps`; `ahead` prefetches the next batch "before" the step or "after" its update."""
    torch.manual_seed(0)
    memory = Memory(
        CFG.replace(placement=placement, prefetch=prefetch, path=path and str(path), row_dtype=row_dtype), 100
    )
    mix = torch.nn.Linear(16, 16)
    model = torch.nn.ModuleList([memory, mix])
    optimizer = engram.optim.build(model, lr=1e-2)
    embed = torch.randn(100, 16)
    # few ids: most rows of a batch are in the next one too
    batches = [torch.randint(0, 12, (2, 9)) for _ in range(steps * accumulate + 1)]
    losses = []
    for step in range(steps):
        for part in range(accumulate):
            index = step * accumulate + part
            memory.start(batches[index])
            if ahead == "before":
                memory.prefetch(batches[index + 1])
            x = embed[batches[index]]
            for layer in CFG.layers:
                x = mix(x + memory(layer, x)).tanh()
            loss = (x - 0.3).square().mean()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if ahead == "after":
            memory.prefetch(batches[(step + 1) * accumulate])
        losses.append(float(loss.detach()))
    memory.flush()
    return memory, losses


def _state(memory: Memory) -> dict[str, Tensor]:
    """Everything that was trained, rows on disk included."""
    state = dict(memory.state_dict())
    for module in memory.modules_by_layer():
        every = torch.arange(module.table.store.spec.rows)
        state[f"layers.{module.layer}.table.store.rows"] = module.table.read(every)
    return state


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("ahead", ["no", "before", "after"])
@pytest.mark.parametrize("placement", ["host", "pinned", "disk"])
def test_training_through_a_store_equals_the_device_bit_for_bit(
    placement: str, ahead: str, accumulate: int, tmp_path: Path
) -> None:
    """`after` is the barrier mode: nothing is fetched before the update it depends on."""
    expected, expected_losses = _train("device", accumulate=accumulate)
    memory, losses = _train(placement, tmp_path, ahead=ahead, accumulate=accumulate)
    assert losses == expected_losses
    theirs = _state(memory)
    for name, tensor in _state(expected).items():
        assert torch.equal(theirs[name], tensor), name
    for stats in memory.stats().values():
        fetch = stats["fetch"]
        assert fetch["updates"] == 50 and fetch["bytes"] == fetch["rows"] * 6 * 4 and fetch["fetch_seconds"] > 0
        assert (fetch["ahead"] > 0) == (ahead != "no")
        assert (fetch["patched_rows"] > 0) == (ahead == "before"), "rows in both batches were patched"


@pytest.mark.parametrize("placement", ["host", "disk"])
def test_bf16_rows_train_to_the_same_bits_in_every_store(placement: str, tmp_path: Path) -> None:
    expected, expected_losses = _train("device", row_dtype="bf16")
    memory, losses = _train(placement, tmp_path, ahead="before", row_dtype="bf16")
    assert losses == expected_losses and losses != _train("device")[1]
    for module, other in zip(memory.modules_by_layer(), expected.modules_by_layer(), strict=True):
        rows = other.table.store.rows
        assert rows.dtype == torch.bfloat16
        assert torch.equal(module.table.read(torch.arange(len(rows))), rows.float())
        other.half().to(torch.float32)
        assert other.table.store.rows.dtype == torch.bfloat16


def test_small_updates_of_bf16_rows_are_not_lost() -> None:
    """Steps of a thousandth of a value: rounding to the nearest would leave every row where it was."""
    memory = Memory(CFG.replace(row_dtype="bf16"), 100)
    optimizer = engram.optim.build(memory, lr=1e-3, row_lr_multiplier=1.0)
    table, ids = memory.layer(0).table, torch.arange(40)
    table.write(ids, torch.ones(40, 6))
    for _ in range(100):
        table(ids.view(1, 1, -1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = table.store.rows[:40].float()
    assert (moved != 1).all(dim=1).sum() == 40 and abs(float(moved.mean()) - 0.9) < 0.01


def test_stale_prefetch_is_another_training_run() -> None:
    _, exact_losses = _train("host", ahead="before")
    stale, stale_losses = _train("host", ahead="before", prefetch="stale")
    assert stale_losses != exact_losses and stale.stats()[0]["fetch"]["patched_rows"] == 0


def test_a_prefetch_for_another_batch_is_not_used() -> None:
    memory = Memory(CFG.replace(placement="host"), 100)
    a, b = torch.randint(0, 100, (2, 9)), torch.randint(0, 100, (2, 9))
    memory.prefetch(a)
    memory.start(b)
    x = torch.randn(2, 9, 16)
    memory(0, x), memory(2, x)
    assert torch.equal(memory.layer(0).taps["rows"], memory.layer(0).hash.rows(b))
    assert memory.stats()[0]["fetch"]["ahead"] == 0
    memory.prefetch(b.clone())
    memory.start(b)
    memory(0, x), memory(2, x)
    assert memory.stats()[0]["fetch"]["ahead"] == 1
    for _ in range(5):  # never taken: the oldest are dropped, and updates are not kept for them
        memory.prefetch(torch.randint(0, 100, (2, 9)))
    fetcher = memory.layer(0).table.fetcher
    assert fetcher is not None and len(memory._ahead) == 2 and len(fetcher._open) == 2


def test_interleaved_forwards_and_no_grad_forwards_keep_their_rows() -> None:
    device, host = (Memory(CFG.replace(placement=placement), 100) for placement in ("device", "host"))
    host.load_state_dict(device.state_dict())
    x = torch.randn(2, 9, 16)
    a, b = torch.randint(0, 100, (2, 9)), torch.randint(0, 100, (2, 9))
    gradients = []
    for memory in (device, host):
        first, second = memory.start(a), memory.start(b)
        with torch.no_grad():
            memory(0, x, second)
        total = memory(0, x, first).sum() + 2 * memory(0, x, second).sum() + memory(2, x, first).sum()
        total.backward()
        proxy = memory.layer(0).table.proxy
        gradients.append((proxy.row_ids, proxy.grad, memory.layer(0).value.weight.grad))  # type: ignore[union-attr]
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.equal(ours, theirs)  # type: ignore[arg-type]


def test_one_step_trained_again_and_again_reads_the_rows_it_wrote() -> None:
    """Overfitting one batch, closures of line searches: the fetched values are used once, not for ever."""
    ids, x = torch.randint(0, 100, (2, 9)), torch.randn(2, 9, 16)
    found = []
    for placement in ("device", "host"):
        torch.manual_seed(0)
        memory = Memory(CFG.replace(placement=placement), 100)
        optimizer = engram.optim.build(memory, lr=1e-2)
        memory.start(ids)
        losses = []
        for _ in range(6):
            loss = (memory(0, x) + memory(2, x)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        memory.flush()
        found.append((losses, memory.layer(0).table.store.rows.clone()))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


def test_two_backwards_with_an_update_between_do_not_lose_it() -> None:
    ids, x = torch.randint(0, 100, (2, 9)), torch.randn(2, 9, 16)
    found = []
    for placement in ("device", "host"):
        torch.manual_seed(0)
        memory = Memory(CFG.replace(placement=placement), 100)
        optimizer = engram.optim.build(memory, lr=1e-2)
        memory.start(ids)
        first, second = memory(0, x).square().sum(), memory(0, x).sum()
        for loss in (first, second):
            loss.backward(retain_graph=True)
            for p in memory.parameters():
                if p.numel():
                    p.grad = None  # dense parameters stay, as their graph demands
            optimizer.step()
            optimizer.zero_grad()
        memory.flush()
        found.append(memory.layer(0).table.store.rows.clone())
    assert torch.equal(*found)


def test_a_loaded_state_replaces_what_was_fetched_or_is_being_written() -> None:
    memory = Memory(CFG.replace(placement="host"), 100)
    ids, x = torch.randint(0, 100, (2, 9)), torch.randn(2, 9, 16)
    good = {name: tensor.clone() for name, tensor in memory.state_dict().items()}
    expected = memory.layer(0).table.read(torch.arange(20))
    table = memory.layer(0).table
    table.write(torch.arange(20), torch.full((20, 6), 7.0))
    memory.prefetch(ids)
    memory.load_state_dict(good)
    assert torch.equal(table.read(torch.arange(20)), expected)
    memory.start(ids)
    with torch.no_grad():
        fetched = memory(0, x)
        memory.start(ids)
        assert torch.equal(memory(0, x), fetched)


def test_forwards_that_end_early_keep_no_writes() -> None:
    memory = Memory(CFG.replace(placement="host"), 100)
    memory.start(torch.randint(0, 100, (2, 9)))  # no layer is reached: out of memory in block 0, say
    fetcher = memory.layer(0).table.fetcher
    assert fetcher is not None
    for _ in range(20):
        memory.start(torch.randint(0, 100, (2, 9)))
        memory(0, torch.randn(2, 9, 16)), memory(2, torch.randn(2, 9, 16))
        memory.layer(0).table.write(torch.tensor([3]), torch.ones(1, 6))
    assert len(fetcher._open) <= 1


def test_a_model_with_host_rows_can_be_copied() -> None:
    memory = Memory(CFG.replace(placement="host"), 100)
    memory.prefetch(torch.randint(0, 100, (2, 9)))
    memory.start(torch.randint(0, 100, (2, 9)))
    copied = copy.deepcopy(memory)
    ids, x = torch.randint(0, 100, (2, 9)), torch.randn(2, 9, 16)
    for one in (memory, copied):
        one.start(ids)
    assert torch.equal(memory(0, x), copied(0, x))
    copied.layer(0).table.write(torch.tensor([1]), torch.ones(1, 6))
    copied.flush()
    assert not torch.equal(copied.layer(0).table.store.rows, memory.layer(0).table.store.rows)


def test_patching_overwrites_exactly_the_common_rows() -> None:
    values = torch.zeros(5, 2)
    new = torch.tensor([[1.0, 1], [2, 2], [3, 3]])
    found, put = patch(values, torch.tensor([7, 3, 9, 3, 100]), torch.tensor([3, 8, 9]), new)
    assert found.tolist() == [1, 2, 3] and put[:, 0].tolist() == [1, 3, 1]
    assert values[:, 0].tolist() == [0, 1, 3, 1, 0]
    none = torch.empty(0, dtype=torch.int64)
    assert not len(patch(values, none, torch.tensor([3]), torch.ones(1, 2))[0])
    assert not len(patch(values, torch.tensor([7]), none, torch.ones(0, 2))[0])
    near = torch.tensor([3 + 64, 3 + 2**40, 8 + 4096, 2**62 + 9, 2])  # the same last bits are another row
    assert not len(patch(values, near, torch.tensor([3, 8, 9]), new)[0])
    for _ in range(5):
        ids_U, ids_n = torch.randint(0, 3000, (500,)).unique(), torch.randint(0, 3000, (800,))
        values, new = torch.randn(800, 3), torch.randn(len(ids_U), 3)
        lookup = dict(zip(ids_U.tolist(), new, strict=True))
        expected = torch.stack([lookup.get(row, old) for row, old in zip(ids_n.tolist(), values.clone(), strict=True)])
        on_a_gpu = values.clone()
        assert patch_on_gpu(on_a_gpu, ids_n, ids_U, new) == sum(row in lookup for row in ids_n.tolist()) > 50
        found, put = patch(values, ids_n, ids_U, new)
        assert torch.equal(values, expected) and torch.equal(on_a_gpu, expected)
        assert [int(n) for n in found] == [n for n, row in enumerate(ids_n.tolist()) if row in lookup]
        assert torch.equal(put, expected[found])


def test_rows_are_patched_before_a_slow_write_and_no_layer_waits_for_it() -> None:
    store, release, written = HostStore(SPEC), threading.Event(), threading.Event()
    plain = store.update

    def slow(ids_U: Tensor, values_UW: Tensor) -> None:
        release.wait(5)
        plain(ids_U, values_UW)
        written.set()

    store.update = slow  # type: ignore[method-assign]
    fetcher = Fetcher(store, "memory layer 1")
    ids, before = torch.tensor([5, 3, 5, 8]), store.gather(torch.tensor([5, 3, 5, 8]))
    ticket, dropped = fetcher.launch(ids, ahead=True), fetcher.launch(ids, ahead=True)
    fetcher.write(torch.tensor([2, 5]), torch.ones(2, 12))
    dropped.drop()
    try:
        found = ticket.wait()
        assert torch.equal(found, torch.where(ids.unsqueeze(1) == 5, 1.0, before)) and not written.is_set()
        assert torch.equal(dropped.wait(), found), "dropped after the write, so it has been patched, too"
        assert fetcher.counters.patched_rows == 4
        fetcher.write(torch.tensor([8]), torch.ones(1, 12))
    finally:
        release.set()
    assert ticket.wait()[3].eq(1).all() and dropped.wait()[3].eq(1).all(), "what was handed out is read again"
    fetcher.close()


def test_rows_on_disk_belong_to_one_hash_and_need_a_folder(tmp_path: Path) -> None:
    on_disk = CFG.replace(placement="disk", path=str(tmp_path))
    first = Memory(on_disk, 100)
    first.layer(0).table.write(torch.tensor([1]), torch.ones(1, 6))
    first.flush()
    for module in first.modules_by_layer():
        module.table.store.close()
    again = Memory(on_disk, 100)
    assert again.layer(0).table.read(torch.tensor([1])).shape == (1, 6)
    again.layer(0).table.store.close()
    with pytest.raises(RuntimeError, match="identity"):
        Memory(on_disk.replace(seed=5), 100).layer(0).table.read(torch.tensor([1]))
    with pytest.raises(ConfigError, match="needs the folder"):
        Memory(CFG.replace(placement="disk"), 100)
    with pytest.raises(ConfigError, match="cannot be copied"):
        copy.deepcopy(again)


def test_quantised_rows_on_disk_are_read_and_stay_frozen(tmp_path: Path) -> None:
    cfg = CFG.replace(placement="disk", path=str(tmp_path), row_dtype="int8")
    memory = Memory(cfg, 100)
    table, exact = memory.layer(0).table, Memory(CFG, 100).layer(0).table
    ids = torch.arange(20)
    codec = get_format("int8", 6)
    assert torch.equal(table.read(ids), codec.decode(codec.encode(exact.read(ids)))) and not table.trainable
    with pytest.raises(ConfigError, match="cannot be trained"):
        table.trainable = True
