"""One torch optimizer for a model with memory: the backbone and the memory's dense parts, and the rows.

    opt = engram.optim.build(model, lr=3e-4, row_lr_multiplier=5.0)
    loss.backward(); torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0); opt.step(); opt.zero_grad()

Dense parameters go to torch's AdamW. Rows go to a row-wise rule (kernels/reference.py has the formulas): only touched
rows are read, changed and written, and the state is one fp32 scalar a row. Learning-rate multiplier 5 and weight decay
0 for rows are the paper's (section 4.1). Row groups are ordinary `param_groups`, so schedulers, clipping, gradient
scalers and accumulation work unchanged.

Shapes: R rows, U touched rows, W row width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from engram.config import ConfigError
from engram.kernels.dispatch import elementwise_adam, rowwise_adagrad, rowwise_adam
from engram.strict import choice
from engram.table import RowProxy, Table

RowRule = Literal["rowwise_adam", "rowwise_adagrad", "sgd", "adam"]
RULES: tuple[RowRule, ...] = ("rowwise_adam", "rowwise_adagrad", "sgd", "adam")


def build(
    model: nn.Module,
    lr: float = 3e-4,
    row_lr_multiplier: float = 5.0,
    *,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    row_rule: RowRule = "rowwise_adam",
    row_betas: tuple[float, float] = (0.9, 0.99),
    row_eps: float = 1e-8,
    row_weight_decay: float = 0.0,
) -> EngramOptimizer:
    """All trainable parameters and rows of `model` -> one torch optimizer.

    weight_decay applies to matrices (two dimensions and more), not to norms, biases or the memory's convolution.
    row_betas: only the second is used by "rowwise_adam" (no momentum); both by "adam", whose state has the table's
    size.
    row_weight_decay: decoupled, applied to the rows that a step touches.
    Raises ConfigError when nothing is trainable or a choice is unknown.
    """
    choice("row_rule", row_rule, RULES)
    tables = {id(m.proxy): m for m in model.modules() if isinstance(m, Table) and m.trainable}
    undecayed = {id(p) for name, p in model.named_parameters() if p.ndim < 2 or _is_memory_vector(name)}
    groups: dict[str, list[nn.Parameter]] = {"decay": [], "no_decay": [], "rows": []}
    for parameter in model.parameters():
        if isinstance(parameter, RowProxy):
            if id(parameter) in tables:
                groups["rows"].append(parameter)
        elif parameter.requires_grad:
            groups["no_decay" if id(parameter) in undecayed else "decay"].append(parameter)
    if not any(groups.values()):
        raise ConfigError("optimizer: the model has no trainable parameter and no trainable row")
    dense = {"lr": lr, "betas": betas, "eps": eps, "name": "decay", "weight_decay": weight_decay}
    rows = {
        "name": "rows",
        "lr": lr * row_lr_multiplier,
        "rule": row_rule,
        "betas": row_betas,
        "eps": row_eps,
        "weight_decay": row_weight_decay,
    }
    param_groups: list[dict[str, Any]] = []
    if groups["decay"]:
        param_groups.append({**dense, "params": groups["decay"]})
    if groups["no_decay"]:
        param_groups.append({**dense, "params": groups["no_decay"], "name": "no_decay", "weight_decay": 0.0})
    if groups["rows"]:
        param_groups.append({**rows, "params": groups["rows"]})
    return EngramOptimizer(param_groups, tables.values())


def _is_memory_vector(name: str) -> bool:
    """Norm weights [S, D] and convolution taps of a memory are no matrices: the paper decays neither."""
    return name.rpartition(".")[2] in ("key_norm", "query_norm", "conv_norm", "conv")


class EngramOptimizer(torch.optim.Optimizer):
    """AdamW for dense groups and a row-wise rule for the group named "rows"; see `build`."""

    def __init__(self, param_groups: list[dict[str, Any]], tables: Iterable[Table]) -> None:
        self._tables: dict[int, Table] = {id(table.proxy): table for table in tables}
        super().__init__(param_groups, defaults={})
        dense = [group for group in self.param_groups if group["name"] != "rows"]
        self._dense = torch.optim.AdamW(dense) if dense else None
        self._share()

    def _share(self) -> None:
        """The inner optimizer works on this one's groups and state, so schedulers and state_dict see one object."""
        if self._dense is not None:
            self._dense.param_groups = [group for group in self.param_groups if group["name"] != "rows"]
            self._dense.state = self.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a dense group (AdamW fields) to the optimizer."""
        param_group.setdefault("name", "added")
        super().add_param_group(param_group)
        if hasattr(self, "_dense"):
            if self._dense is None:
                self._dense = torch.optim.AdamW([param_group])
            else:
                for key, value in self._dense.defaults.items():
                    param_group.setdefault(key, value)
            self._share()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore dense and row state. Raises ValueError when the groups do not fit."""
        super().load_state_dict(state_dict)
        self._share()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients; those of rows are always dropped whole, since a zero gradient would still touch them."""
        super().zero_grad(set_to_none)
        for table in self._tables.values():
            table.proxy.grad = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of dense parameters and touched rows; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._dense is not None:
            self._dense.step()
        for group in self.param_groups:
            if group["name"] == "rows":
                for proxy in group["params"]:
                    if proxy.grad is not None:
                        self._step_rows(proxy, group)
        return loss

    def _step_rows(self, proxy: RowProxy, group: dict[str, Any]) -> None:
        table, state = self._tables[id(proxy)], self.state[proxy]
        store = table.store
        if not state:
            state.update(_row_state(group["rule"], store.count, store.width, store.rows.device))
        ids_U, grads_UW = proxy.row_ids, proxy.grad
        assert ids_U is not None and grads_UW is not None
        values_UW = store.gather(ids_U)
        if group["weight_decay"]:
            values_UW = values_UW * (1 - group["lr"] * group["weight_decay"])
        state["step"] += 1
        new_UW = _apply_rule(group, state, ids_U, values_UW, grads_UW)
        store.update(ids_U, new_UW)
        table.updates += 1

    def touched_rows(self) -> dict[int, tuple[int, int]]:
        """Layer -> (rows ever updated, rows of the table); needs a rule with per-row state, and reads it whole."""
        counts = {}
        for group in self.param_groups:
            for proxy in group["params"] if group["name"] == "rows" else ():
                table, v = self._tables[id(proxy)], self.state.get(proxy, {}).get("v")
                if v is not None and v.ndim == 1:
                    counts[table.layer] = (int((v >= 0).sum()), table.store.count)
        return counts


def _row_state(rule: str, rows: int, width: int, device: torch.device) -> dict[str, Any]:
    """State of one table: a negative `v` marks a row that was never touched."""
    state: dict[str, Any] = {"step": torch.zeros((), dtype=torch.float32)}
    if rule in ("rowwise_adam", "rowwise_adagrad"):
        state["v"] = torch.full((rows,), -1.0, device=device)
    elif rule == "adam":
        state["m"] = torch.zeros(rows, width, device=device)
        state["v"] = torch.zeros(rows, width, device=device)
    return state


def _apply_rule(
    group: dict[str, Any], state: dict[str, Any], ids_U: Tensor, values_UW: Tensor, grads_UW: Tensor
) -> Tensor:
    """New values of the touched rows; their state is updated in place."""
    lr, betas, eps = group["lr"], group["betas"], group["eps"]
    if group["rule"] == "sgd":
        return values_UW - lr * grads_UW
    v = state["v"]
    if group["rule"] == "adam":
        m_UW, v_UW = state["m"].index_select(0, ids_U), v.index_select(0, ids_U)
        step = int(state["step"])
        new_UW, m_UW, v_UW = elementwise_adam(values_UW, grads_UW, m_UW, v_UW, step, lr, betas, eps)
        state["m"].index_copy_(0, ids_U, m_UW)
        v.index_copy_(0, ids_U, v_UW)
        return new_UW
    v_U = v.index_select(0, ids_U)
    if group["rule"] == "rowwise_adam":
        new_UW, v_U = rowwise_adam(values_UW, grads_UW, v_U, lr, betas[1], eps)
    else:
        new_UW, v_U = rowwise_adagrad(values_UW, grads_UW, v_U, lr, eps)
    v.index_copy_(0, ids_U, v_U)
    return new_UW
