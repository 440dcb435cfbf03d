"""Gate values: how much of the fetched value each token lets in.

    sample = gate_sample(model, handle, tokenizer, "The quick brown fox")   # token by token
    summary = gate_summary(model, handle, batches, counts)                  # by layer, and by n-gram frequency

`handle` is what `engram.attach` returned. A gate lies in 0..1; one value per token, memory layer and residual stream.
`counts` comes from `engram.eval.rows.count_ngrams` over (a part of) the training text: a memory that learned n-grams
opens where it has seen the n-gram often.

Shapes: B batch, T time, S residual streams, N counted positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engram.eval.loss import Batch, counted_positions, evaluating, forward_logits, require_tokens
from engram.eval.rows import NgramCounts, decode, encode, windows_of

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
BUCKETS = (0, 1, 2, 4, 16, 64, 256, 1024, 4096)
"""Lower ends of the frequency buckets: never seen, once, 2-3, 4-15, 16-63, and so on, open at the top."""


def gate_values(model: nn.Module, handle: Any, batch: Batch) -> dict[int, Tensor]:
    """One forward over a batch -> memory layer -> gates [B, T, S], float32, on the CPU.

    Raises ValueError when a layer has no gate (gate "none") or was not reached.
    """
    with evaluating(model), torch.no_grad(), handle.taps() as taps:
        forward_logits(model, batch)
        gates = {layer: taps[layer].get("gate") for layer in handle.memory.cfg.layers}
    missing = [layer for layer, gate_BTS in gates.items() if gate_BTS is None]
    if missing:
        raise ValueError(f"gate: memory layers {missing} gave no gate values (gate {handle.memory.cfg.gate!r})")
    return {layer: gate_BTS.float().cpu() for layer, gate_BTS in gates.items()}


def gate_sample(
    model: nn.Module, handle: Any, tokenizer: Any, text: str | Sequence[int], max_tokens: int = 256
) -> dict[str, Any]:
    """A text (or its ids), one document -> plain data: `ids` [T], `tokens` [T], `layers` {layer: [T][S]}.

    Longer texts are cut at `max_tokens`. Raises ValueError for a text without tokens or a memory without gates.
    """
    ids = encode(tokenizer, text)[:max_tokens]
    ids_BT = torch.tensor([ids])
    gates = gate_values(model, handle, {"input_ids": ids_BT, "position_ids": torch.arange(len(ids))[None]})
    return {
        "ids": ids,
        "tokens": [decode(tokenizer, [token]) for token in ids],
        "layers": {
            str(layer): [[round(value, 4) for value in row] for row in gate_BTS[0].tolist()]
            for layer, gate_BTS in gates.items()
        },
    }


def gate_summary(
    model: nn.Module,
    handle: Any,
    batches: Iterable[Batch],
    counts: Mapping[int, NgramCounts] | None = None,
    max_tokens: int = 100_000,
) -> dict[str, Any]:
    """Batches (see eval/loss.py) -> {"tokens", "layers": {layer: {"mean", "std", "quantiles", "streams", "by_count"}}}.

    mean, std, quantiles   over tokens and streams; `streams` lists the mean of each stream.
    by_count               with `counts`: order -> buckets of {"from", "to" (None: open), "tokens", "mean"}, by how
                           often the position's n-gram occurred in the counted text. Empty buckets are left out.
    Positions with label -100 or masked ones are left out. Raises ValueError when none is left.
    """
    kept: dict[int, list[np.ndarray]] = {layer: [] for layer in handle.memory.cfg.layers}
    seen: dict[int, list[np.ndarray]] = {order: [] for order in (counts or {})}
    ngram_hash = handle.memory.layer(handle.memory.cfg.layers[0]).hash
    tokens = 0
    for batch in batches:
        index_N, _ = counted_positions(batch, max_tokens - tokens)
        if not len(index_N):
            continue
        for layer, gate_BTS in gate_values(model, handle, batch).items():
            kept[layer].append(gate_BTS.flatten(0, 1)[index_N.cpu()].numpy())
        if counts:
            window_PN = np.concatenate(list(windows_of(ngram_hash, [batch])))[index_N.cpu().numpy()]
            for order, ngrams in counts.items():
                seen[order].append(ngrams.of(window_PN))
        tokens += len(index_N)
        if tokens >= max_tokens:
            break
    require_tokens(tokens)
    counts_by_order = {order: np.concatenate(parts) for order, parts in seen.items()}
    return {
        "tokens": tokens,
        "layers": {str(layer): _summary(np.concatenate(parts), counts_by_order) for layer, parts in kept.items()},
    }


def _summary(gate_NS: np.ndarray, counts_by_order: Mapping[int, np.ndarray]) -> dict[str, Any]:
    gate_NS = gate_NS.astype(np.float64)
    return {
        "mean": float(gate_NS.mean()),
        "std": float(gate_NS.std()),
        "quantiles": {str(q): float(np.quantile(gate_NS, q)) for q in QUANTILES},
        "streams": gate_NS.mean(axis=0).tolist(),
        "by_count": {str(order): _by_count(gate_NS.mean(axis=1), counts) for order, counts in counts_by_order.items()},
    }


def _by_count(gate_N: np.ndarray, count_N: np.ndarray) -> list[dict[str, Any]]:
    bucket_N = np.searchsorted(BUCKETS, count_N, side="right") - 1
    out = []
    for index, low in enumerate(BUCKETS):
        inside_N = bucket_N == index
        if inside_N.any():
            high = BUCKETS[index + 1] - 1 if index + 1 < len(BUCKETS) else None
            out.append({"from": low, "to": high, "tokens": int(inside_N.sum()), "mean": float(gate_N[inside_N].mean())})
    return out
