"""Row numbers through the kernel: literal numbers from outside, and plain torch on awkward input."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from engram import families
from engram.config import EngramConfig
from engram.hashing import NgramHash, rows_of_layers
from engram.kernels import dispatch, operators, reference_rows, rows
from engram.kernels.launch import check_count
from engram.kernels.reference_rows import HashConstants

GOLDEN = families.golden()
CASES = [(name, layer) for name, g in GOLDEN.items() for layer in g.get("by_layer", {"input": 0})]


@pytest.mark.parametrize(("family", "layer"), CASES)
def test_golden_rows(family: str, layer: str, device: torch.device) -> None:
    golden = GOLDEN[family]
    expected = golden["by_layer"][layer] if "by_layer" in golden else golden
    module = NgramHash(families.get(family), 0 if layer == "input" else int(layer)).to(device)
    ids = torch.tensor([golden["ids"]], device=device)
    dead = torch.zeros_like(ids, dtype=torch.bool)
    dead[:, golden.get("blocked_positions", [])] = True
    found = rows.hash_rows(ids, module.constants, dead_BT=dead)[0, 0]
    if family == "blt":  # published per group size, without offsets
        found = found - module.offsets
    assert found.tolist() == expected["rows"]


def _batch(cfg: EngramConfig, shape: tuple[int, int], seed: int, device: torch.device) -> dict[str, Tensor]:
    """Ids with some outside the vocabulary, and every kind of border."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-2, (cfg.vocab_size or 50) + 3, shape, generator=generator)
    for eos in cfg.eos:
        ids[torch.rand(shape, generator=generator) < 0.1] = eos
    padded = torch.rand(shape, generator=generator) < 0.2
    ids[:, -2], padded[:, -2] = -1, False
    found = {
        "ids_BT": ids,
        "pad_BT": padded,
        "dead_BT": torch.rand(shape, generator=generator) < 0.2,
        "segment_BT": torch.randint(0, 2, shape, generator=generator).cumsum(1) // 3,
    }
    return {name: tensor.to(device) for name, tensor in found.items()}


@pytest.mark.parametrize("family", families.NAMES)
def test_every_family_with_every_border(family: str, device: torch.device) -> None:
    cfg = families.get(family)
    constants = reference_rows.stack([NgramHash(cfg, layer).to(device).constants for layer in cfg.layers])
    for case, left_out in enumerate(((), ("pad_BT",), ("dead_BT", "segment_BT"), ("pad_BT", "dead_BT", "segment_BT"))):
        given = {k: v for k, v in _batch(cfg, (3, 63), case, device).items() if k not in left_out}
        for skip in (0, 5):
            masked = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(2)]
            ours = rows.hash_rows(constants=constants, skip=skip, masked=masked[0], **given)
            judge = reference_rows.hash_rows(constants=constants, skip=skip, masked=masked[1], **given)
            assert torch.equal(ours, judge) and ours.shape == (len(cfg.layers), 3, 63 - skip, cfg.columns)
            assert masked[0] == masked[1] > 0


@pytest.mark.parametrize("family", ["toy", "maxtext"])
def test_a_map_and_products_of_32_bits(family: str, device: torch.device) -> None:
    """Classes, not ids, are multiplied; and products that pass 2^31 wrap only where the family is one of 32 bits."""
    constants = NgramHash(families.get(family), 1).to(device).constants
    generator = torch.Generator().manual_seed(5)
    classes = torch.randint(0, 2**20, (constants.limit,), generator=generator).to(device)
    mapped = dataclasses.replace(constants, class_of=classes, exact_reciprocal=False)  # of larger products
    ids = torch.randint(-2, constants.limit + 2, (3, 40), generator=generator).to(device)
    ours = rows.hash_rows(ids, mapped)
    assert torch.equal(ours, reference_rows.hash_rows(ids, mapped))
    real = (ids >= 0) & (ids < constants.limit)
    first = classes[ids.clamp(0, constants.limit - 1)].where(real, constants.filler)
    raw = dataclasses.replace(constants, limit=2**31 - 1, exact_reciprocal=False)
    judge = rows.hash_rows(first, raw)
    assert torch.equal(ours, judge) and not torch.equal(ours, rows.hash_rows(ids, constants))
    other = dataclasses.replace(mapped, narrow=not constants.narrow)
    assert not torch.equal(ours, rows.hash_rows(ids, other))


@pytest.mark.parametrize("shape", [(1, 1), (0, 5), (2, 0), (1, 2)])
def test_small_batches(shape: tuple[int, int], device: torch.device) -> None:
    cfg = families.get("toy")
    constants = NgramHash(cfg, 1).to(device).constants
    ids = torch.full(shape, 7, device=device)
    assert torch.equal(rows.hash_rows(ids, constants), reference_rows.hash_rows(ids, constants))
    outside = torch.full((1, 4), -1, device=device)
    masked = torch.zeros((), dtype=torch.int64, device=device)
    ours = rows.hash_rows(outside, constants, masked=masked)
    fillers = torch.full_like(outside, cfg.filler or 0)
    assert masked == 4 and torch.equal(ours, reference_rows.hash_rows(fillers, constants))


