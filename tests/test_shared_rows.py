"""Two models on the rows of one table: what one writes the other reads, in order, and neither takes the store along."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import engram
import engram.optim
from engram.config import ConfigError, EngramConfig
from engram.memory import Memory
from engram.table import ROW_FIELDS
from engram.train import snapshots

CFG = EngramConfig(hidden_size=16, layers=(0, 2), heads=2, head_dim=6, rows=61, init="normal", init_std=1.0)
OTHER = {"hidden_size": 20, "gate": "sigmoid", "conv_kernel": 0, "branches": 1, "bias": True}
"""What the second model may have of its own."""
PLACEMENTS = ("device", "host", "pinned", "disk")
VOCAB = 64


@pytest.fixture(params=PLACEMENTS)
def cfg(request: pytest.FixtureRequest, tmp_path: Path) -> EngramConfig:
    placement = str(request.param)
    return CFG.replace(placement=placement, path=str(tmp_path / "rows") if placement == "disk" else None)


def _pair(cfg: EngramConfig, train_second: bool = True, share: bool = True) -> tuple[Memory, Memory]:
    torch.manual_seed(0)
    first = Memory(cfg, 100)
    second = Memory(cfg.replace(**OTHER), 100, rows_of=first if share else None)
    for module in second.modules_by_layer():
        module.table.trainable = train_second
    return first, second


def _ids(vocabulary: int = 12) -> Tensor:
    """Few ids, so that most rows of a batch are in the next one, and in the other model's, too."""
    return torch.randint(0, vocabulary, (2, 9))


def _forward(memory: Memory, ids: Tensor) -> Tensor:
    """The loss of a model that consists of its memory layers; its inputs are a function of the ids."""
    x = (ids.unsqueeze(-1) * torch.linspace(0.1, 1.0, memory.cfg.hidden_size)).sin()
    memory.start(ids)
    for layer in memory.cfg.layers:
        x = (x + memory(layer, x)).tanh()
    return (x - 0.3).square().mean()


def _rows(memory: Memory) -> list[Tensor]:
    tables = [module.table for module in memory.modules_by_layer()]
    return [table.read(torch.arange(table.store.spec.rows)) for table in tables]


def _dense(memory: Memory) -> list[Tensor]:
    return [p.detach().clone() for p in memory.parameters() if p.numel()]


def _copy_rows(source: Memory, target: Memory) -> None:
    for ours, theirs in zip(source.modules_by_layer(), target.modules_by_layer(), strict=True):
        theirs.table.store.rows.copy_(ours.table.store.rows)


def _train(
    first: Memory, second: Memory, after_write: Callable[[Memory, Memory], None], ahead: bool = False, steps: int = 25
) -> list[float]:
    """Forward of both, backward and update of the first, then of the second; what is read was written by either."""
    torch.manual_seed(1)
    optimizers = [engram.optim.build(memory, lr=1e-2) for memory in (first, second)]
    batches = [(_ids(), _ids()) for _ in range(steps + 1)]
    losses = []
    for step in range(steps):
        pair = [_forward(memory, ids) for memory, ids in zip((first, second), batches[step], strict=True)]
        if ahead:
            for memory, ids in zip((second, first), reversed(batches[step + 1]), strict=True):
                memory.prefetch(ids)
        for index, (writer, reader) in enumerate(((first, second), (second, first))):
            pair[index].backward()
            optimizers[index].step()
            optimizers[index].zero_grad()
            after_write(writer, reader)
        losses += [float(loss.detach()) for loss in pair]
    return losses


# ---- exact order ----


