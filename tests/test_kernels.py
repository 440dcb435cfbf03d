"""The numba passes against plain torch: the same row numbers, sums and rules; the choice between versions."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from engram import families
from engram.hashing import NgramHash
from engram.kernels import cpu, dispatch, launch, reference, reference_rows


@pytest.fixture
def choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    dispatch.choose_again()
    yield monkeypatch
    dispatch.choose_again()


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


@pytest.mark.parametrize("family", families.NAMES)
def test_row_numbers_of_every_family_with_every_border(family: str) -> None:
    cfg = families.get(family)
    constants = reference_rows.stack([NgramHash(cfg, layer).constants for layer in cfg.layers])
    generator = torch.Generator().manual_seed(0)
    shape = (3, 40)
    for case in range(4):
        ids = torch.randint(-2, (cfg.vocab_size or 9) + 3, shape, generator=generator)
        for eos in cfg.eos:
            ids[torch.rand(shape, generator=generator) < 0.1] = eos
        pad, dead = (torch.rand(shape, generator=generator) < 0.2 for _ in range(2))
        ids[:, -2], pad[:, -2] = -1, False
        segment = torch.randint(0, 2, shape, generator=generator).cumsum(1) // 3
        borders = (pad if case & 1 else None, dead if case & 2 else None, segment if case != 1 else None)
        for skip in (0, 5):
            counts = [torch.zeros((), dtype=torch.int64) for _ in range(2)]
            ours = cpu.hash_rows(ids, constants, *borders, skip, counts[0])
            judge = reference_rows.hash_rows(ids, constants, *borders, skip, counts[1])
            assert torch.equal(ours, judge) and counts[0] == counts[1] >= 3
    empty = torch.empty(2, 0, dtype=torch.int64)
    assert cpu.hash_rows(empty, constants).shape == (len(cfg.layers), 2, 0, cfg.columns)


@pytest.mark.parametrize("narrow", [False, True])
def test_a_map_and_products_of_32_bits(narrow: bool) -> None:
    constants = NgramHash(families.get("maxtext" if narrow else "toy"), 1).constants
    generator = torch.Generator().manual_seed(5)
    classes = torch.randint(0, 2**20, (constants.limit,), generator=generator)
    mapped = dataclasses.replace(constants, class_of=classes, exact_reciprocal=False)  # of larger products
    ids = torch.randint(-2, constants.limit + 2, (3, 40), generator=generator)
    ours = cpu.hash_rows(ids, mapped)
    assert torch.equal(ours, reference_rows.hash_rows(ids, mapped)) and constants.narrow == narrow
    assert not torch.equal(ours, cpu.hash_rows(ids, dataclasses.replace(mapped, narrow=not narrow)))
    assert not torch.equal(ours, cpu.hash_rows(ids, constants))


def test_engram_is_imported_where_triton_is_not_installed() -> None:
    program = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else found(name, *rest)
import torch, engram
from engram.kernels import aot, bench, dispatch, launch
assert not launch.INSTALLED and "triton" not in dispatch.backend()
memory = engram.Memory(engram.EngramConfig(hidden_size=8, layers=(0,), heads=1, head_dim=4, rows=50), vocab_size=20)
memory.start(torch.tensor([[1, 2, 3]]))
print(memory(0, torch.zeros(1, 3, 8)).shape)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "[1, 3, 8]" in done.stdout


def test_passes_on_a_cpu_do_not_depend_on_the_default_device() -> None:
    constants = NgramHash(families.get("toy"), 1).constants
    ids, grads = torch.tensor([[5, 6, 7]]), torch.randn(3, 4)
    with torch.device("meta"):
        cpu.compile_passes()
        rows = cpu.hash_rows(ids, constants)
        sums = cpu.sum_duplicates(torch.tensor([1, 1, 2], device="cpu"), grads)[1]
    assert rows.device.type == sums.device.type == "cpu"
    assert torch.equal(rows, reference_rows.hash_rows(ids, constants))


def test_golden_rows_through_the_dispatcher(choice: pytest.MonkeyPatch) -> None:
    golden = families.golden()["toy"]
    for version in ("numba", "reference"):
        choice.setenv("ENGRAM_KERNELS", version)
        dispatch.choose_again()
        rows = NgramHash(families.get("toy"), 1).rows(torch.tensor([golden["ids"]]))
        assert rows[0].tolist() == golden["by_layer"]["1"]["rows"]


def test_rows_of_a_table_and_what_lies_outside_it() -> None:
    table = torch.arange(12, dtype=torch.float32).view(4, 3)
    for ids in (torch.tensor([3, -1, 4, 0]), torch.tensor([], dtype=torch.int64)):
        found = dispatch.gather_rows(table, ids, dispatch.PLAIN, 3)
        assert found.shape == (len(ids), 3)
        if len(ids):
            assert found[0].tolist() == [9, 10, 11] and found[1].tolist() == [0, 0, 0]
            assert bool(found[2].isnan().all()) and found[3].tolist() == [0, 1, 2]
    dispatch.put_rows(table, torch.tensor([1]), torch.ones(1, 3))
    assert table[1].tolist() == [1, 1, 1] and table[0].tolist() == [0, 1, 2]


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
    cases = [("auto", "reference"), ("numba", "not installed"), ("cuda", "choose one of auto")]
    if not torch.cuda.is_available():
        cases.append(("triton", "no GPU is here; TRITON_INTERPRET=1" if launch.INSTALLED else "not installed"))
    for value, expected in cases:
        dispatch.choose_again()
        choice.setenv("ENGRAM_KERNELS", value)
        if value == "auto":
            assert dispatch.backend() == expected
        else:
            with pytest.raises(ValueError, match=expected):
                dispatch.backend()
