"""The numba passes against plain torch: the same sums, the same rules, on awkward shapes; the choice between them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engram.kernels import cpu, dispatch, reference


@pytest.fixture
def choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    dispatch.backend.cache_clear()
    yield monkeypatch
    dispatch.backend.cache_clear()


@pytest.mark.parametrize("width", [1, 3, 31, 64])
@pytest.mark.parametrize("rows", ["distinct", "one", "mixed"])
def test_sums_of_duplicates_are_the_same_bits(width: int, rows: str) -> None:
    ids = {"distinct": torch.randperm(500), "one": torch.full((1000,), 7), "mixed": torch.randint(0, 40, (777,))}[rows]
    grads = torch.randn(len(ids), width)
    for ours, theirs in zip(cpu.sum_duplicates(ids, grads), reference.sum_duplicates(ids, grads), strict=True):
        assert torch.equal(ours, theirs)
    strided = torch.randn(len(ids), 2 * width)[:, ::2]
    assert torch.equal(cpu.sum_duplicates(ids, strided)[1], reference.sum_duplicates(ids, strided)[1])


@pytest.mark.parametrize("width", [1, 3, 31, 64])
def test_row_wise_rules_agree(width: int) -> None:
    values, grads = torch.randn(50, width), torch.randn(50, width)
    grads[3] = 0
    v = torch.rand(50)
    v[:10] = 0
    for name, numbers in (("rowwise_adam", (0.01, 0.99, 1e-8)), ("rowwise_adagrad", (0.01, 1e-8))):
        ours = getattr(cpu, name)(values, grads, v, *numbers)
        theirs = getattr(reference, name)(values, grads, v, *numbers)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-7, msg=name)
        assert torch.equal(ours[0][3], values[3])


def test_what_numba_does_not_serve_goes_to_plain_torch(choice: pytest.MonkeyPatch) -> None:
    ids, grads = torch.tensor([4, 1, 4]), torch.randn(3, 2, dtype=torch.float64)
    unique, sums, first = dispatch.sum_duplicates(ids, grads)
    assert unique.tolist() == [1, 4] and first.tolist() == [1, 0]
    torch.testing.assert_close(sums[1], (grads[0] + grads[2]).float())
    narrow = dispatch.sum_duplicates(ids, grads.bfloat16())[1]
    assert narrow.dtype == torch.float32
    assert dispatch.sum_duplicates(ids[:0], grads[:0].float())[1].shape == (0, 2)


def test_the_choice_is_one_switch_said_once(choice: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    choice.setenv("ENGRAM_KERNELS", "reference")
    with caplog.at_level("INFO", logger="engram"):
        assert dispatch.backend() == dispatch.backend() == "reference"
    assert len(caplog.records) == 1 and "ENGRAM_KERNELS=reference" in caplog.text
    choice.setattr(cpu, "available", lambda: False)
    for value, expected in (("auto", "reference"), ("numba", "not installed"), ("cuda", "choose one of auto")):
        dispatch.backend.cache_clear()
        choice.setenv("ENGRAM_KERNELS", value)
        if value == "auto":
            assert dispatch.backend() == expected
        else:
            with pytest.raises(ValueError, match=expected):
                dispatch.backend()
