"""A rehearsal of the kernel claims of `engram bench` in small: each checks its results and times both sides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engram.eval.bench import kernel_claim
from engram.kernels import bench, gather

NAMES = bench.ids(torch.device("cuda"), bench.REHEARSAL)


@pytest.mark.parametrize("name", NAMES)
def test_every_claim_can_be_measured(name: str, device: torch.device) -> None:
    found = dict(bench.claims(2, device, [name], bench.REHEARSAL))
    assert list(found) == [name]
    one = kernel_claim(name, found[name])
    assert one["id"] == name and one["rounds"] == 2 and one["ratio"] > 0
    assert (one.get("unit") == "s/GB") == (name.endswith("-against-copy"))


def test_a_wrong_kernel_gets_no_number(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*given: Any, **options: Any) -> torch.Tensor:
        return original(*given, **options).zero_()

    original = gather.gather_rows
    monkeypatch.setattr(gather, "gather_rows", wrong)
    with pytest.raises(RuntimeError, match="gather is wrong: it differs"):
        dict(bench.claims(2, device, ["kernel-gather-256-B-against-copy"], bench.REHEARSAL))
