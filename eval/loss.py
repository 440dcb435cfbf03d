"""Held-out next-token loss, and the few things every evaluation of a model shares.

    held_out_loss(model, batches).nats        # nats per token

A batch is a mapping with `input_ids` [B, T], `labels` [B, T] (already shifted: the id that follows each position; -100
is not counted), `position_ids` [B, T] (restarting at each packed document) and, if wanted, `mask` [B, T] (False is not
counted). The forward gets ids and positions alone, `use_cache=False` and no attention mask: only so does transformers
isolate packed documents.

Shapes: B batch, T time, N counted positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Batch = Mapping[str, Tensor]
IGNORED = -100
"""Label of a position that is not counted."""

CHUNK_VALUES = {"cpu": 2**19, "other": 2**24}
"""Logits that are upcast at a time, whatever the vocabulary. On a CPU the 2 MiB stay in cache: the lens took 65 ns a
logit in chunks of 64 MiB and 20 in these; an accelerator wants the larger launch."""


@dataclass(frozen=True)
class HeldOutLoss:
    """Loss of one model on one held-out set.

    nats       mean next-token cross-entropy, nats per counted token.
    total      its sum over all counted tokens, nats, added up in float64.
    tokens     number of counted tokens.
    per_token  float32 [tokens] in reading order, or None when it was not asked for.
    """

    nats: float
    total: float
    tokens: int
    per_token: np.ndarray | None = None


def held_out_loss(
    model: nn.Module, batches: Iterable[Batch], *, max_tokens: int | None = None, per_token: bool = False
) -> HeldOutLoss:
    """Model and batches -> mean cross-entropy in nats per token (sums in float64).

    Stops after `max_tokens` counted tokens. The model's train or eval mode is the same afterwards. Raises ValueError
    when no token is counted, a batch is malformed, or a label lies outside the vocabulary.
    """
    total, tokens = 0.0, 0
    kept: list[np.ndarray] = []
    with evaluating(model), torch.no_grad():
        for batch in batches:
            index_N, labels_N = counted_positions(batch, None if max_tokens is None else max_tokens - tokens)
            if not len(index_N):
                continue
            logits_BTV = forward_logits(model, batch)
            losses_N = token_losses(logits_BTV.flatten(0, 1), index_N, labels_N)
            total += float(losses_N.sum(dtype=torch.float64))
            tokens += len(index_N)
            if per_token:
                kept.append(losses_N.cpu().numpy())
            if max_tokens is not None and tokens >= max_tokens:
                break
    require_tokens(tokens)
    return HeldOutLoss(total / tokens, total, tokens, np.concatenate(kept) if per_token else None)


def token_losses(logits_PV: Tensor, index_N: Tensor, labels_N: Tensor) -> Tensor:
    """Logits [P, V] of any dtype, counted positions [N] and their labels [N] -> cross-entropy [N], nats, fp32.

    Logits are upcast a chunk of positions at a time. Raises ValueError for a label outside 0..V-1.
    """
    vocabulary = logits_PV.shape[-1]
    check_labels(labels_N, vocabulary)
    device = logits_PV.device
    indexes = chunks_of(index_N.to(device), vocabulary, device)
    labels = chunks_of(labels_N.to(device), vocabulary, device)
    return torch.cat(
        [
            nn.functional.cross_entropy(logits_PV[index_n].float(), labels_n, reduction="none")
            for index_n, labels_n in zip(indexes, labels, strict=True)
        ]
    )


def counted_positions(batch: Batch, limit: int | None = None) -> tuple[Tensor, Tensor]:
    """Batch -> (flat positions [N], their labels [N]) that are counted, the first `limit` of them, in reading order.

    Raises ValueError when keys are missing or shapes differ.
    """
    for name in ("input_ids", "labels"):
        if name not in batch:
            raise ValueError(f"batch: no {name!r}; it holds {', '.join(sorted(batch)) or 'nothing'}")
    shape = batch["input_ids"].shape
    for name in ("labels", "position_ids", "mask"):
        if name in batch and batch[name].shape != shape:
            raise ValueError(f"batch: {name} {list(batch[name].shape)} does not fit input_ids {list(shape)}")
    counts_BT = batch["labels"] != IGNORED
    if "mask" in batch:
        counts_BT = counts_BT & batch["mask"].to(counts_BT.device).bool()
    index_N = counts_BT.flatten().nonzero().squeeze(-1)
    if limit is not None:
        index_N = index_N[: max(limit, 0)]
    return index_N, batch["labels"].flatten()[index_N]


def forward_logits(model: nn.Module, batch: Batch) -> Tensor:
    """One forward of a causal language model -> its own logits [B, T, V], in the model's dtype."""
    device = next(model.parameters()).device
    positions = batch.get("position_ids")
    logits: Tensor = model(
        input_ids=batch["input_ids"].to(device),
        position_ids=None if positions is None else positions.to(device),
        use_cache=False,
    ).logits
    return logits


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode inside; each gets its own mode back, so that frozen parts stay frozen."""
    modes: list[tuple[Any, bool]] = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def check_labels(labels_N: Tensor, vocabulary: int) -> None:
    """Raise ValueError unless every label lies in 0..vocabulary-1."""
    if len(labels_N) and not (int(labels_N.min()) >= 0 and int(labels_N.max()) < vocabulary):
        raise ValueError(
            f"labels: values {int(labels_N.min())}..{int(labels_N.max())} do not fit a vocabulary of {vocabulary}; "
            f"use {IGNORED} for positions that are not counted"
        )


def require_tokens(tokens: int) -> None:
    """Raise ValueError when nothing was counted: a mean over no token would be a silent nan."""
    if not tokens:
        raise ValueError(f"batches: no counted token (no batch, or every label is {IGNORED} or masked)")


def chunks_of(values_N: Tensor, vocabulary: int, device: torch.device) -> tuple[Tensor, ...]:
    """Split along the first axis so that a chunk times the vocabulary stays within what suits the device."""
    return values_N.split(max(1, CHUNK_VALUES["cpu" if device.type == "cpu" else "other"] // max(1, vocabulary)))
