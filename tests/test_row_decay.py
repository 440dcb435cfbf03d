"""Decay of all rows at once: what a dense matrix would do under AdamW, with one number instead of the table."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import engram.optim
from engram.config import ConfigError, EngramConfig
from engram.memory import Memory
from engram.stores import TableSpec
from engram.table import SMALLEST_SCALE, Table
from engram.train import snapshots

CFG = EngramConfig(hidden_size=16, layers=(0, 2), heads=2, head_dim=6, rows=61, init="normal", init_std=1.0)
PLACEMENTS = ("device", "host", "pinned", "disk")
RATE = 0.05


@pytest.fixture(params=PLACEMENTS)
def cfg(request: pytest.FixtureRequest, tmp_path: Path) -> EngramConfig:
    placement = str(request.param)
    return CFG.replace(placement=placement, path=str(tmp_path / "rows") if placement == "disk" else None)


def _all(table: Table) -> Tensor:
    return table.read(torch.arange(table.store.spec.rows))


class Judge:
    """The whole table in float64, all of it decayed at each step, and the rules with their state written out."""

    def __init__(self, spec: TableSpec, rule: str, weight: float) -> None:
        self.rows = spec.initial(torch.arange(spec.rows)).double().requires_grad_()
        self.rule, self.weight, self.steps = rule, weight, 0
        self.m, self.v = torch.zeros_like(self.rows), torch.zeros_like(self.rows)
        self.square = torch.zeros(spec.rows, dtype=torch.float64)

    @torch.no_grad()
    def step(self, lr: float, beta1: float = 0.9, beta2: float = 0.99, eps: float = 1e-8) -> None:
        assert self.rows.grad is not None
        self.steps += 1
        grad, touched = self.rows.grad, self.rows.grad.any(dim=1)
        self.rows *= 1 - lr * self.weight
        square, g = grad.square().mean(dim=1)[touched], grad[touched]
        if self.rule == "sgd":
            update = g
        elif self.rule == "adam":
            self.m[touched] = beta1 * self.m[touched] + (1 - beta1) * g
            self.v[touched] = beta2 * self.v[touched] + (1 - beta2) * g.square()
            scale = (1 - beta2**self.steps) ** 0.5 / (1 - beta1**self.steps)
            update = scale * self.m[touched] / (self.v[touched].sqrt() + eps)
        else:
            old = self.square[touched]
            kept = torch.where(old == 0, square, beta2 * old + (1 - beta2) * square)
            self.square[touched] = kept if self.rule == "rowwise_adam" else old + square
            update = g / (self.square[touched].sqrt() + eps).unsqueeze(1)
        self.rows[touched] -= lr * update
        self.rows.grad = None


def _rate(step: int) -> float:
    return RATE * (0.2 + 0.8 * ((step * 7) % 10) / 10)


def _batch(step: int) -> Tensor:
    """A few rows, some in every batch; rows 200 and above are first touched late, those from 260 on never."""
    late = torch.randint(200, 260, (3,)) if step > 40 else torch.randint(0, 20, (3,))
    return torch.cat([torch.randint(0, 20, (8,)), late])


def _distance(values_nW: Tensor, step: int) -> Tensor:
    target = torch.linspace(-1, 1, values_nW.shape[1]).to(values_nW) * (1 + step % 3)
    return (values_nW - target).square().mean()


# ---- exact ----


@pytest.mark.parametrize("rule", engram.optim.RULES)
@pytest.mark.parametrize("weight", [0.3, 12.0])
def test_training_is_a_dense_float64_table_that_decays_as_a_whole(
    cfg: EngramConfig, rule: engram.optim.RowRule, weight: float
) -> None:
    """Losses and every row, under a schedule. With weight 12 rows lose up to 60 % a step: stored rows take it up."""
    torch.manual_seed(0)
    table = Table(cfg, 0)
    judge = Judge(table.store.spec, rule, weight)
    optimizer = engram.optim.build(
        table, lr=RATE, row_lr_multiplier=1.0, row_rule=rule, row_weight_decay=weight, row_decay="global"
    )
    for step in range(80):
        ids = _batch(step)
        optimizer.param_groups[0]["lr"] = _rate(step)
        ours = _distance(table(ids.view(1, 1, -1)).view(-1, 6), step)
        theirs = _distance(judge.rows[ids], step)
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-5, atol=1e-7)
        ours.backward()
        theirs.backward()
        optimizer.step()
        optimizer.zero_grad()
        judge.step(_rate(step))
        if step % 20 == 19:
            torch.testing.assert_close(_all(table).double(), judge.rows.detach(), rtol=2e-5, atol=2e-6)
    taken_up = table.scale / _kept_of(80, weight)
    assert SMALLEST_SCALE <= table.scale < 1 and taken_up == pytest.approx(2.0 ** round(math.log2(taken_up)))
    assert (taken_up > 2) == (weight > 1), "stored rows took a power of two up, once or never"
    table.catch_up()
    table.flush()
    assert table.scale == 1
    torch.testing.assert_close(_all(table).double(), judge.rows.detach(), rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(table.store.gather(torch.arange(table.store.spec.rows)), _all(table), rtol=0, atol=0)


def _kept_of(steps: int, weight: float) -> float:
    return math.prod(1 - _rate(step) * weight for step in range(steps))


def test_the_scale_is_the_product_of_all_steps() -> None:
    table = Table(CFG, 0)
    optimizer = _optimizer(table, lr=RATE / 5, weight=0.3)
    for step in range(50):
        optimizer.param_groups[0]["lr"] = _rate(step)
        _touch(table, [1, 2])
        optimizer.step()
        optimizer.zero_grad()
    assert table.scale == pytest.approx(_kept_of(50, 0.3), rel=1e-12)
    untouched = torch.arange(100, 150)
    assert torch.equal(table.stored(untouched), table.store.spec.initial(untouched)), "no row is written for decay"
    assert torch.equal(table.read(untouched), table.store.spec.initial(untouched) * table.scale)


def _optimizer(model: torch.nn.Module, lr: float, weight: float, **options: Any) -> engram.optim.EngramOptimizer:
    return engram.optim.build(model, lr=lr, row_weight_decay=weight, row_decay="global", **options)


def _touch(table: Table, ids: list[int], grad: float = 0.0) -> None:
    values = table(torch.tensor(ids).view(1, 1, -1))
    values.backward(torch.full_like(values, grad))


# ---- the three modes ----


def test_none_touched_and_global_decay_what_they_say() -> None:
    for weight, decay, factors in ((0.0, "global", (1, 1)), (2.0, "touched", (0.9, 1)), (2.0, "global", (0.9, 0.9))):
        table = Table(CFG, 0)
        before = _all(table)
        optimizer = engram.optim.build(table, lr=0.01, row_weight_decay=weight, row_decay=decay)  # type: ignore[arg-type]
        _touch(table, [4])
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()  # as with AdamW: without a gradient for it a table does not decay
        torch.testing.assert_close(_all(table)[4], before[4] * factors[0])
        torch.testing.assert_close(_all(table)[5:], before[5:] * factors[1])


def test_a_decay_that_turns_signs_is_refused_before_anything_changes() -> None:
    with pytest.raises(ConfigError, match=r"row_weight_decay: 20\.0 at a learning rate of 0\.05 for rows takes 1\.0"):
        engram.optim.build(Table(CFG, 0), lr=0.01, row_weight_decay=20.0)
    with pytest.raises(ConfigError, match="row_decay: 'all'"):
        engram.optim.build(Table(CFG, 0), row_decay="all")  # type: ignore[arg-type]
    memory = Memory(CFG, 100)
    optimizer = _optimizer(memory, lr=0.01, weight=10.0)
    optimizer.param_groups[-1]["lr"] = 0.2
    before = copy.deepcopy(memory.state_dict())
    _loss(memory, _ids()).backward()
    with pytest.raises(ConfigError, match=r"row_weight_decay: 10\.0 at a learning rate of 0\.2 "):
        optimizer.step()
    assert all(torch.equal(before[name], tensor) for name, tensor in memory.state_dict().items())


def test_states_saved_before_there_was_a_choice_decay_touched_rows() -> None:
    table = Table(CFG, 0)
    optimizer = engram.optim.build(table, lr=0.01, row_weight_decay=2.0)
    packed = optimizer.state_dict()
    del packed["param_groups"][0]["row_decay"]
    optimizer.load_state_dict(packed)
    _touch(table, [4])
    optimizer.step()
    assert table.scale == 1


# ---- every store, every way of training: the same bits ----


def _ids(vocabulary: int = 12) -> Tensor:
    return torch.randint(0, vocabulary, (2, 9))


def _loss(memory: Memory, ids: Tensor) -> Tensor:
    x = (ids.unsqueeze(-1) * torch.linspace(0.1, 1.0, memory.cfg.hidden_size)).sin()
    memory.start(ids)
    for layer in memory.cfg.layers:
        x = (x + memory(layer, x)).tanh()
    return (x - 0.3).square().mean()


def _train(
    memory: Memory, optimizer: engram.optim.EngramOptimizer, batches: list[Tensor], ahead: bool = False, parts: int = 1
) -> list[float]:
    losses = []
    for index in range(0, len(batches) - parts, parts):
        for part in range(parts):
            loss = _loss(memory, batches[index + part])
            if ahead:
                memory.prefetch(batches[index + part + 1])
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    memory.flush()
    return losses


def _trained(cfg: EngramConfig, weight: float, **how: Any) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(0)
    memory = Memory(cfg, 100)
    optimizer = _optimizer(memory, lr=1e-2, weight=weight)
    losses = _train(memory, optimizer, [_ids() for _ in range(61)], **how)
    return losses, [_all(module.table) for module in memory.modules_by_layer()]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("placement", ["host", "disk"])
@pytest.mark.parametrize(
    ("weight", "row_dtype", "parts"), [(0.5, "fp32", 1), (14.0, "fp32", 1), (14.0, "bf16", 1), (14.0, "bf16", 3)]
)
def test_every_store_trains_to_the_same_bits(
    placement: str, ahead: bool, weight: float, row_dtype: str, parts: int, tmp_path: Path
) -> None:
    """With weight 14 a step keeps 0.3 of a row, and stored rows are rewritten while the next batch is prefetched."""
    expected_losses, expected = _trained(CFG.replace(row_dtype=row_dtype), weight, parts=parts)
    cfg = CFG.replace(row_dtype=row_dtype, placement=placement, path=str(tmp_path) if placement == "disk" else None)
    losses, rows = _trained(cfg, weight, parts=parts, ahead=ahead)
    assert losses == expected_losses and all(torch.equal(*pair) for pair in zip(rows, expected, strict=True))
    assert losses != _trained(CFG.replace(row_dtype=row_dtype), 0.0, parts=parts)[0]


def test_stale_fetches_are_of_the_scale_they_are_used_with() -> None:
    """What was read before stored rows took the scale up is read again; a decay alone leaves it valid."""
    for decay, fresh in ((0.5, False), (SMALLEST_SCALE / 2, True)):
        table = Table(CFG.replace(placement="host", prefetch="stale"), 0)
        ids, before = torch.arange(5), table.read(torch.arange(5))
        assert table.fetcher is not None
        ticket = table.fetcher.launch(ids)
        table.write(torch.tensor([1]), torch.zeros(1, 6), decay=decay)
        expected = before * decay
        expected[1] *= not fresh
        found = table(ids.view(1, 1, 5), ticket).view(5, 6)
        assert torch.equal(found.detach(), expected)


def test_taking_the_scale_up_keeps_no_copy_of_the_table_and_writes_no_zeros(tmp_path: Path) -> None:
    cfg = CFG.replace(placement="disk", path=str(tmp_path), init="zeros")
    table = Table(cfg, 0)
    assert table.fetcher is not None
    table.write(torch.tensor([3, 9]), torch.ones(2, 6))
    ticket = table.fetcher.launch(torch.arange(20))
    table.write(torch.tensor([4]), torch.ones(1, 6), decay=SMALLEST_SCALE / 2)
    assert not ticket.patches, "nor is the table patched into what will be read again"
    expected = torch.zeros(20, 6)
    expected[[3, 9]], expected[4] = SMALLEST_SCALE / 2, 1
    assert torch.equal(table(torch.arange(20).view(1, 1, 20), ticket).view(20, 6).detach(), expected)
    table.flush()
    assert table.store.open().rows_touched() == 3
    table.close()


def test_small_decay_of_bf16_rows_is_not_lost() -> None:
    """1,000 steps of a 5,000th: rounded to the nearest bf16 number at each, a row would stay where it is."""
    table = Table(CFG.replace(row_dtype="bf16"), 0)
    before = _all(table)
    optimizer = _optimizer(table, lr=1e-3, weight=0.04)
    for _ in range(1000):
        _touch(table, list(range(50)))
        optimizer.step()
        optimizer.zero_grad()
    expected = (1 - 5e-3 * 0.04) ** 1000
    assert torch.equal(table.stored(torch.arange(50, 200)), before[50:200]), "an untouched row is not rounded at all"
    for part, precision in ((slice(50, None), 1e-6), (slice(50), 1e-3)):
        kept = _all(table)[part].abs().sum() / before[part].abs().sum()
        assert float(kept) == pytest.approx(expected, rel=precision)


def test_a_recomputed_or_repeated_forward_sees_the_same_values() -> None:
    """A ticket hands its rows out again: the scale must not be multiplied into them."""
    memory = Memory(CFG.replace(placement="host"), 100)
    optimizer = _optimizer(memory, lr=1e-2, weight=5.0)
    _train(memory, optimizer, [_ids() for _ in range(4)])
    step, x = memory.start(_ids()), torch.randn(2, 9, 16)
    assert torch.equal(memory(0, x, step), memory(0, x, step))


# ---- saving, loading, moving, sharing ----


@pytest.mark.parametrize("rule", engram.optim.RULES)
def test_a_resumed_run_is_bit_identical(cfg: EngramConfig, rule: engram.optim.RowRule, tmp_path: Path) -> None:
    """The state is saved as it is, rows, scale and all: no checkpoint changes what is trained."""
    batches, memory = [_ids() for _ in range(31)], Memory(CFG, 100)
    start = copy.deepcopy({n: t for n, t in memory.state_dict().items() if "rows" not in n})
    expected = _train(memory, _optimizer(memory, 1e-2, 14.0, row_rule=rule), batches)
    parts = Memory(cfg, 100)
    parts.load_state_dict(start, strict=False)
    optimizer = _optimizer(parts, 1e-2, 14.0, row_rule=rule)
    first_losses = _train(parts, optimizer, batches[:16], ahead=True)
    snapshots.save(tmp_path, parts, optimizer, {"step": 15})
    _train(parts, optimizer, batches[:4])  # lost: the run dies after its checkpoint
    parts.close()
    resumed = Memory(cfg, 100)
    again = _optimizer(resumed, 1e-3, 1.0, row_rule=rule)
    snapshots.load(tmp_path, resumed, again)
    assert first_losses + _train(resumed, again, batches[15:], ahead=True) == expected
    for ours, theirs in zip(resumed.modules_by_layer(), memory.modules_by_layer(), strict=True):
        assert torch.equal(_all(ours.table), _all(theirs.table)) and ours.table.scale == theirs.table.scale
    resumed.close()


def _decayed(cfg: EngramConfig = CFG, scale: float = 0.25) -> Memory:
    memory = Memory(cfg, 100)
    for module in memory.modules_by_layer():
        module.table.write(torch.tensor([2]), torch.ones(1, 6), decay=scale)
    return memory


def test_scale_and_rows_are_loaded_together_or_not_at_all() -> None:
    memory, plain = _decayed(), Memory(CFG, 100)
    initial, state = _all(plain.layer(0).table), memory.state_dict()
    assert float(state["layers.0.table.scale"]) == 0.25 and not any(n.endswith("scale") for n in plain.state_dict())
    without_rows = {n: t for n, t in state.items() if not n.endswith("rows")}
    plain.load_state_dict(without_rows, strict=False)
    assert torch.equal(_all(plain.layer(0).table), initial)
    plain.load_state_dict(state)
    assert torch.equal(_all(plain.layer(0).table), _all(memory.layer(0).table)) and plain.layer(2).table.scale == 0.25
    plain.load_state_dict({n: t for n, t in plain.state_dict().items() if "table" not in n}, strict=False)
    assert torch.equal(_all(plain.layer(0).table), _all(memory.layer(0).table))
    memory.load_state_dict(Memory(CFG, 100).state_dict())
    assert torch.equal(_all(memory.layer(0).table), initial)
    bad = {**state, "layers.0.table.store.rows": torch.zeros(3, 6)}
    with pytest.raises(RuntimeError, match="saved"):
        memory.load_state_dict(bad)
    assert torch.equal(_all(memory.layer(0).table), initial)


def test_rows_on_disk_keep_their_scale_when_an_older_state_is_loaded(tmp_path: Path) -> None:
    """A file does not go back with a dictionary, so its scale does not either."""
    memory = _decayed(CFG.replace(placement="disk", path=str(tmp_path)))
    older = memory.state_dict()
    memory.layer(0).table.write(torch.tensor([3]), torch.ones(1, 6), decay=0.5)
    before = _all(memory.layer(0).table)
    memory.load_state_dict(older)
    assert torch.equal(_all(memory.layer(0).table), before)
    memory.close()


def test_a_move_that_gives_initial_values_again_gives_their_scale() -> None:
    memory = _decayed()
    kept = _all(memory.layer(0).table)
    memory.to("cpu").half()
    for one in (memory, copy.deepcopy(memory)):
        assert torch.equal(_all(one.layer(0).table), kept)
    memory.to_empty(device="cpu")
    assert torch.equal(_all(memory.layer(0).table), _all(Memory(CFG, 100).layer(0).table))


def test_after_catch_up_the_bare_rows_are_the_values(cfg: EngramConfig) -> None:
    memory = _decayed(cfg, scale=0.3)
    expected = [_all(module.table) for module in memory.modules_by_layer()]
    memory.catch_up()
    memory.flush()
    for module, values in zip(memory.modules_by_layer(), expected, strict=True):
        assert torch.equal(module.table.store.gather(torch.arange(len(values))), values)
        assert torch.equal(_all(module.table), values)
    assert not any(name.endswith("scale") for name in memory.state_dict())
    memory.close()


def test_models_that_share_rows_share_their_decay(cfg: EngramConfig) -> None:
    """The second model's forward lies before the first one's update, its own update after it."""
    torch.manual_seed(0)
    first = Memory(cfg, 100)
    second = Memory(cfg, 100, rows_of=first)
    second.load_state_dict({n: t for n, t in first.state_dict().items() if "rows" not in n}, strict=False)
    for module in second.modules_by_layer():
        module.table.trainable = True
    optimizers = [_optimizer(memory, lr=1e-2, weight=w, row_rule="sgd") for memory, w in ((first, 2.0), (second, 4.0))]
    table, other = first.layer(0).table, second.layer(0).table
    rows = _all(table).double()
    for _ in range(30):
        ids = torch.randint(0, 30, (1, 1, 6))
        losses = [(one(ids) ** 2).sum() for one in (table, other)]
        grads = 2 * rows
        for loss, optimizer, weight in zip(losses, optimizers, (2.0, 4.0), strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            counts = torch.bincount(ids.flatten(), minlength=len(rows)).unsqueeze(1)
            rows = rows * (1 - 0.05 * weight) - 0.05 * counts * grads
    torch.testing.assert_close(_all(other).double(), rows, rtol=1e-4, atol=1e-6)
    assert torch.equal(_all(table), _all(other)) and table.scale == other.scale < 1e-3
