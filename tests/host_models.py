"""What the tests of hosts share: ids, the judge (the whole text without a cache), and how near is near."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

VOCAB = 64
TOLERANCE = 1e-5


def some_text(batch: int = 2, length: int = 20, seed: int = 0) -> Tensor:
    """Ids [B, T] from 2 on: 0 is padding, 1 an end of text."""
    return torch.randint(2, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def whole_text(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    """Logits of the whole text, without a cache."""
    logits: Tensor = model(ids, use_cache=False, **kwargs).logits
    return logits


def near(found: Tensor, judge: Tensor) -> None:
    torch.testing.assert_close(found, judge, rtol=TOLERANCE, atol=TOLERANCE)