@pytest.mark.parametrize("train_second", [True, False])
@pytest.mark.parametrize("ahead", [False, True])
def test_interleaved_training_equals_two_tables_kept_equal_by_hand(
    cfg: EngramConfig, ahead: bool, train_second: bool
) -> None:
    """The judge has two tables on the device and copies them after every update: nothing is shared, nothing early."""
    judges = _pair(CFG, train_second, share=False)
    expected = _train(*judges, after_write=_copy_rows)
    pair = _pair(cfg, train_second)
    assert _train(*pair, after_write=lambda *_: None, ahead=ahead) == expected
    for ours, theirs in zip(pair, judges, strict=True):
        for got, wanted in zip(_rows(ours) + _dense(ours), _rows(theirs) + _dense(theirs), strict=True):
            assert torch.equal(got, wanted)
    fetch = pair[1].stats()[0].get("fetch")
    assert (fetch is None) == (cfg.placement == "device")
    if fetch is not None:
        assert fetch["updates"] == (50 if train_second else 25), "one worker counts for both"
        assert (fetch["patched_rows"] > 0) == (fetch["ahead"] > 0) == ahead


def test_a_teacher_that_only_reads_sees_each_update_and_none_of_its_own(cfg: EngramConfig) -> None:
    student, teacher = _pair(cfg, train_second=False)
    optimizer = engram.optim.build(student, lr=1e-2)
    assert "rows" not in {group["name"] for group in engram.optim.build(teacher).param_groups}
    ids = _ids()
    seen = []
    for _ in range(3):
        teacher.prefetch(ids)  # launched before the update that it has to show
        _forward(student, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            seen.append(_forward(teacher, ids))
    assert len({float(loss) for loss in seen}) == 3
    assert [module.table.updates for module in teacher.modules_by_layer()] == [0, 0]
    loss = _forward(teacher, ids)
    loss.backward()
    assert all(module.table.proxy.grad is None for module in teacher.modules_by_layer())


def test_rows_are_frozen_in_the_second_model_until_they_are_asked_to_learn() -> None:
    first = Memory(CFG, 100)
    second = Memory(CFG.replace(**OTHER), 100, rows_of=first)
    assert [m.table.trainable for m in first.modules_by_layer()] == [True, True]
    assert [m.table.trainable for m in second.modules_by_layer()] == [False, False]
    for module in second.modules_by_layer():
        module.table.trainable = True
    before = _rows(first)
    optimizer = engram.optim.build(second, lr=1e-2)
    _forward(second, _ids()).backward()
    optimizer.step()
    assert all(not torch.equal(*pair) for pair in zip(before, _rows(first), strict=True))


def test_one_optimizer_over_both_models_applies_both_gradients(cfg: EngramConfig) -> None:
    """The same ids in both: every row is written twice a step, the second time from what the first wrote."""
    found = []
    for pair, sync in ((_pair(CFG, share=False), True), (_pair(cfg), False)):
        ids = torch.arange(18).view(2, 9) % 12
        optimizer = engram.optim.build(nn.ModuleList(pair), lr=1e-2, row_rule="sgd")
        both = [optimizer] if not sync else [engram.optim.build(memory, lr=1e-2, row_rule="sgd") for memory in pair]
        for _ in range(4):
            (_forward(pair[0], ids) + _forward(pair[1], ids)).backward()
            for index, one in enumerate(both):
                one.step()
                one.zero_grad()
                if sync:
                    _copy_rows(pair[index], pair[1 - index])
        found.append(_rows(pair[0]) + _rows(pair[1]))
    assert all(torch.equal(*rows) for rows in zip(*found, strict=True))


# ---- what must agree ----


CHANGES: dict[str, Any] = {
    "layers": (0, 1), "orders": (2, 4), "heads": 3, "head_dim": 4, "rows": 67, "compress": True, "filler": 3,
    "eos": (2,), "boundary": "none", "hash": engram.HashConfig(multipliers="splitmix64"), "seed": 1, "init": "zeros",
    "init_std": 0.5, "placement": "host", "path": "elsewhere", "row_dtype": "bf16", "prefetch": "stale",
}  # fmt: skip


def test_every_field_that_decides_rows_is_tried() -> None:
    assert set(CHANGES) == set(ROW_FIELDS)


@pytest.mark.parametrize("field", ROW_FIELDS)
def test_a_field_that_decides_rows_must_agree(field: str) -> None:
    first = Memory(CFG, 100)
    token_map = None
    if field == "compress":
        token_map = engram.TokenMap(torch.arange(100))
    with pytest.raises(ConfigError, match=rf"^{field}: .* here, .* in rows_of; models that share rows must agree"):
        Memory(CFG.replace(**{field: CHANGES[field]}), token_map=token_map, rows_of=first)
    assert Memory(CFG.replace(rows=(61, 61)), 100, rows_of=first).layer(0).table.store is first.layer(0).table.store


def test_ids_must_be_hashed_alike() -> None:
    with pytest.raises(ConfigError, match="vocab_size: the hash of layer 0 addresses other rows"):
        Memory(CFG, 101, rows_of=Memory(CFG, 100))


# ---- saving, loading, copying ----


def test_each_state_dict_is_complete_and_loading_one_is_seen_by_the_other(tmp_path: Path) -> None:
    for placement in ("device", "host"):
        first, second = _pair(CFG.replace(placement=placement))
        for name, memory in (("first", first), ("second", second)):
            save_file(memory.state_dict(), tmp_path / f"{name}.safetensors")
        assert torch.equal(load_file(tmp_path / "second.safetensors")["layers.2.table.store.rows"], _rows(first)[1])
        ids = _ids()
        with torch.no_grad():
            expected = float(_forward(second, ids))
        first.layer(0).table.write(torch.arange(200), torch.ones(200, 6))
        second.prefetch(ids)
        first.load_state_dict(load_file(tmp_path / "first.safetensors"))
        with torch.no_grad():
            assert float(_forward(second, ids)) == expected


@pytest.mark.parametrize("placement", ["device", "host"])
def test_a_load_between_forward_and_update_of_the_other_model_is_not_undone(placement: str) -> None:
    first, second = _pair(CFG.replace(placement=placement))
    zeros = {n: torch.zeros_like(t) if n.endswith("rows") else t for n, t in first.state_dict().items()}
    optimizer = engram.optim.build(second, lr=1e-2, row_rule="sgd")
    loss = _forward(second, _ids())
    first.load_state_dict(zeros)
    loss.backward()
    moved = {m.layer: m.table.proxy.grad.abs().max() for m in second.modules_by_layer()}  # type: ignore[union-attr]
    optimizer.step()
    for layer, rows in zip(CFG.layers, _rows(first), strict=True):
        assert rows.abs().max() <= 0.0501 * moved[layer], "rows are what was loaded, less one small step"
    _forward(second, _ids()).backward()
    first.load_state_dict(zeros)
    assert all(m.table.proxy.grad is None for m in second.modules_by_layer()), "a gradient of rows that are gone"


def test_stale_fetches_survive_updates_but_no_load() -> None:
    memory = Memory(CFG.replace(placement="host", prefetch="stale"), 100)
    ids = torch.arange(5)
    good = {name: tensor.clone() for name, tensor in memory.state_dict().items()}
    table = memory.layer(0).table
    assert table.fetcher is not None
    expected, ticket = table.read(ids), table.fetcher.launch(ids)
    table.write(ids, torch.ones(5, 6))
    assert torch.equal(ticket.wait(), expected)
    early = table.fetcher.launch(ids)
    memory.load_state_dict(good)
    assert torch.equal(early.wait(), expected), "the ones that it fetched are no more"


def test_one_checkpoint_holds_both_models(cfg: EngramConfig, tmp_path: Path) -> None:
    first, second = _pair(cfg)
    model = nn.ModuleList([first, second])
    _train(first, second, after_write=lambda *_: None, steps=3)
    optimizer = engram.optim.build(model, lr=1e-2)
    snapshots.save(tmp_path, model, optimizer, {"step": 3})
    written = load_file(tmp_path / "checkpoint" / "model.safetensors")
    assert sum(name.endswith("store.rows") for name in written) == (0 if cfg.placement == "disk" else 2), "once a layer"
    expected = _rows(first) + _dense(first) + _dense(second)
    _train(first, second, after_write=lambda *_: None, steps=3)  # a run that dies after its checkpoint
    assert not torch.equal(_rows(first)[0], expected[0])
    model[0].close(), model[1].close()  # type: ignore[operator]
    again = _pair(cfg)
    snapshots.load(tmp_path, nn.ModuleList(again))
    found = _rows(again[1]) + _dense(again[0]) + _dense(again[1])
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("placement", ["device", "host"])
def test_a_copy_has_rows_of_its_own_and_copies_made_together_share(placement: str) -> None:
    first, second = _pair(CFG.replace(placement=placement), train_second=False)
    alone = copy.deepcopy(second)
    one, two = copy.deepcopy(nn.ModuleList([first, second]))
    for group in ((first, second), (one, two), (alone,)):
        assert group[0].layer(0).table.common.members() == [m.layer(0).table for m in group]  # type: ignore[operator]
    before = _rows(first)
    for memory, changed in ((first, (first, second)), (one, (one, two)), (alone, (alone,))):
        memory.layer(0).table.write(torch.tensor([3]), torch.full((1, 6), 9.0))  # type: ignore[operator]
        for other in (first, second, one, two, alone):
            now = bool((_rows(other)[0][3] == 9).all())  # type: ignore[arg-type]
            assert now == (other in changed), "each write is seen where rows are shared, and nowhere else"
        memory.layer(0).table.write(torch.tensor([3]), before[0][[3]])  # type: ignore[operator]
    assert not alone.layer(0).table.trainable and one.layer(0).table.trainable  # type: ignore[operator]
    one.close(), alone.close()  # type: ignore[operator]
    assert torch.equal(_rows(two)[0], before[0])  # type: ignore[arg-type]


def test_rows_on_disk_are_not_copied(tmp_path: Path) -> None:
    _, second = _pair(CFG.replace(placement="disk", path=str(tmp_path)))
    with pytest.raises(ConfigError, match="cannot be copied"):
        copy.deepcopy(second)


# ---- moving ----


def test_rows_move_with_the_oldest_model_alone() -> None:
    first, second = _pair(CFG)
    rows = _rows(first)
    second.to("meta")
    assert torch.equal(_rows(first)[0], rows[0]), "the second model is set aside, the rows stay"
    second.to_empty(device="cpu")
    second.half()
    assert torch.equal(_rows(second)[0], rows[0]) and first.layer(0).value.weight.dtype == torch.float32
    first.to("meta")
    assert second.layer(0).table.store.rows.is_meta
    first.to_empty(device="cpu")
    assert torch.equal(_rows(second)[0], Memory(CFG, 100).layer(0).table.store.rows)
    first.close()
    second.to("meta")
    assert second.layer(0).table.store.rows.is_meta, "alone now, it takes the rows along"


def test_a_move_reaches_the_proxy_of_every_model_that_shares_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one kind of device here, so the store says that it is on another."""
    first, second = _pair(CFG)
    _forward(second, _ids()).backward()
    store, cpu, moved = first.layer(0).table.store, torch.device("cpu"), []
    monkeypatch.setattr(type(store), "device", property(lambda self: torch.device("cpu", 1) if moved else cpu))
    monkeypatch.setattr(type(store), "_apply", lambda self, fn, recurse=True: moved.append(self))
    second.layer(0).table.float()
    assert not moved and second.layer(0).table.proxy.grad is not None
    first.layer(0).table.float()
    assert moved == [store] and second.layer(0).table.proxy.grad is None


# ---- letting go ----


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_last_one_to_close_closes_the_store(cfg: EngramConfig, order: tuple[int, int]) -> None:
    pair = _pair(cfg)
    leaves, stays = pair[order[0]], pair[order[1]]
    stays.prefetch(_ids())
    leaves.close()
    leaves.close()
    _train_alone(stays)
    rows = _rows(stays)
    if cfg.placement == "device":
        return
    with pytest.raises(RuntimeError, match="memory layer 0: its worker has ended"):
        leaves.start(_ids())
    assert torch.equal(_rows(stays)[0], rows[0])
    stays.flush()
    fetcher = stays.layer(0).table.fetcher
    stays.close()
    leaves.close()
    with pytest.raises(RuntimeError, match="its worker has ended"):
        fetcher.read(torch.tensor([1]))  # type: ignore[union-attr]
    if cfg.placement == "disk":
        assert Memory(cfg, 100).layer(0).table.read(torch.tensor([1])).shape == (1, 6), "the file can be opened again"


def _train_alone(memory: Memory) -> None:
    optimizer = engram.optim.build(memory, lr=1e-2)
    _forward(memory, _ids()).backward()
    optimizer.step()
    assert all(module.table.updates for module in memory.modules_by_layer() if module.table.trainable)


def test_a_model_that_is_gone_holds_nothing_of_the_other() -> None:
    """Its prefetched forwards would otherwise make the worker patch every later update into them."""
    first, second = _pair(CFG.replace(placement="host"))
    fetcher = first.layer(0).table.fetcher
    assert fetcher is not None
    second.prefetch(_ids())
    second.start(_ids())
    first.layer(0).table.write(torch.tensor([3]), torch.ones(1, 6))
    assert [len(ticket.patches) for ticket in fetcher._open.values()] == [1, 1]
    del second
    gc.collect()
    for _ in range(20):
        _forward(first, _ids())
        first.layer(0).table.write(torch.tensor([3]), torch.ones(1, 6))
    assert not fetcher._open
    assert first.layer(0).table.common.members() == [first.layer(0).table]


def test_closing_with_fetches_under_way_keeps_no_updates() -> None:
    first, second = _pair(CFG.replace(placement="host"))
    fetcher = first.layer(0).table.fetcher
    assert fetcher is not None
    second.prefetch(_ids())
    second.start(_ids())
    second.close()
    assert not fetcher._open


# ---- in transformers models ----


@pytest.mark.parametrize("placement", ["device", "host"])
def test_a_policy_and_its_reference_share_rows(placement: str, tiny_model: Callable[..., Any]) -> None:
    cfg = EngramConfig(hidden_size=32, layers=(0, 1), heads=2, head_dim=8, rows=211, placement=placement, seed=3)
    policy, reference, small = tiny_model("llama"), tiny_model("qwen3"), tiny_model("llama", hidden_size=16)
    handle = engram.attach(policy, cfg)
    other = engram.attach(reference, cfg, rows_of=handle)
    third = engram.attach(small, cfg.replace(hidden_size=16), rows_of=handle.memory)
    optimizer = engram.optim.build(policy, lr=1e-2)
    ids = torch.randint(0, VOCAB, (2, 12))
    before = reference(ids, use_cache=False).logits.detach()
    for _ in range(3):
        other.prefetch(ids)
        policy(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.allclose(reference(ids, use_cache=False).logits, before), "its rows are the policy's, and learned"
    with other.disabled():
        assert torch.equal(reference(ids, use_cache=False).logits, before), "initial rows are zero"
    rows = handle.memory.layer(1).table.read(torch.arange(400))
    other.prefetch(ids)
    other.detach()
    fetcher = handle.memory.layer(1).table.fetcher
    assert fetcher is None or not fetcher._open
    assert torch.equal(reference(ids, use_cache=False).logits, before)
    handle.detach()
    handle.memory.close()
    del policy, handle, optimizer
    gc.collect()
    assert torch.equal(third.memory.layer(1).table.read(torch.arange(400)), rows)
    small(ids, use_cache=False)


def test_a_failed_attach_leaves_model_and_rows_alone(tiny_model: Callable[..., Any]) -> None:
    cfg = EngramConfig(hidden_size=32, layers=(0,), heads=2, head_dim=8, rows=211)
    handle, wider = engram.attach(tiny_model("llama"), cfg), tiny_model("llama", vocab_size=VOCAB + 1)
    with pytest.raises(ConfigError, match="vocab_size: the hash of layer 0"):
        engram.attach(wider, cfg, rows_of=handle)
    assert not hasattr(wider, "engram")
    gc.collect()
    assert len(handle.memory.layer(0).table.common.members()) == 1
