"""The logit lens: what a decoder would predict if it stopped after each block.

    curves = logit_lens(model, batches)
    curves.kl[d]        # forward KL of the final prediction from the one at depth d, nats per token

Depth 0 is what enters block 0 before any memory is added there (an input-level memory is part of it), depth d is what
leaves block d-1, depth L is the last block. The final norm is applied to every depth with the statistics of that depth,
then the head, then the soft-cap of the configuration, all in fp32. The paper (section 6.1.1, LogitLens) gives neither
the direction of the divergence nor whether the norm comes first; here it is KL(final || depth) with the norm, and the
symmetric Jensen-Shannon divergence is kept beside it so that no conclusion hangs on the direction.

The check that makes the curves trustworthy: at the last depth the lens must equal the model's own logits.

Shapes: B batch, T time, N counted positions, n positions of one chunk, D hidden width, V vocabulary, L blocks.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engram.eval.loss import (
    Batch,
    check_labels,
    chunks_of,
    counted_positions,
    evaluating,
    forward_logits,
    require_tokens,
)

NEGATIVE_KL = -1e-6
"""fp32 log-softmax of two equal rows of 50,000 logits differs by about 4e-7; anything below this is no rounding."""

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest |lens - logits| at the last depth, as a share of the largest logit, by the dtype the head computes in."""


class LensError(RuntimeError):
    """The lens cannot read this model faithfully; the message says which part does not fit."""


@dataclass(frozen=True)
class LensCurves:
    """Means over the counted tokens at each depth, nats per token.

    depths         0..L; 0 is the embedding, L the last block.
    kl             KL(final || depth): 0 at L up to the rounding of the model's own logits.
    js             Jensen-Shannon divergence of the two, at most log 2.
    cross_entropy  next-token loss of the prediction at that depth; at L the model's loss.
    entropy        entropy of the prediction at that depth; log V is a uniform guess.
    tokens         number of counted tokens.
    """

    depths: tuple[int, ...]
    kl: tuple[float, ...]
    js: tuple[float, ...]
    cross_entropy: tuple[float, ...]
    entropy: tuple[float, ...]
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, ready for JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def logit_lens(model: nn.Module, batches: Iterable[Batch], max_tokens: int | None = None) -> LensCurves:
    """Transformers decoder and batches (see eval/loss.py) -> curves by depth, float64 sums over the counted tokens.

    One forward a batch, read through hooks: an attached memory sees what it sees without the lens. Beyond the model's
    own forward it keeps the counted hidden states of each depth and one chunk of logits. Raises LensError when the
    blocks, the final norm or the head are not found or the last depth does not equal the model's logits, and ValueError
    when no token is counted.
    """
    parts = DecoderParts.of(model)
    sums_4L = torch.zeros(4, len(parts.blocks) + 1, dtype=torch.float64)
    tokens = 0
    with evaluating(model), torch.no_grad():
        readout = _Readout(parts)
        for batch in batches:
            index_N, labels_N = counted_positions(batch, None if max_tokens is None else max_tokens - tokens)
            if not len(index_N):
                continue
            with _watching(parts, index_N) as seen:
                logits_BTV = forward_logits(model, batch)
            if len(seen.states) != len(parts.blocks) + 1:
                missing = sorted(set(range(len(parts.blocks) + 1)) - set(seen.states))
                raise LensError(f"depths {missing} were not reached by the forward; are blocks skipped?")
            vocabulary = logits_BTV.shape[-1]
            check_labels(labels_N, vocabulary)
            rows = torch.arange(len(index_N))
            index_N = index_N.to(logits_BTV.device)
            for rows_n in chunks_of(rows, vocabulary, logits_BTV.device):
                final_nV = _upcast(logits_BTV.flatten(0, 1)[index_N[rows_n.to(index_N.device)]])
                states = [seen.states[depth][rows_n.to(seen.states[depth].device)] for depth in range(len(seen.states))]
                sums_4L += _chunk_sums(readout, states, final_nV, labels_N[rows_n], seen.head_dtype)
            tokens += len(index_N)
            if max_tokens is not None and tokens >= max_tokens:
                break
    require_tokens(tokens)
    kl, js, cross_entropy, entropy = (tuple(row) for row in (sums_4L / tokens).tolist())
    return LensCurves(tuple(range(len(kl))), kl, js, cross_entropy, entropy, tokens)


