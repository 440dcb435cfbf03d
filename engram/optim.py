"""One torch optimizer for a model with memory: the backbone and the memory's dense parts, and the rows.

    opt = engram.optim.build(model, lr=3e-4, row_lr_multiplier=5.0)
    loss.backward(); torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0); opt.step(); opt.zero_grad()

Dense parameters go to torch's AdamW. Rows go to a row-wise rule (kernels/reference.py has the formulas): only touched
rows are read, changed and written, and the state is one fp32 scalar a row. Learning-rate multiplier 5 and weight decay
0 for rows are the paper's (section 4.1); decay of all rows at once changes one number of their table. Row groups are
ordinary `param_groups`, so schedulers, clipping, gradient scalers and accumulation work unchanged.

Shapes: R rows, U touched rows, W row width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from engram.config import ConfigError
from engram.kernels.dispatch import RULES as IN_PLACE
from engram.kernels.dispatch import Rule, elementwise_adam, prepare, rowwise_adagrad, rowwise_adam, update_rows
from engram.stores import TableSpec
from engram.strict import choice, require
from engram.table import RowProxy, Table

RowRule = Literal["rowwise_adam", "rowwise_adagrad", "sgd", "adam"]
RULES: tuple[RowRule, ...] = ("rowwise_adam", "rowwise_adagrad", "sgd", "adam")
RowDecay = Literal["touched", "global"]
DECAYS: tuple[RowDecay, ...] = ("touched", "global")


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
    row_decay: RowDecay = "touched",
) -> EngramOptimizer:
    """All trainable parameters and rows of `model` -> one torch optimizer.

    weight_decay applies to matrices (two dimensions and more), not to norms, biases or the memory's convolution.
    row_betas: only the second is used by "rowwise_adam" (no momentum); both by "adam", whose state has the table's
    size.
    row_weight_decay: decoupled; 0 is none.
    row_decay: "touched" decays the rows that a step touches; "global" every row of a table at each step that has a
    gradient for it, as AdamW does with a dense matrix. That changes one number a table (`Table.scale`), and every read
    sees decayed values.
    Raises ConfigError when nothing is trainable, a choice is unknown, or lr * row_lr_multiplier * row_weight_decay is 1
    or more; `step` raises it when a schedule makes it so.
    """
    choice("row_rule", row_rule, RULES)
    choice("row_decay", row_decay, DECAYS)
    _check_numbers(locals())
    undecayed = {id(p) for name, p in model.named_parameters() if p.ndim < 2 or _is_memory_vector(name)}
    groups: dict[str, list[nn.Parameter]] = {"decay": [], "no_decay": [], "rows": []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            dense = "no_decay" if id(parameter) in undecayed else "decay"
            groups["rows" if isinstance(parameter, RowProxy) else dense].append(parameter)
    if not any(groups.values()):
        raise ConfigError("optimizer: the model has no trainable parameter and no trainable row")
    if groups["rows"]:
        prepare()
    defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "rule": None, "name": "added"}
    fields: dict[str, dict[str, Any]] = {
        "decay": {},
        "no_decay": {"weight_decay": 0.0},
        "rows": {
            "lr": lr * row_lr_multiplier,
            "rule": row_rule,
            "betas": row_betas,
            "eps": row_eps,
            "weight_decay": row_weight_decay,
            "row_decay": row_decay,
        },
    }
    _kept(fields["rows"])
    param_groups = [{"params": members, "name": name, **fields[name]} for name, members in groups.items() if members]
    return EngramOptimizer(param_groups, defaults)


def _check_numbers(given: dict[str, Any]) -> None:
    for name in ("lr", "row_lr_multiplier", "eps", "row_eps", "weight_decay", "row_weight_decay"):
        require(given[name] >= 0, f"{name}: {given[name]} must not be negative")
    for name in ("betas", "row_betas"):
        require(all(0 <= beta < 1 for beta in given[name]), f"{name}: {given[name]} must lie in 0 to below 1")


def _kept(group: dict[str, Any]) -> float:
    """What decay leaves of a row in one step, as a factor above 0."""
    lr, weight = group["lr"], group["weight_decay"]
    require(
        lr * weight < 1,
        f"row_weight_decay: {weight} at a learning rate of {lr} for rows takes {lr * weight} of a row away; lower one "
        f"of them, so that their product is below 1",
    )
    return float(1 - lr * weight)


def _is_memory_vector(name: str) -> bool:
    """Norm weights [S, D] and convolution taps of a memory are no matrices: the paper decays neither."""
    return name.rpartition(".")[2] in ("key_norm", "query_norm", "conv_norm", "conv")


class EngramOptimizer(torch.optim.Optimizer):
    """AdamW for dense groups and a row-wise rule for groups with a `rule`; see `build`."""

    def __init__(self, param_groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__(param_groups, defaults)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients; those of rows are always dropped whole, since a zero gradient would still touch them."""
        super().zero_grad(set_to_none)
        for proxy in self._proxies():
            proxy.grad = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of dense parameters and touched rows; returns the closure's loss.

        Raises RuntimeError for rows in a run of several processes, which would drift apart, and ConfigError, before
        anything has changed, for a rate at which row_weight_decay would turn the rows' signs.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group.get("rule") is not None:
                _kept(group)
        for group in self.param_groups:
            if group.get("rule") is None:
                self._step_dense(group)
                continue
            for proxy in group["params"]:
                if proxy.grad is not None and proxy.row_ids is not None and proxy.requires_grad:
                    self._step_rows(proxy, group)
        return loss

    def _step_dense(self, group: dict[str, Any]) -> None:
        """torch's own AdamW on the parameters of a group that have a gradient."""
        with_grad = [p for p in group["params"] if p.grad is not None]
        for parameter in with_grad:
            if not self.state[parameter]:
                zeros = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                self.state[parameter].update(step=torch.zeros(()), exp_avg=zeros, exp_avg_sq=zeros.clone())
        states = [self.state[p] for p in with_grad]
        adamw(
            with_grad,
            [p.grad for p in with_grad if p.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _step_rows(self, proxy: RowProxy, group: dict[str, Any]) -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            ranks = torch.distributed.get_world_size()
            if ranks > 1:
                raise RuntimeError(f"rows are not exchanged between {ranks} processes in this version; use one")
        table, state = _table_of(proxy), self.state[proxy]
        store = table.store
        if not state:
            state.update(_row_state(group["rule"], store.spec, store.device))
        ids_U, grads_UW = proxy.row_ids, proxy.grad
        assert ids_U is not None and grads_UW is not None
        kept, everywhere = _kept(group), group.get("row_decay") == "global"
        state["step"] += 1
        step = int(state["step"])
        if group["rule"] in IN_PLACE and table.moves_in_place() and not (everywhere and kept != 1):
            seed, betas = store.spec.seed, group["betas"]
            rule = Rule(group["rule"], group["lr"], betas[1], group["eps"], kept, seed, step)
            update_rows(store.rows, state.get("v", grads_UW), ids_U, grads_UW, rule)
        else:
            values_UW = table.touched_values()
            if kept != 1:
                values_UW = values_UW * kept
            new_UW = _apply_rule(group, state, ids_U, values_UW, grads_UW)
            table.write(ids_U, new_UW, step, decay=kept if everywhere else 1.0)
        table.updates += group["lr"] > 0
        proxy.applied()

    def _proxies(self) -> list[RowProxy]:
        return [p for group in self.param_groups if group.get("rule") is not None for p in group["params"]]

    def touched_rows(self) -> dict[int, tuple[int, int]]:
        """Layer -> (rows ever updated, rows of the table); needs a rule with per-row state, and reads it whole."""
        counts = {}
        for proxy in self._proxies():
            table, v = _table_of(proxy), self.state.get(proxy, {}).get("v")
            if v is not None and v.ndim == 1:
                counts[table.layer] = (int((v > 0).sum()), table.store.spec.rows)
        return counts


def _table_of(proxy: RowProxy) -> Table:
    table = None if proxy.table is None else proxy.table()
    if table is None:
        raise RuntimeError(
            "optimizer: the table of these rows no longer exists; build the optimizer from the live model"
        )
    return table


def _row_state(rule: str, spec: TableSpec, device: torch.device) -> dict[str, Any]:
    """State of one table. `v` is 0 for a row that was never touched: such pages of it are never made real."""
    state: dict[str, Any] = {"step": torch.zeros((), dtype=torch.float32)}
    if rule in ("rowwise_adam", "rowwise_adagrad"):
        state["v"] = torch.zeros(spec.rows, device=device)
    elif rule == "adam":
        state["m"] = torch.zeros(spec.rows, spec.width, device=device)
        state["v"] = torch.zeros(spec.rows, spec.width, device=device)
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