def _constants(sizes: list[int], multipliers: Tensor, device: torch.device, **changes: Any) -> HashConstants:
    inverse, exact = reference_rows.reciprocals(sizes, changes.pop("largest", 2**63 - 1))
    fields = {
        "multipliers_KN": multipliers,
        "sizes_K": torch.tensor(sizes),
        "offsets_K": torch.arange(len(sizes)),
        "reciprocals_K": torch.tensor(inverse),
        "eos_E": torch.empty(0, dtype=torch.int64),
    }
    moved = {name: value.to(device) for name, value in fields.items()}
    rest = {"class_of": None, "orders": (multipliers.shape[1],), "heads": len(sizes), "limit": 2**31 - 1, "filler": 0}
    return HashConstants(**moved, **{**rest, "xor": True, "narrow": False, "exact_reciprocal": exact, **changes})


def test_remainders_at_the_edges_of_int64(device: torch.device) -> None:
    """The reciprocal below 2^63, near multiples of the size; elsewhere `%` with torch's sign."""
    sizes = [2, 3, 7, 1009, 2**16 + 1, 2**24 + 43, 2**31 - 1, 2**31 - 19]
    ids = torch.randint(0, 2**31 - 1, (4, 500), generator=torch.Generator().manual_seed(0)).to(device)
    ids[0, :16] = torch.tensor([0, 1, 2, 2**31 - 2] * 4, device=device)
    line = torch.tensor([[2**32 + 1, 2**32 - 1, 2**31 - 1]]).expand(len(sizes), 3)
    positive = _constants(sizes, line, device)
    assert positive.exact_reciprocal
    ours = rows.hash_rows(ids, positive)
    assert torch.equal(ours, reference_rows.hash_rows(ids, positive)) and int(ours.min()) >= 0
    multiples = torch.tensor([[k * size + d for size in sizes for k in (1, 2**31 // size) for d in (-1, 0, 1)]])
    one = _constants(sizes, torch.tensor([[1]]).expand(len(sizes), 1), device)
    multiples = multiples.clamp(0, 2**31 - 2).to(device)
    assert torch.equal(rows.hash_rows(multiples, one)[0, 0, :, :] - one.offsets_K, multiples[0, :, None] % one.sizes_K)
    wild = torch.randint(-(2**63), 2**63 - 1, (len(sizes), 3), generator=torch.Generator().manual_seed(1))
    for xor in (True, False):
        wraps = _constants(sizes, wild, device, xor=xor, largest=2**63)
        assert not wraps.exact_reciprocal
        judge = reference_rows.hash_rows(ids, wraps)
        if xor:  # plain torch reads the multipliers of the last column
            wraps = _constants(sizes, wild[-1:].expand_as(wild), device, largest=2**63)
        assert torch.equal(rows.hash_rows(ids, wraps), judge)


def test_all_layers_are_hashed_in_one_call(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGRAM_KERNELS", "triton")
    dispatch.choose_again()
    cfg = families.get("deepseek-v4.1")
    hashes = [NgramHash(cfg, layer).to(device) for layer in cfg.layers]
    ids = _batch(cfg, (2, 33), 0, device)["ids_BT"]
    calls: list[int] = []
    original = rows.hash_rows
    monkeypatch.setattr(rows, "hash_rows", lambda *a: calls.append(1) or original(*a))
    found = rows_of_layers(hashes, ids)
    assert calls == [1] and int(hashes[0].masked) > 0 and int(hashes[1].masked) == 0
    monkeypatch.setenv("ENGRAM_KERNELS", "reference")
    dispatch.choose_again()
    for ours, module in zip(found, hashes, strict=True):
        assert torch.equal(ours, module.rows(ids))
    dispatch.choose_again()


def test_the_operator_passes_torchs_own_checks(device: torch.device) -> None:
    cfg = families.get("qwen3.8-flash-next")
    given = _batch(cfg, (2, 9), 0, device)
    constants = NgramHash(cfg, 1).to(device).constants
    masked = torch.zeros((), dtype=torch.int64, device=device)
    flat = operators.spelled_out(constants)
    for borders in ((given["pad_BT"], given["dead_BT"], given["segment_BT"]), (None, None, None)):
        torch.library.opcheck(operators.hash_rows_op, (given["ids_BT"], *flat, *borders, 2, masked))


def test_too_many_look_ups_are_refused() -> None:
    with pytest.raises(ValueError, match="split the batch"):
        check_count("ids", 2**30)