def _chunk_sums(
    readout: _Readout, states: list[Tensor], final_nV: Tensor, labels_n: Tensor, head_dtype: torch.dtype
) -> Tensor:
    """Sums over n positions of (KL, JS, cross-entropy, entropy) at each depth, float64 [4, L + 1] on the CPU."""
    device = final_nV.device
    final_log_nV = final_nV.log_softmax(-1)
    labels_n1 = labels_n.to(device).unsqueeze(-1)
    columns = []
    for depth, state_nD in enumerate(states):
        logits_nV = readout(state_nD).to(device)
        if depth == len(states) - 1:
            check_last_depth(logits_nV, final_nV, head_dtype)
        log_nV = logits_nV.log_softmax(-1)
        columns.append(
            torch.stack(
                [
                    kl_divergence(final_log_nV, log_nV).sum(),
                    js_divergence(final_log_nV, log_nV).sum(),
                    -log_nV.gather(-1, labels_n1).sum(dtype=torch.float64),
                    entropy_of(log_nV).sum(),
                ]
            )
        )
    return torch.stack(columns, dim=1).cpu()


def check_last_depth(lens_nV: Tensor, logits_nV: Tensor, head_dtype: torch.dtype) -> None:
    """Logits [n, V] of the lens and of the model: raise LensError unless equal within the rounding of `head_dtype`."""
    tolerance = TOLERANCE.get(head_dtype, TOLERANCE[torch.float32])
    if logits_nV.is_cuda and head_dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        tolerance = TOLERANCE[torch.float16]  # TF32 keeps ten bits of mantissa, as fp16 does
    if lens_nV.shape != logits_nV.shape:
        raise LensError(f"the head gives {list(lens_nV.shape)} where the model gives {list(logits_nV.shape)} logits")
    finite = logits_nV.isfinite()
    off = float((lens_nV - logits_nV).masked_fill(~finite, 0).abs().max())
    scale = max(1.0, float(logits_nV.masked_fill(~finite, 0).abs().max()))
    if not off <= tolerance * scale:
        raise LensError(
            f"the lens at the last depth is not the model's output: logits differ by {off:.3g} where "
            f"{tolerance * scale:.3g} is rounding ({head_dtype}). Between its last block and its logits the model does "
            f"something the lens does not know (it applies the final norm, the head with its bias, and "
            f"config.final_logit_softcapping)"
        )


# ---- distances, from log-probabilities ----


def kl_divergence(p_log_nV: Tensor, q_log_nV: Tensor) -> Tensor:
    """Log-probabilities [n, V] of p and q -> KL(p || q) = sum_v p_v (log p_v - log q_v), [n] nats, float64, at least 0.

    Terms with p_v = 0 count as 0. Rounding down to -1e-6 is set to 0; anything below is too, with a RuntimeWarning.
    """
    kl_n = _expectation(p_log_nV, p_log_nV - q_log_nV)
    lowest = float(kl_n.min()) if len(kl_n) else 0.0
    if lowest < NEGATIVE_KL:
        warnings.warn(f"KL divergence of {lowest:.3g}: inputs are no normalised log-probabilities", RuntimeWarning, 2)
    return kl_n.clamp_(min=0)


def js_divergence(p_log_nV: Tensor, q_log_nV: Tensor) -> Tensor:
    """Log-probabilities [n, V] of p and q -> (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2, [n] nats, float64.

    Symmetric and at most log 2.
    """
    m_log_nV = torch.logaddexp(p_log_nV, q_log_nV) - math.log(2)
    return (kl_divergence(p_log_nV, m_log_nV) + kl_divergence(q_log_nV, m_log_nV)) / 2


def entropy_of(p_log_nV: Tensor) -> Tensor:
    """Log-probabilities [n, V] -> entropy -sum_v p_v log p_v, [n] nats, float64; log V for a uniform guess."""
    return -_expectation(p_log_nV, p_log_nV)


def _expectation(p_log_nV: Tensor, values_nV: Tensor) -> Tensor:
    """Sum of p_v times values, float64 [n]; terms with p_v = 0 count as 0 (looked for only where a nan shows one)."""
    terms_nV = p_log_nV.exp().mul_(values_nV)
    sums_n = terms_nV.sum(-1, dtype=torch.float64)
    if sums_n.isnan().any():
        sums_n = terms_nV.masked_fill_(p_log_nV == -math.inf, 0).sum(-1, dtype=torch.float64)
    return sums_n


# ---- reading a model ----


