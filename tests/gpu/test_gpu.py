"""What only a GPU can show: rows read in place over the link, graph capture, streams, the same bits in every run.

    make gpu        # runs this with everything else that needs a GPU

Every test skips itself without a CUDA device. ENGRAM_GPU_REHEARSAL=1 with TRITON_INTERPRET=1 goes through them on a CPU
as far as that goes, so that a slip of the test itself is found before a GPU is there. The kernels are compared
with plain torch in tests/triton, which runs on a GPU where there is one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import engram
from engram.backbone import BackboneConfig, build
from engram.config import EngramConfig
from engram.kernels import dispatch
from engram.stores import DeviceStore, HostStore, PinnedStore, TableSpec

GPU = torch.cuda.is_available()
REHEARSAL = not GPU and os.environ.get("ENGRAM_GPU_REHEARSAL") == "1"
DEVICE = torch.device("cuda" if GPU else "cpu")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (GPU or REHEARSAL), reason="needs a CUDA device")]
VOCABULARY = 997
CFG = EngramConfig(hidden_size=64, layers=(0, 2), orders=(2, 3), heads=4, head_dim=32, rows=5_000, init="normal")


@pytest.fixture(autouse=True)
def fresh_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ENGRAM_KERNELS", "triton")
    dispatch.choose_again()
    yield
    dispatch.choose_again()


def _model(cfg: EngramConfig, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    backbone = BackboneConfig(kind="dense", hidden_size=64, blocks=4, heads=4, ffn_width=128, max_position=256)
    model = build(backbone, VOCABULARY, seed=0).to(DEVICE, dtype)
    handle = engram.attach(model, cfg)
    for layer in handle.memory.modules_by_layer():
        nn.init.normal_(layer.value.weight, std=0.05)  # zero at the start, beside rows that are not
    return model, handle


def _ids(seed: int, length: int = 128 if GPU else 9) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (4, length), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def _train(model: nn.Module, handle: Any, steps: int, ahead: bool = False) -> list[float]:
    optimizer = engram.optim.build(model.train(), lr=3e-3)
    losses = []
    for step in range(steps):
        ids = _ids(step)
        if ahead:
            handle.prefetch(ids)
            handle.prefetch(_ids(step + 1))
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def test_the_kernels_are_in_use() -> None:
    assert "triton" in dispatch.backend()


def test_pinned_rows_are_read_and_written_in_place() -> None:
    """The self-test of the store, and then every row against the same table in pageable memory."""
    spec = TableSpec(20_000, 48, seed=5)
    pinned, host = PinnedStore(spec), HostStore(spec)
    if GPU:
        assert pinned.kind == "pinned" and pinned.reader is not None and pinned.rows.is_pinned()
    ids = torch.randint(0, spec.rows, (5_000,))
    assert torch.equal(pinned.gather(ids.to(DEVICE)).cpu(), host.gather(ids))
    new = torch.randn(64, 48)
    unique = torch.arange(0, 6_400, 100)
    pinned.update(unique.to(DEVICE), new.to(DEVICE))
    pinned.flush()
    assert torch.equal(pinned.rows[unique], new) and torch.equal(pinned.rows[1:100], host.rows[1:100])
    device = DeviceStore(spec).to(DEVICE)
    assert torch.equal(device.rows.cpu(), host.rows)


@pytest.mark.parametrize("ahead", [False, True])
def test_training_is_the_same_in_every_place(ahead: bool) -> None:
    """Rows in HBM, pinned (read in place, updated over the link, fetched a batch ahead) and pageable."""
    found = {}
    for placement in ("device", "pinned", "host"):
        model, handle = _model(CFG.replace(placement=placement))
        losses = _train(model, handle, 8 if GPU else 2, ahead)
        handle.memory.flush()
        found[placement] = (torch.tensor(losses), handle.memory.layer(2).table.store.rows.cpu().clone())
        if placement == "pinned" and GPU:
            stats = handle.stats()[2]
            assert stats["store"] == "pinned" and stats["fetch"]["fetches"] >= 8
            assert stats["fetch"]["fetch_seconds"] > 0
    for placement in ("pinned", "host"):
        torch.testing.assert_close(found[placement][0], found["device"][0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[placement][1], found["device"][1], rtol=2e-3, atol=1e-4)


def test_one_batch_ahead_is_exact() -> None:
    """Pinned rows patched after the update equal the barrier, bit for bit."""
    found = []
    for ahead in (False, True):
        model, handle = _model(CFG.replace(placement="pinned"))
        losses = _train(model, handle, 12 if GPU else 2, ahead)
        handle.memory.flush()
        found.append((losses, handle.memory.layer(0).table.store.rows.clone()))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


def test_two_runs_are_the_same_bits() -> None:
    found = []
    for _ in range(2):
        model, handle = _model(CFG.replace(row_dtype="bf16"))
        found.append((_train(model, handle, 6 if GPU else 2), [t.clone() for t in model.state_dict().values()]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.skipif(not GPU, reason="a CPU has no graphs")
@pytest.mark.parametrize("placement", ["device", "pinned"])
def test_a_forward_with_prefetch_is_captured_in_a_graph(placement: str) -> None:
    """Hash, fetch on the side stream, wait and layer in one CUDA graph, replayed with other ids."""
    model, handle = _model(CFG.replace(placement=placement))
    _train(model, handle, 2)  # writes that were queued before the capture
    model.eval()
    with torch.no_grad():
        ids = _ids(0).clone()
        wanted = [model(_ids(seed), use_cache=False).logits.clone() for seed in (1, 2)]
        assert float((wanted[0] - wanted[1]).abs().max()) > 0.1
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                model(ids, use_cache=False)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = model(ids, use_cache=False).logits
        for seed, judge in zip((1, 2), wanted, strict=True):
            ids.copy_(_ids(seed))
            graph.replay()
            torch.cuda.synchronize()
            # not the same bits: while a graph is captured transformers gives attention its mask as a tensor
            torch.testing.assert_close(logits, judge, rtol=1e-3, atol=1e-3)
            first = logits.clone()
            graph.replay()
            assert torch.equal(logits, first)


def test_a_table_past_2_to_the_31_elements() -> None:
    store = DeviceStore(TableSpec(2**25 + 100, 64, zeros=True), "bf16").to(DEVICE)
    ids = torch.tensor([0, 2**25 - 1, 2**25, 2**25 + 99], device=DEVICE)
    values = torch.randn(4, 64).bfloat16().float().to(DEVICE)
    store.update(ids, values)
    assert torch.equal(store.gather(ids), values) and not bool(store.gather(ids[1:] - 3).any())
