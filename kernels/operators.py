"""The operations on rows as torch operators, so that `torch.compile` and graph capture take them as they are.

    torch.ops.engram.hash_rows(ids_BT, *spelled_out(constants), None, None, None, 0, masked)

Each has a fake version and, on tensors that no kernel takes, plain torch as its body. Those of the gate and of the
convolution, with their gradients, are in kernels/gate.py and kernels/conv.py.

Shapes: see kernels/reference_rows.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from engram.kernels import reference, reference_rows
from engram.kernels.gather import BACKGROUND, gather_rows, hash_gather, put_rows
from engram.kernels.launch import runs
from engram.kernels.reference_rows import HashConstants, Rule
from engram.kernels.rows import hash_rows
from engram.kernels.scatter import scatter_update, sum_duplicates, update_rows


def spelled_out(constants: HashConstants) -> tuple[Any, ...]:
    """The constants as the arguments 1 to 12 of the operator."""
    return tuple(getattr(constants, field.name) for field in fields(constants))


@torch.library.custom_op("engram::hash_rows", mutates_args=("masked",))
def hash_rows_op(
    ids_BT: Tensor,
    multipliers_KN: Tensor,
    sizes_K: Tensor,
    offsets_K: Tensor,
    reciprocals_K: Tensor,
    eos_E: Tensor,
    class_of: Tensor | None,
    orders: Sequence[int],
    heads: int,
    limit: int,
    filler: int,
    xor: bool,
    narrow: bool,
    exact_reciprocal: bool,
    pad_BT: Tensor | None,
    dead_BT: Tensor | None,
    segment_BT: Tensor | None,
    skip: int,
    masked: Tensor,
) -> Tensor:
    """`hash_rows` as a torch operator, its constants spelled out."""
    # fmt: off
    constants = HashConstants(
        multipliers_KN, sizes_K, offsets_K, reciprocals_K, eos_E, class_of,
        tuple(orders), heads, limit, filler, xor, narrow, exact_reciprocal,
    )
    # fmt: on
    chosen = hash_rows if runs(ids_BT) else reference_rows.hash_rows
    return chosen(ids_BT, constants, pad_BT, dead_BT, segment_BT, skip, masked)


@hash_rows_op.register_fake
def _(ids_BT: Tensor, *rest: Any) -> Tensor:
    columns, skip = len(rest[6]) * rest[7], rest[16]
    groups = rest[1].shape[0] // columns
    return ids_BT.new_empty((groups, ids_BT.shape[0], ids_BT.shape[1] - skip, columns), dtype=torch.int64)


@torch.library.custom_op("engram::put_rows", mutates_args=("table",))
def put_rows_op(table: Tensor, ids_U: Tensor, values_UW: Tensor) -> None:
    """`put_rows` as a torch operator."""
    if runs(ids_U, values_UW):
        put_rows(table, ids_U, values_UW)
    else:
        table.index_copy_(0, ids_U, values_UW.to(table.dtype))


@put_rows_op.register_fake
def _(table: Tensor, ids_U: Tensor, values_UW: Tensor) -> None:
    return None


@torch.library.custom_op("engram::hash_gather", mutates_args=())
def hash_gather_op(
    ids_BT: Tensor,
    multipliers_CN: Tensor,
    sizes_C: Tensor,
    offsets_C: Tensor,
    reciprocals_C: Tensor,
    eos_E: Tensor,
    class_of: Tensor | None,
    orders: Sequence[int],
    heads: int,
    limit: int,
    filler: int,
    xor: bool,
    narrow: bool,
    exact_reciprocal: bool,
    table: Tensor,
    kind: int,
    width: int,
    pad_BT: Tensor | None,
    dead_BT: Tensor | None,
    segment_BT: Tensor | None,
    skip: int,
) -> tuple[Tensor, Tensor]:
    """`hash_gather` as a torch operator, its constants spelled out (`spelled_out`), fp32 out."""
    # fmt: off
    constants = HashConstants(
        multipliers_CN, sizes_C, offsets_C, reciprocals_C, eos_E, class_of,
        tuple(orders), heads, limit, filler, xor, narrow, exact_reciprocal,
    )
    # fmt: on
    borders = (pad_BT, dead_BT, segment_BT, skip)
    if runs(ids_BT):
        return hash_gather(ids_BT, constants, table, kind, width, *borders)
    rows_BTC = reference_rows.hash_rows(ids_BT, constants, *borders)[0].contiguous()
    values_nW = reference_rows.gather_rows(table, rows_BTC.view(-1), kind, width)
    return values_nW.view(*rows_BTC.shape[:2], -1).to(ids_BT.device), rows_BTC.clone()


@hash_gather_op.register_fake
def _(ids_BT: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    columns, width, skip = len(rest[6]) * rest[7], rest[15], rest[19]
    shape = (ids_BT.shape[0], ids_BT.shape[1] - skip)
    memory = ids_BT.new_empty((*shape, columns * width), dtype=torch.float32)
    return memory, ids_BT.new_empty((*shape, columns), dtype=torch.int64)


@torch.library.custom_op("engram::gather_rows", mutates_args=())
def gather_rows_op(table: Tensor, ids_n: Tensor, kind: int, width: int, background: bool) -> Tensor:
    """`gather_rows` as a torch operator, fp32 out."""
    if not runs(ids_n):
        return reference_rows.gather_rows(table, ids_n, kind, width).to(ids_n.device)
    return gather_rows(table, ids_n, kind, width, programs=BACKGROUND if background else None)


@gather_rows_op.register_fake
def _(table: Tensor, ids_n: Tensor, kind: int, width: int, background: bool) -> Tensor:
    return ids_n.new_empty((ids_n.shape[0], width), dtype=torch.float32)


@torch.library.custom_op("engram::sum_duplicates", mutates_args=())
def sum_duplicates_op(ids_n: Tensor, grads_nW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`sum_duplicates` as a torch operator; how many rows are distinct is known when it has run."""
    chosen = sum_duplicates if runs(ids_n, grads_nW) else reference.sum_duplicates
    unique_U, sums_UW, first_U = chosen(ids_n, grads_nW)
    return unique_U.clone(), sums_UW.clone(), first_U.clone()


