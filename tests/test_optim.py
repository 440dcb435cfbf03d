"""Rows learn by the documented formula, only where touched, inside one ordinary torch optimizer."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import engram.optim
from engram.config import ConfigError, EngramConfig
from engram.layer import Engram
from engram.table import RowProxy, Table

CFG = EngramConfig(hidden_size=12, layers=(1,), heads=2, head_dim=4, rows=11, init="normal", init_std=1.0)


def _table(cfg: EngramConfig = CFG) -> Table:
    return Table(cfg, 1)


def _touch(table: Table, ids: Tensor, grads: Tensor) -> None:
    """A backward that brings exactly `grads` [n, W] to the looked-up rows `ids` [n]."""
    values = table(ids.view(1, 1, -1))
    values.backward(grads.view(values.shape))


@pytest.mark.parametrize("duplicates", [1, 1000])
def test_row_wise_adam_is_the_formula_in_float64_over_the_whole_table(duplicates: int) -> None:
    """First touches at step 1, 100 and 1,000; one row looked up 1,000 times in every batch."""
    table, lr, beta2, eps = _table(), 1e-2, 0.99, 1e-8
    optimizer = engram.optim.build(table, lr=lr / 5, row_betas=(0.9, beta2), row_eps=eps)
    rows, state = table.store.rows.double(), torch.full((table.store.spec.rows,), -1.0, dtype=torch.float64)
    steps = [1, 2, 3, 100, 101, 500, 1000] if duplicates > 1 else range(1, 1003)
    for step in steps:
        ids = torch.tensor([3] * duplicates + [7, 9, 7] + [20] * (step >= 100) + [21] * (step >= 1000))
        grads = torch.randn(len(ids), CFG.head_dim)
        _touch(table, ids, grads)
        optimizer.step()
        optimizer.zero_grad()
        dense = torch.zeros_like(rows).index_add_(0, ids, grads.double())
        for row in set(ids.tolist()):
            square = dense[row].square().mean()
            state[row] = square if state[row] < 0 else beta2 * state[row] + (1 - beta2) * square
            rows[row] -= lr * dense[row] / (state[row].sqrt() + eps)
    torch.testing.assert_close(table.store.rows.double(), rows, rtol=2e-5, atol=2e-5)
    untouched = [r for r in range(table.store.spec.rows) if r not in (3, 7, 9, 20, 21)]
    assert torch.equal(table.store.rows[untouched], _table().store.rows[untouched])
    assert optimizer.touched_rows() == {1: (5, table.store.spec.rows)}


def test_a_first_touch_moves_by_about_the_learning_rate_whenever_it_happens() -> None:
    table = _table()
    optimizer = engram.optim.build(table, lr=1e-3)
    before = table.store.rows.clone()
    for step in range(1, 51):
        _touch(table, torch.tensor([0, 5] if step == 50 else [0]), torch.full((1 + (step == 50), 4), 0.3))
        optimizer.step()
        optimizer.zero_grad()
    moved = (table.store.rows - before)[5]
    torch.testing.assert_close(moved, torch.full_like(moved, -5e-3), rtol=1e-5, atol=0)


def test_a_zero_gradient_is_no_first_touch() -> None:
    """Masked labels bring zero gradients; counted as the first touch they would let the next one move ten-fold."""
    table = _table()
    optimizer = engram.optim.build(table, lr=1e-3)
    before = table.store.rows.clone()
    for grad in (0.0, 0.3):
        _touch(table, torch.tensor([5]), torch.full((1, 4), grad))
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.touched_rows()[1][0] == int(grad > 0)
    moved = (table.store.rows - before)[5]
    torch.testing.assert_close(moved, torch.full_like(moved, -5e-3), rtol=1e-5, atol=0)


def test_row_wise_adagrad_and_sgd() -> None:
    for rule in ("rowwise_adagrad", "sgd"):
        table = _table()
        optimizer = engram.optim.build(table, lr=0.1, row_lr_multiplier=1.0, row_rule=rule)  # type: ignore[arg-type]
        row, total = table.store.rows[2].double(), 0.0
        for _ in range(5):
            grads = torch.randn(2, 4)
            _touch(table, torch.tensor([2, 2]), grads)
            optimizer.step()
            optimizer.zero_grad()
            g = grads.double().sum(0)
            total += float(g.square().mean())
            row = row - 0.1 * g / (total**0.5 + 1e-8) if rule == "rowwise_adagrad" else row - 0.1 * g
        torch.testing.assert_close(table.store.rows[2].double(), row, rtol=1e-5, atol=1e-6)


def test_element_wise_adam_is_torchs_sparse_adam() -> None:
    table = _table()
    judge = nn.Embedding(table.store.spec.rows, 4, sparse=True, _weight=table.store.rows.clone())
    theirs = torch.optim.SparseAdam(judge.parameters(), lr=0.05, betas=(0.9, 0.99))
    ours = engram.optim.build(table, lr=0.01, row_rule="adam", row_betas=(0.9, 0.99))
    for _ in range(6):
        ids, grads = torch.randint(0, 30, (9,)), torch.randn(9, 4)
        _touch(table, ids, grads)
        judge(ids).backward(grads)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(table.store.rows, judge.weight.detach(), rtol=1e-5, atol=1e-6)


def test_touched_rows_decay_only_when_asked() -> None:
    table = _table()
    optimizer = engram.optim.build(table, lr=0.1, row_rule="sgd", row_lr_multiplier=1.0, row_weight_decay=0.5)
    before = table.store.rows.clone()
    _touch(table, torch.tensor([4]), torch.zeros(1, 4))
    optimizer.step()
    torch.testing.assert_close(table.store.rows[4], before[4] * 0.95)
    assert torch.equal(table.store.rows[5:], before[5:])


def _model() -> tuple[Engram, Tensor, Tensor]:
    torch.manual_seed(3)
    layer = Engram(CFG, 1, vocab_size=50)
    return layer, torch.randint(0, 50, (4, 9)), torch.randn(4, 9, 12)


def _loss(layer: Engram, ids: Tensor, x: Tensor) -> Tensor:
    return layer(x, layer.hash.rows(ids)).square().sum()


def test_the_norm_that_clipping_sees_is_the_dense_norm() -> None:
    layer, ids, x = _model()
    dense = nn.Parameter(layer.table.store.rows.clone())
    rows = layer.hash.rows(ids)
    judge = copy.deepcopy(layer)
    judge.table.forward = lambda r, *_: dense[r].flatten(-2)  # type: ignore[method-assign, assignment]
    judge(x, rows).square().sum().backward()
    _loss(layer, ids, x).backward()
    expected = torch.nn.utils.clip_grad_norm_([p for p in [*judge.parameters(), dense] if p.numel()], 0.5)
    norm = torch.nn.utils.clip_grad_norm_(layer.parameters(), 0.5)
    torch.testing.assert_close(norm, expected)
    proxy = layer.table.proxy
    assert proxy.grad is not None and dense.grad is not None
    torch.testing.assert_close(proxy.grad, dense.grad[proxy.row_ids], rtol=1e-5, atol=1e-7)


def test_accumulated_backwards_equal_one() -> None:
    results = []
    for parts in (1, 2, 4):
        layer, ids, x = _model()
        optimizer = engram.optim.build(layer, lr=1e-2)
        for ids_part, x_part in zip(ids.chunk(parts), x.chunk(parts), strict=True):
            _loss(layer, ids_part, x_part).backward()
        optimizer.step()
        results.append(torch.cat([layer.table.store.rows.flatten(), *(p.flatten() for p in layer.parameters())]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[2], results[0], rtol=1e-5, atol=1e-6)


def test_repeated_runs_give_the_same_bits() -> None:
    results = []
    for _ in range(2):
        layer, ids, x = _model()
        optimizer = engram.optim.build(layer, lr=1e-2)
        for _ in range(5):
            _loss(layer, ids, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(layer.table.store.rows.clone())
    assert torch.equal(*results)


def test_schedulers_and_scalers_reach_the_rows() -> None:
    layer, ids, x = _model()
    optimizer = engram.optim.build(layer, lr=1e-2, row_rule="sgd")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert {group["name"]: group["lr"] for group in optimizer.param_groups}["rows"] == pytest.approx(0.025)
    plain = copy.deepcopy(layer)
    unscaled = engram.optim.build(plain, lr=5e-3, row_rule="sgd")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(_loss(layer, ids, x)).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    scaler.step(optimizer)
    schedule.step()
    _loss(plain, ids, x).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    unscaled.step()
    torch.testing.assert_close(layer.table.store.rows, plain.table.store.rows, rtol=1e-5, atol=1e-6)


def test_a_scaler_skips_a_step_whose_row_gradient_is_infinite() -> None:
    layer, ids, _ = _model()
    optimizer = engram.optim.build(layer, lr=1e-2)
    before = layer.table.store.rows.clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(layer.table(layer.hash.rows(ids)).sum() * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(layer.table.store.rows, before) and scaler.get_scale() == 1.0


def test_mixed_precision_autocast_trains_the_rows_in_fp32() -> None:
    layer, ids, x = _model()
    optimizer = engram.optim.build(layer, lr=1e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = _loss(layer, ids, x)
    loss.backward()
    assert layer.table.proxy.grad is not None and layer.table.proxy.grad.dtype == torch.float32
    before = layer.table.store.rows.clone()
    optimizer.step()
    assert not torch.equal(layer.table.store.rows, before)


@pytest.mark.parametrize("rule", engram.optim.RULES)
def test_state_dict_round_trip_continues_bit_for_bit(rule: engram.optim.RowRule) -> None:
    layer, ids, x = _model()
    optimizer = engram.optim.build(layer, lr=1e-2, row_rule=rule)

    def steps(model: Engram, opt: torch.optim.Optimizer, n: int) -> None:
        for _ in range(n):
            _loss(model, ids, x).backward()
            opt.step()
            opt.zero_grad()

    steps(layer, optimizer, 3)
    resumed = Engram(CFG, 1, vocab_size=50)
    resumed.load_state_dict(copy.deepcopy(layer.state_dict()))
    second = engram.optim.build(resumed, lr=1.0, row_rule=rule)
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(layer, optimizer, 4)
    steps(resumed, second, 4)
    for (name, ours), theirs in zip(layer.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


def test_zero_grad_in_either_form_leaves_no_row_behind() -> None:
    layer, ids, x = _model()
    optimizer = engram.optim.build(layer, lr=1e-2)
    for set_to_none in (True, False):
        _loss(layer, ids, x).backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        assert layer.table.proxy.grad is None and layer.table.proxy.row_ids is None
    _loss(layer, ids, x).backward()
    layer.zero_grad()
    assert layer.table.proxy.grad is None


def test_zeros_left_by_a_modules_zero_grad_touch_no_row() -> None:
    layer, _, x = _model()
    optimizer = engram.optim.build(layer, lr=1e-2)
    for _ in range(4):
        ids = torch.randint(0, 50, (4, 9))
        _loss(layer, ids, x).backward()
        assert torch.equal(layer.table.proxy.row_ids, torch.unique(layer.hash.rows(ids)))  # type: ignore[arg-type]
        optimizer.step()
        layer.zero_grad(set_to_none=False)
    layer.table.proxy.grad = torch.zeros(3, 4)
    layer.table.proxy.row_ids = None
    optimizer.step()


def test_every_kind_of_scheduler_and_added_group() -> None:
    layer, ids, x = _model()
    optimizer = engram.optim.build(layer, lr=1e-2, betas=(0.8, 0.9), weight_decay=0.3)
    extra = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [extra]})
    added = optimizer.param_groups[-1]
    assert (added["lr"], added["betas"], added["weight_decay"]) == (1e-2, (0.8, 0.9), 0.3)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.1, 0.5, 0.1], total_steps=10)
    (_loss(layer, ids, x) + extra.sum()).backward()
    optimizer.step()
    assert float(extra[0].detach()) < 1


def test_dense_parameters_get_torchs_adamw() -> None:
    layer, ids, x = _model()
    layer.table.trainable = False
    judge = copy.deepcopy(layer)
    ours = engram.optim.build(layer, lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)
    decayed = [linear.weight for linear in (judge.value, judge.key) if linear is not None]
    others = [p for p in judge.parameters() if p.numel() and not any(p is q for q in decayed)]
    theirs = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}],
        lr=1e-2, betas=(0.8, 0.95), eps=1e-6,
    )  # fmt: skip
    for _ in range(5):
        for model, optimizer in ((layer, ours), (judge, theirs)):
            _loss(model, ids, x).backward()
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(layer.parameters(), judge.parameters(), strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("field", "value"),
    [("lr", -1.0), ("row_lr_multiplier", -5.0), ("row_eps", -1.0), ("row_betas", (0.9, 1.5)), ("weight_decay", -0.1)],
)
def test_bad_numbers_are_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        engram.optim.build(_model()[0], **{field: value})


def test_rows_frozen_after_the_backward_do_not_move() -> None:
    layer, ids, x = _model()
    optimizer = engram.optim.build(layer, lr=1e-2)
    _loss(layer, ids, x).backward()
    layer.table.trainable = False
    before = layer.table.store.rows.clone()
    optimizer.step()
    assert torch.equal(layer.table.store.rows, before)


def test_functional_calls_say_why_they_cannot_work() -> None:
    layer, ids, x = _model()
    values = {name: p.detach().requires_grad_() for name, p in layer.named_parameters()}
    with pytest.raises(RuntimeError, match=r"loss.backward\(\) only"):
        torch.func.functional_call(layer, values, (x, layer.hash.rows(ids)))


def test_frozen_rows_and_dense_parts() -> None:
    layer, ids, x = _model()
    layer.table.trainable = False
    before = layer.table.store.rows.clone()
    optimizer = engram.optim.build(layer, lr=1e-2)
    assert "rows" not in {group["name"] for group in optimizer.param_groups}
    _loss(layer, ids, x).backward()
    optimizer.step()
    assert torch.equal(layer.table.store.rows, before) and layer.table.updates == 0
    layer, ids, x = _model()
    for parameter in layer.parameters():
        parameter.requires_grad_(isinstance(parameter, RowProxy))
    optimizer = engram.optim.build(layer, lr=1e-2)
    first = float(_loss(layer, ids, x).detach())
    for _ in range(20):
        loss = _loss(layer, ids, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(loss.detach()) < 0.5 * first, "the loss must move when the rows alone learn"


def test_nothing_to_train_is_an_error() -> None:
    layer, _, _ = _model()
    layer.requires_grad_(False)
    with pytest.raises(ConfigError, match="no trainable"):
        engram.optim.build(layer)
    with pytest.raises(ConfigError, match="row_rule"):
        engram.optim.build(_model()[0], row_rule="adamw")  # type: ignore[arg-type]


class LargestOutput(TorchDispatchMode):
    """Records the largest tensor that any operation outputs, updates in place of `owned` storages left out."""

    def __init__(self, owned: list[Tensor]) -> None:
        super().__init__()
        self.owned, self.largest, self.name = {t.untyped_storage().data_ptr() for t in owned}, 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            fresh = isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.owned
            if fresh and tensor.numel() > self.largest:
                self.largest, self.name = tensor.numel(), str(func)
        return out


@pytest.mark.parametrize("decay", engram.optim.DECAYS)
@pytest.mark.parametrize("rule", ["rowwise_adam", "rowwise_adagrad", "sgd"])
def test_no_operation_of_a_step_outputs_a_tensor_of_a_tenth_of_the_table(
    rule: engram.optim.RowRule, decay: engram.optim.RowDecay
) -> None:
    layer = Engram(CFG.replace(rows=20_000), 1, vocab_size=50)
    ids, x = torch.randint(0, 50, (2, 16)), torch.randn(2, 16, 12)
    optimizer = engram.optim.build(layer, lr=1e-2, row_rule=rule, row_weight_decay=0.1, row_decay=decay)

    def step() -> None:
        _loss(layer, ids, x).backward()
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()  # makes the row state, which may have one scalar a row
    state = [v for v in optimizer.state[layer.table.proxy].values() if isinstance(v, Tensor)]
    with LargestOutput([layer.table.store.rows, *state]) as watch:
        step()
    assert 0 < watch.largest < layer.table.store.rows.numel() / 10, watch.name


GROWTH = """
import sys, torch
import engram.optim
from engram.config import EngramConfig
from engram.layer import Engram
torch.set_num_threads(1)
cfg = EngramConfig(hidden_size=64, layers=(1,), heads=2, head_dim=4, rows=int(sys.argv[1]) // 4, init="normal")
layer = Engram(cfg, 1, vocab_size=5000)
opt = engram.optim.build(layer, lr=1e-3)
opt.state[layer.table.proxy].update(engram.optim._row_state("rowwise_adam", layer.table.store.spec, "cpu"))
opt.state[layer.table.proxy]["v"].zero_()  # its pages are real from the start, as those of the rows
def steps(n, batch):
    for _ in range(n):
        ids = torch.randint(0, 5000, (batch, 512)); x = torch.randn(batch, 512, 64)
        layer(x, layer.hash.rows(ids)).square().sum().backward(); opt.step(); opt.zero_grad()
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024
steps(2, 1)  # loads the libraries' own code and buffers
open("/proc/self/clear_refs", "w").write("5")  # the peak starts again at what is resident now
held = peak()
steps(5, 8)
print(peak() - held)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be reset here")
def test_peak_memory_of_steps_does_not_depend_on_the_number_of_rows() -> None:
    """10^4 against 10^7 rows (160 MB of rows): beyond table and row state, the peak grows by temporaries."""
    grown = [
        int(
            subprocess.run([sys.executable, "-c", GROWTH, str(rows)], capture_output=True, check=True, text=True).stdout
        )
        for rows in (10**4, 10**7)
    ]
    assert abs(grown[0] - grown[1]) < 36 * 2**20, (
        f"grew by {grown} bytes; the larger table holds 160 MB and its state 40 MB"
    )
