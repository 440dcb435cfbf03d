"""Loss-free balancing of routed experts (DeepSeek-V3), done by the training loop: transformers ships only the buffer.

    balancer = Balancer(model, rate=0.001)
    ...forward, backward, optimizer.step()...
    metrics = balancer.update()          # once per optimizer step, whatever the accumulation

After each step every router's `e_score_correction_bias` moves by rate * sign(mean load - load): an expert that got too
many tokens becomes a little less likely to be chosen. The bias enters the choice only, never the weights, so no
gradient is distorted.

Shapes: B batch, T time, K experts per token (top_k), E routed experts of a block.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from engram.memory import inside_backward

BIAS = "e_score_correction_bias"


@dataclass
class _Router:
    name: str
    gate: nn.Module
    experts: nn.Module
    load_E: Tensor
    exact_E: Tensor


class Balancer:
    """Counts tokens per expert in training forwards and moves the routing biases; does nothing for dense models.

    model      any transformers model; every module with a `gate` that holds the bias buffer and with `experts`.
    rate       step of the bias (0.001 in DeepSeek-V3).
    alarm      routing entropy of the worst block below which `update` says "alarm": with half of 22 experts dead it is
               0.78, with all tokens on 2 of them 0.22.
    Counted: forwards in training mode, once each (a recomputation inside backward is not counted again), summed until
    `update`, over all ranks when torch.distributed runs. Not counted: positions whose mask is 0, from the forward's own
    two-dimensional `attention_mask` or from `with balancer.masked(mask_BT)`.
    The bias stays in fp32 and in `state_dict`: after a cast of the model it is restored to its exact fp32 values at the
    next forward or update. Detach with `detach()`, or use the balancer as a context manager.
    Raises ValueError for a rate below 0 or an alarm outside 0..1.
    """

    def __init__(self, model: nn.Module, rate: float = 0.001, alarm: float = 0.75) -> None:
        if not rate >= 0:
            raise ValueError(f"rate: {rate} must not be negative (0 only counts; DeepSeek-V3 uses 0.001)")
        if not 0 <= alarm <= 1:
            raise ValueError(f"alarm: {alarm} must lie in 0..1; it is a routing entropy, and 1 is perfect balance")
        self.rate, self.alarm = rate, alarm
        self.mask_BT: Tensor | None = None
        self._forced_BT: Tensor | None = None
        self.routers = list(_routers(model))
        self._handles: list[Any] = []
        if not self.routers:
            return
        self._handles.append(model.register_forward_pre_hook(self._take_mask, with_kwargs=True))
        self._handles.append(model.register_forward_hook(self._drop_mask, always_call=True))
        for router in self.routers:
            self._handles.append(router.gate.register_forward_pre_hook(self._before_gate(router)))
            self._handles.append(router.experts.register_forward_pre_hook(self._count(router), with_kwargs=True))

    def detach(self) -> None:
        """Remove every hook; the biases stay as they are."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Balancer:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.detach()

    @contextmanager
    def masked(self, mask_BT: Tensor) -> Iterator[None]:
        """Count only positions where `mask_BT` (bool or 0/1) is set, in the forwards inside the block."""
        before, self._forced_BT = self._forced_BT, mask_BT
        try:
            yield
        finally:
            self._forced_BT = before

    def loads(self) -> dict[str, Tensor]:
        """Router name -> int64 tokens per expert [E] since the last update, of this rank."""
        return {router.name: router.load_E.clone() for router in self.routers}

    @torch.no_grad()
    def update(self) -> dict[str, Any]:
        """Move every bias by rate * sign(mean load - load), reset the counts, and return the metrics of the counts.

        "routing_entropy": entropy of the load over log E, mean over blocks (1 = even, 0 = one expert only);
        "min_routing_entropy": that of the worst block; "max_load_ratio": largest load over mean load, worst block;
        "alarm": whether the worst block's entropy fell below the threshold (a mean hides one dead router);
        "counted": token-expert pairs. {} for a dense model; a block that counted nothing is left alone.
        """
        if not self.routers:
            return {}
        entropies, ratios, counted = [], [], 0
        for router in self.routers:
            load_E = _over_ranks(router.load_E)
            total = int(load_E.sum())
            counted += total
            bias_E = self._fp32_bias(router)
            if total:
                entropies.append(routing_entropy(load_E))
                ratios.append(float(load_E.max()) * load_E.numel() / total)
                # mean - load, times E to stay in integers: the sign is exact for any number of tokens
                bias_E.add_(torch.sign(total - load_E * load_E.numel()).to(bias_E.dtype), alpha=self.rate)
                router.exact_E = bias_E.clone()
            router.load_E.zero_()
        worst = min(entropies, default=math.nan)
        return {
            "routing_entropy": sum(entropies) / len(entropies) if entropies else math.nan,
            "min_routing_entropy": worst,
            "max_load_ratio": max(ratios, default=math.nan),
            "alarm": worst < self.alarm,
            "counted": counted,
        }

    def _fp32_bias(self, router: _Router) -> Tensor:
        """The bias buffer, in fp32. A cast buffer that still equals the last exact values gets these back."""
        bias_E = typing.cast(Tensor, getattr(router.gate, BIAS))
        if bias_E.dtype != torch.float32:
            exact_E = router.exact_E.to(bias_E.device)
            same = torch.equal(exact_E.to(bias_E.dtype), bias_E)
            bias_E = exact_E.clone() if same else bias_E.float()
            setattr(router.gate, BIAS, bias_E)
        return bias_E

    def _before_gate(self, router: _Router) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._fp32_bias(router)

        return hook

    def _count(self, router: _Router) -> Any:
        """Experts take (hidden, top-k indices, weights) in every transformers version; routers' outputs differ."""

        @torch.no_grad()
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not module.training or inside_backward():
                return
            chosen_K = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
            chosen_K = chosen_K.reshape(-1, chosen_K.shape[-1])
            mask_BT = self._forced_BT if self._forced_BT is not None else self.mask_BT
            if mask_BT is not None:
                if mask_BT.numel() != chosen_K.shape[0]:
                    raise ValueError(
                        f"mask: {tuple(mask_BT.shape)} has {mask_BT.numel()} positions, the router saw "
                        f"{chosen_K.shape[0]}; give one value per token of the batch"
                    )
                chosen_K = chosen_K[mask_BT.reshape(-1).to(chosen_K.device).bool()]
            if router.load_E.device != chosen_K.device:
                router.load_E = router.load_E.to(chosen_K.device)
            router.load_E += torch.bincount(chosen_K.reshape(-1), minlength=router.load_E.numel())

        return hook

    def _take_mask(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        self.mask_BT = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None

    def _drop_mask(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.mask_BT = None


def routing_entropy(load_E: Tensor) -> float:
    """Entropy of tokens per expert [E], divided by log E: 1 = even, 0 = one expert (or a single expert) only."""
    share_E = load_E.double() / load_E.sum().clamp(min=1)
    if load_E.numel() < 2:
        return 0.0
    return float(-(torch.special.xlogy(share_E, share_E)).sum() / math.log(load_E.numel()))


def _routers(model: nn.Module) -> Iterator[_Router]:
    for name, module in model.named_modules():
        gate, experts = getattr(module, "gate", None), getattr(module, "experts", None)
        if (
            isinstance(gate, nn.Module)
            and isinstance(experts, nn.Module)
            and isinstance(getattr(gate, BIAS, None), Tensor)
        ):
            bias_E = typing.cast(Tensor, getattr(gate, BIAS))
            load_E = torch.zeros(bias_E.numel(), dtype=torch.int64, device=bias_E.device)
            yield _Router(name, gate, experts, load_E, bias_E.detach().float().clone())


def _over_ranks(load_E: Tensor) -> Tensor:
    total_E = load_E.clone()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(total_E)
    return total_E
