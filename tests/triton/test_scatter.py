"""Sums of duplicates and row updates through the kernel, against plain torch and against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engram.kernels import operators, reference, reference_rows, scatter
from engram.kernels.reference_rows import RULES, Rule

BATCHES = ("distinct", "one", "mixed", "long")


def _batch(kind: str, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Look-ups and gradients: every row once, one row 700 times, many duplicates, or one row in most places."""
    generator = torch.Generator().manual_seed(width)
    ids = {
        "distinct": torch.randperm(40, generator=generator),
        "one": torch.full((700,), 7),
        "mixed": torch.randint(0, 20, (333,), generator=generator),
        "long": torch.randint(0, 300, (600,), generator=generator).masked_fill_(torch.arange(600) % 20 > 0, 5) % 30,
    }[kind]
    return ids.to(device), torch.randn(len(ids), width, generator=generator).to(device)


@pytest.mark.parametrize("width", [1, 3, 31, 64, 160, 2048])
@pytest.mark.parametrize("kind", BATCHES)
def test_sums_of_duplicates(kind: str, width: int, device: torch.device) -> None:
    ids, grads = _batch(kind, width, device)
    unique, sums, first = scatter.sum_duplicates(ids, grads)
    judge = reference.sum_duplicates(ids, grads)
    assert torch.equal(unique, judge[0]) and torch.equal(first, judge[2])
    exact = torch.zeros(50, width, dtype=torch.float64, device=device).index_add_(0, ids, grads.double())[unique]
    torch.testing.assert_close(sums.double(), exact, rtol=1e-5, atol=3e-5)
    for again in (scatter.sum_duplicates(ids, grads)[1], scatter.sum_duplicates(ids, grads.clone())[1]):
        assert torch.equal(again, sums)  # the same bits in every run
    found = scatter.segments(ids)
    number = torch.empty_like(found.number_n).scatter_(0, found.order_n, found.number_n)
    torch.testing.assert_close(scatter.sum_atomic(number, grads, len(unique)), sums, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gradients_are_summed_in_fp32(dtype: torch.dtype, device: torch.device) -> None:
    ids, grads = _batch("long", 31, device)
    ours = scatter.sum_duplicates(ids, grads.to(dtype))[1]
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, reference.sum_duplicates(ids, grads.to(dtype))[1], rtol=1e-5, atol=3e-5)


def test_no_look_up_at_all(device: torch.device) -> None:
    ids, grads = torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, 4, device=device)
    assert [len(t) for t in scatter.sum_duplicates(ids, grads)] == [0, 0, 0]
    table, v = torch.ones(3, 4, device=device), torch.zeros(3, device=device)
    for update in (scatter.update_rows, scatter.scatter_update):
        update(table, v, ids, grads, Rule("sgd", 1.0))
    assert bool((table == 1).all())


@pytest.mark.parametrize("kind", ["mixed", "long"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RULES)
def test_updates_in_place(name: str, dtype: torch.dtype, kind: str, device: torch.device) -> None:
    width = 33
    ids, grads = _batch(kind, width, device)
    unique, sums, _ = reference.sum_duplicates(ids, grads)
    rule = Rule(name, lr=0.01, beta2=0.99, eps=1e-8, keep=0.999, seed=5, step=7)
    table = torch.randn(40, width, generator=torch.Generator().manual_seed(3)).to(device, dtype)
    v = torch.rand(40, generator=torch.Generator().manual_seed(4)).to(device)
    v[::3] = 0
    judge_table, judge_v = table.clone(), v.clone()
    reference_rows.update_rows(judge_table, judge_v, unique, sums, rule)
    for update, given, grad in ((scatter.update_rows, unique, sums), (scatter.scatter_update, ids, grads)):
        ours, ours_v = table.clone(), v.clone()
        update(ours, ours_v, given, grad, rule)
        torch.testing.assert_close(ours_v, judge_v, rtol=1e-5, atol=1e-5)
        if dtype == torch.float32:
            torch.testing.assert_close(ours, judge_table, rtol=1e-5, atol=1e-6)
        else:  # the same random bits: what differs is a last bit of fp32, which rarely crosses a border
            assert float((ours != judge_table).float().mean()) < 0.002
        untouched = torch.ones(40, dtype=torch.bool, device=device)
        untouched[unique] = False
        assert torch.equal(ours[untouched], table[untouched]) and torch.equal(ours_v[untouched], v[untouched])


def test_a_zero_gradient_is_no_first_touch(device: torch.device) -> None:
    table, v = torch.ones(2, 5, device=device), torch.zeros(2, device=device)
    ids = torch.tensor([0, 1], device=device)
    grads = torch.zeros(2, 5, device=device)
    grads[1] = 2.0
    scatter.update_rows(table, v, ids, grads, Rule("rowwise_adam", lr=0.1, beta2=0.99, eps=1e-8))
    assert table[0].tolist() == [1.0] * 5 and float(v[0]) == 0
    torch.testing.assert_close(v[1].item(), 4.0)  # a GPU divides to 2 ulp
    torch.testing.assert_close(table[1], torch.full((5,), 0.9, device=device))


@pytest.mark.parametrize("name", RULES)
def test_rows_outside_the_table_are_not_written(name: str, device: torch.device) -> None:
    memory, states = torch.ones(9, 5, device=device), torch.ones(9, device=device)
    table, v = memory[2:7], states[2:7]
    ids = torch.tensor([-2, -1, 3, 5, 6], device=device)
    for update in (scatter.update_rows, scatter.scatter_update):
        update(table, v, ids, torch.ones(5, 5, device=device), Rule(name, lr=0.5, beta2=0.9, eps=1e-8))
    untouched = torch.tensor([0, 1, 2, 3, 4, 6, 7, 8], device=device)
    assert bool((memory[untouched] == 1).all()) and bool((states[untouched] == 1).all())
    assert bool((memory[5] < 1).all())


def test_nan_in_a_16_bit_row_stays_nan(device: torch.device) -> None:
    """NVIDIA's NaN is 0x7FFFFFFF: the random bits would carry it over to -0.0."""
    nan = torch.tensor([2**31 - 1], dtype=torch.int32).view(torch.float32).expand(1, 8).to(device).contiguous()
    ids = torch.tensor([0], device=device)
    assert bool(reference_rows.round_stochastic(nan, 3, ids, 1).isnan().all())
    table, v = torch.ones(1, 8, dtype=torch.bfloat16, device=device), torch.zeros(1, device=device)
    scatter.update_rows(table, v, ids, nan, Rule("sgd", lr=1.0, seed=3, step=1))
    assert bool(table.isnan().all())


def test_the_operators_pass_torchs_own_checks(device: torch.device) -> None:
    ids, grads = torch.tensor([4, 1, 4], device=device), torch.randn(3, 6).to(device)
    torch.library.opcheck(operators.sum_duplicates_op, (ids, grads))
    table, v = torch.randn(9, 6).to(device), torch.rand(9).to(device)
    rule = ("rowwise_adam", 0.1, 0.9, 1e-8, 1.0, 0, 1)
    torch.library.opcheck(operators.update_rows_op, (table, v, ids[:2], grads[:2], *rule))
    torch.library.opcheck(operators.scatter_update_op, (table, v, ids, grads, *rule))