@sum_duplicates_op.register_fake
def _(ids_n: Tensor, grads_nW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    distinct = torch.library.get_ctx().new_dynamic_size()
    sums_UW = grads_nW.new_empty((distinct, grads_nW.shape[1]), dtype=torch.float32)
    return ids_n.new_empty(distinct), sums_UW, ids_n.new_empty(distinct)


@torch.library.custom_op("engram::scatter_update", mutates_args=("table", "v_R"))
def scatter_update_op(
    table: Tensor,
    v_R: Tensor,
    ids_n: Tensor,
    grads_nW: Tensor,
    rule: str,
    lr: float,
    beta2: float,
    eps: float,
    keep: float,
    seed: int,
    step: int,
) -> None:
    """`scatter_update` as a torch operator, its rule spelled out."""
    how = Rule(rule, lr, beta2, eps, keep, seed, step)
    if runs(ids_n, grads_nW, v_R):
        scatter_update(table, v_R, ids_n, grads_nW, how)
    else:
        unique_U, sums_UW, _ = reference.sum_duplicates(ids_n, grads_nW)
        reference_rows.update_rows(table, v_R, unique_U, sums_UW, how)


@scatter_update_op.register_fake
def _(table: Tensor, v_R: Tensor, ids_n: Tensor, grads_nW: Tensor, *rule: Any) -> None:
    return None


@torch.library.custom_op("engram::update_rows", mutates_args=("table", "v_R"))
def update_rows_op(
    table: Tensor,
    v_R: Tensor,
    ids_U: Tensor,
    grads_UW: Tensor,
    rule: str,
    lr: float,
    beta2: float,
    eps: float,
    keep: float,
    seed: int,
    step: int,
) -> None:
    """`update_rows` as a torch operator, its rule spelled out."""
    chosen = update_rows if runs(ids_U, grads_UW, v_R) else reference_rows.update_rows
    chosen(table, v_R, ids_U, grads_UW, Rule(rule, lr, beta2, eps, keep, seed, step))


@update_rows_op.register_fake
def _(table: Tensor, v_R: Tensor, ids_U: Tensor, grads_UW: Tensor, *rule: Any) -> None:
    return None