@dataclass(frozen=True)
class DecoderParts:
    """Where a transformers decoder keeps what the lens reads: its blocks, final norm, head and soft-cap."""

    blocks: nn.ModuleList
    norm: nn.Module
    head: nn.Module
    softcap: float | None

    @classmethod
    def of(cls, model: nn.Module) -> DecoderParts:
        """Find the parts of a causal language model. Raises LensError naming what is missing."""
        config: Any = getattr(model, "config", None)
        body: Any = getattr(model, "base_model", None)
        if config is None or body is None or body is model:
            raise LensError(f"{type(model).__name__}: expected a transformers causal language model with a head")
        blocks = _first(body, ("layers", "h"), nn.ModuleList)
        norm = _first(body, ("norm", "ln_f", "final_layernorm"), nn.Module)
        head = model.get_output_embeddings()  # type: ignore[operator]
        for name, part in (("list of blocks", blocks), ("final norm", norm), ("output head", head)):
            if part is None:
                children = ", ".join(child for child, _ in body.named_children())
                raise LensError(f"{type(model).__name__}: no {name} found; its body holds {children}")
        cap = getattr(config, "final_logit_softcapping", None)
        return cls(blocks, norm, head, None if cap is None else float(cap))


class _Readout:
    """States [n, D] -> logits [n, V] in fp32 (float64 stays): final norm with the statistics of these states, head,
    soft-cap.

    `forward` is called on the parts themselves, past their hooks, so that nobody else's hook counts these calls.
    """

    def __init__(self, parts: DecoderParts) -> None:
        self.norm, self.head, self.softcap = _in_fp32(parts.norm), _in_fp32(parts.head), parts.softcap

    def __call__(self, state_nD: Tensor) -> Tensor:
        with torch.autocast(state_nD.device.type, enabled=False):
            normed_nD = self.norm.forward(_upcast(state_nD))
            head_device = next(self.head.parameters()).device
            logits_nV: Tensor = self.head.forward(normed_nD.to(head_device))
            return logits_nV if self.softcap is None else torch.tanh(logits_nV / self.softcap) * self.softcap


class _Seen:
    """What one forward showed: depth -> counted states [N, D], and the dtype the head computed in."""

    def __init__(self) -> None:
        self.states: dict[int, Tensor] = {}
        self.head_dtype = torch.float32


@contextmanager
def _watching(parts: DecoderParts, index_N: Tensor) -> Iterator[_Seen]:
    """Hooks on block 0's input (before any other hook adds to it), each block's output and the head, then removed."""
    seen = _Seen()

    def keep(depth: int, x_BTD: Any) -> None:
        if not isinstance(x_BTD, Tensor) or x_BTD.ndim != 3:
            shape = list(x_BTD.shape) if isinstance(x_BTD, Tensor) else type(x_BTD).__name__
            raise LensError(f"depth {depth}: expected hidden states [B, T, D], got {shape}")
        seen.states[depth] = x_BTD.flatten(0, 1)[index_N.to(x_BTD.device)]

    def before_first(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keep(0, args[0] if args else kwargs.get("hidden_states"))

    def after(depth: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            keep(depth, output[0] if isinstance(output, tuple) else output)

        return hook

    def at_head(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        seen.head_dtype = output.dtype

    handles = [parts.blocks[0].register_forward_pre_hook(before_first, prepend=True, with_kwargs=True)]
    handles += [block.register_forward_hook(after(depth)) for depth, block in enumerate(parts.blocks, start=1)]
    handles.append(parts.head.register_forward_hook(at_head))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _first(body: nn.Module, names: tuple[str, ...], kind: type[nn.Module]) -> Any:
    return next((part for name in names if isinstance(part := getattr(body, name, None), kind)), None)


def _upcast(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _in_fp32(module: nn.Module) -> nn.Module:
    """The module itself when it computes in fp32 or float64 already, else a shallow copy over fp32 weights.

    A deep copy would copy whatever a hook of somebody else is bound to.
    """
    if all(value.dtype in (torch.float32, torch.float64) for value in module.parameters()):
        return module
    clone = copy.copy(module)
    clone.__dict__.pop("forward", None)  # a forward patched in place stays bound to the original weights
    clone._parameters = {
        name: None if value is None else nn.Parameter(_upcast(value.detach()), requires_grad=False)
        for name, value in module._parameters.items()
    }
    clone._buffers = {
        name: value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in module._buffers.items()
    }
    clone._modules = {name: None if child is None else _in_fp32(child) for name, child in module._modules.items()}
    return clone
