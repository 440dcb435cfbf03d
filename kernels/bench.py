"""Kernels against plain torch and against the ceiling: the kernel claims of `engram bench`.

    engram bench --only 'kernel-*'

Every operation is first compared with its judge (kernels/reference*.py) in the same call: a wrong result raises, so a
red operation has no number. The two sides of a claim take turns. On a GPU the ceiling is a copy: `copy_` within the
device for tables there, host to device for pinned tables, bytes counted as read plus written. Look-ups change from
round to round, so that rows are not in a cache. Without a GPU only hashing on the CPU is measured.

Shapes: n looked-up rows, R rows, W row width, C columns, B batch, T time.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from engram.kernels import conv, cpu, gate, gather, launch, reference, reference_rows, rows, scatter
from engram.kernels.reference_rows import PLAIN, HashConstants, Rule

Side = Callable[[int], Any]
"""One side of a claim: called with the number of the round."""


@dataclass(frozen=True)
class Sizes:
    """How large things are: those of a GPU, or small ones for a rehearsal in the interpreter."""

    table_bytes: int = 2**33  # far beyond the L2 cache
    lookups: int = 2**20
    update_rows: int = 2_000_000
    update_lookups: int = 16_384
    pinned_bytes: int = 2**32
    pinned_lookups: int = 2**18
    tokens: tuple[int, ...] = (2_048, 65_536)
    matmul: int = 4096
    hidden: int = 2048
    sets: int = 8


REHEARSAL = Sizes(2**16, 64, 500, 64, 2**15, 32, (24,), 32, 48, 2)


@dataclass(frozen=True)
class Measured:
    """Seconds of both sides, round by round; bytes that each side moves where rates are compared."""

    value: list[float]
    against: list[float]
    target: float
    value_bytes: int = 0
    against_bytes: int = 0


def ids(device: torch.device, sizes: Sizes | None = None) -> list[str]:
    """The claims that can be measured on this device."""
    return [name for name, _ in _claims(device, sizes or Sizes())]


def claims(
    rounds: int, device: torch.device, wanted: Collection[str] | None = None, sizes: Sizes | None = None
) -> Iterator[tuple[str, Measured]]:
    """Measure the claims in `wanted` (all) one after another. Raises RuntimeError where a result is wrong."""
    for name, measure in _claims(device, sizes or Sizes()):
        if wanted is None or name in wanted:
            yield name, measure(rounds)
            _tables.cache_clear()


def _claims(device: torch.device, sizes: Sizes) -> list[tuple[str, Callable[[int], Measured]]]:
    found: list[tuple[str, Callable[[int], Measured]]] = []
    if cpu.available():
        found.append(("kernel-cpu-hash-against-torch", hash_on_cpu))
    if device.type == "cpu" and not launch.INTERPRETED:
        return found

    def add(name: str, function: Callable[..., Measured], *args: Any) -> None:
        found.append((f"kernel-{name}", lambda rounds: function(rounds, device, sizes, *args)))

    for row_bytes, share in ((128, 0.6), (256, 0.8), (512, 0.8), (1024, 0.8)):
        add(f"gather-{row_bytes}-B-against-copy", gather_against_copy, row_bytes, share)
    add("gather-256-B-against-indexing", gather_against_indexing)
    for tokens in sizes.tokens:
        add(f"hash-gather-{tokens}-against-torch", fused_against_torch, tokens, 1 / 3 if tokens < 10_000 else 1 / 1.1)
        add(f"hash-gather-{tokens}-against-two-kernels", fused_against_two, tokens)
    add("backward-update-against-copy", update_against_copy)
    add("backward-update-against-dense-adam", update_against_adam)
    add("gate-against-torch", gate_against_torch)
    add("conv-against-torch", conv_against_torch)
    for row_bytes, share in ((256, 0.7), (512, 0.85)):
        add(f"pinned-gather-{row_bytes}-B-against-copy", pinned_against_copy, row_bytes, share)
    add("matmul-beside-gather-against-alone", matmul_beside_gather)
    return found


def timed(side: Side, index: int, device: torch.device) -> float:
    """Seconds of one call, by events on a GPU."""
    if device.type == "cpu":
        began = time.perf_counter()
        side(index)
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    side(index)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def measure(
    rounds: int, device: torch.device, value: Side, against: Side, target: float, moved: tuple[int, int] = (0, 0)
) -> Measured:
    """Time both sides in random turns, three rounds of warm-up first; `moved`: bytes that each moves."""
    times: dict[str, list[float]] = {"value": [], "against": []}
    sides = {"value": value, "against": against}
    shuffle = random.Random(0)
    for index in range(3 + rounds):
        order = list(sides)
        shuffle.shuffle(order)
        for name in order:
            seconds = timed(sides[name], index, device)
            if index >= 3:
                times[name].append(seconds)
    return Measured(times["value"], times["against"], target, *moved)


def check(name: str, ours: Tensor, judge: Tensor, tolerance: float = 0.0) -> None:
    """Raise RuntimeError where ours differs from the judge's by more than `tolerance` (relative and absolute)."""
    if not torch.allclose(ours.float(), judge.float(), rtol=tolerance, atol=tolerance):
        worst = float((ours.float() - judge.float()).abs().max())
        raise RuntimeError(f"bench: {name} is wrong: it differs from plain torch by up to {worst:.3g}")


def constants(device: torch.device, heads: int = 8, rows_of_head: int = 20_000) -> HashConstants:
    """Hashing of 2- and 3-grams by `heads` heads each, as DeepSeek's demo does it, with a map of 129,280 ids."""
    vocabulary, classes, orders = 129_280, 99_092, (2, 3)
    sizes = [rows_of_head + 2 * head + 1 for head in range(len(orders) * heads)]
    line = [(2 * 1_234_567_890_123 + 1), (2 * 9_876_543_210 + 1), (2 * 5_555_555_555_555 + 1)]
    lines = [line[:order] + [0] * (3 - order) for order in orders for _ in range(heads)]
    inverse, exact = reference_rows.reciprocals(sizes, 2**63 - 1)
    offsets = [sum(sizes[:column]) for column in range(len(sizes))]
    lists: tuple[Any, ...] = (lines, sizes, offsets, inverse, [])
    numbers = [torch.tensor(values, dtype=torch.int64, device=device) for values in lists]
    class_of = torch.arange(vocabulary, device=device) % classes
    return HashConstants(
        numbers[0],
        numbers[1],
        numbers[2],
        numbers[3],
        numbers[4],
        class_of=class_of,
        orders=orders,
        heads=heads,
        limit=vocabulary,
        filler=2,
        xor=True,
        narrow=False,
        exact_reciprocal=exact,
    )


def _ids(count: int, below: int, sets: int, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, below, (count,), generator=generator).to(device) for _ in range(sets)]


@lru_cache(maxsize=1)
def _tables(total_bytes: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    count = max(64, total_bytes // (width * dtype.itemsize))
    return torch.empty(count, width, dtype=dtype, device=device).normal_()


def hash_on_cpu(rounds: int) -> Measured:
    """16,384 tokens x 16 columns on one thread: the CPU path (numba) against plain torch; target 1/2.5."""
    cpu_device, before = torch.device("cpu"), torch.get_num_threads()
    how = constants(cpu_device)
    batches = [one.view(8, 2048) for one in _ids(16_384, how.limit, 8, cpu_device)]
    check("hashing on the CPU", cpu.hash_rows(batches[0], how), reference_rows.hash_rows(batches[0], how))
    torch.set_num_threads(1)
    try:
        return measure(
            rounds,
            cpu_device,
            lambda i: cpu.hash_rows(batches[i % 8], how),
            lambda i: reference_rows.hash_rows(batches[i % 8], how),
            1 / 2.5,
        )
    finally:
        torch.set_num_threads(before)


def gather_against_copy(rounds: int, device: torch.device, sizes: Sizes, row_bytes: int, share: float) -> Measured:
    """Random bf16 rows into bf16: seconds a byte against those of `copy_` within the device."""
    width = row_bytes // 2
    table = _tables(sizes.table_bytes, width, torch.bfloat16, device)
    sets = _ids(sizes.lookups, len(table), sizes.sets, device)
    out = torch.empty(sizes.lookups, width, dtype=torch.bfloat16, device=device)
    ours = gather.gather_rows(table, sets[0], PLAIN, width, out=out)
    check("gather", ours, reference_rows.gather_rows(table, sets[0], PLAIN, width))
    source = torch.empty_like(out)
    moved = (2 * sizes.lookups * row_bytes + 8 * sizes.lookups, 2 * sizes.lookups * row_bytes)
    return measure(
        rounds,
        device,
        lambda i: gather.gather_rows(table, sets[i % len(sets)], PLAIN, width, out=out),
        lambda i: out.copy_(source),
        1 / share,
        moved,
    )


def gather_against_indexing(rounds: int, device: torch.device, sizes: Sizes) -> Measured:
    """Random rows of 256 B against `table[ids]`."""
    table = _tables(sizes.table_bytes, 128, torch.bfloat16, device)
    sets = _ids(sizes.lookups, len(table), sizes.sets, device)
    out = torch.empty(sizes.lookups, 128, dtype=torch.bfloat16, device=device)
    check("gather", gather.gather_rows(table, sets[0], PLAIN, 128, out=out), table[sets[0]])
    return measure(
        rounds,
        device,
        lambda i: gather.gather_rows(table, sets[i % len(sets)], PLAIN, 128, out=out),
        lambda i: table[sets[i % len(sets)]],
        1.0,
    )


def _token_batches(tokens: int, sizes: Sizes, device: torch.device) -> tuple[HashConstants, Tensor, list[Tensor]]:
    how = constants(device)
    table = torch.empty(int(how.sizes_K.sum()), 64, dtype=torch.bfloat16, device=device).normal_()
    return how, table, [one.view(1, tokens) for one in _ids(tokens, how.limit, sizes.sets, device)]


def fused_against_torch(rounds: int, device: torch.device, sizes: Sizes, tokens: int, target: float) -> Measured:
    """Hash and gather in one kernel against hashing in eager torch and `table[rows]`."""
    how, table, batches = _token_batches(tokens, sizes, device)
    ours = gather.hash_gather(batches[0], how, table, PLAIN, 64, dtype=torch.bfloat16)[0]
    check("hash and gather", ours, table[reference_rows.hash_rows(batches[0], how)[0]].flatten(-2))
    return measure(
        rounds,
        device,
        lambda i: gather.hash_gather(batches[i % len(batches)], how, table, PLAIN, 64, dtype=torch.bfloat16),
        lambda i: table[reference_rows.hash_rows(batches[i % len(batches)], how)[0]],
        target,
    )


def fused_against_two(rounds: int, device: torch.device, sizes: Sizes, tokens: int) -> Measured:
    """Hash and gather in one kernel against a kernel for each."""
    how, table, batches = _token_batches(tokens, sizes, device)
    out = torch.empty(tokens * how.columns, 64, dtype=torch.bfloat16, device=device)

    def two(index: int) -> Tensor:
        numbers = rows.hash_rows(batches[index % len(batches)], how).view(-1)
        return gather.gather_rows(table, numbers, PLAIN, 64, out=out)

    ours = gather.hash_gather(batches[0], how, table, PLAIN, 64, dtype=torch.bfloat16)[0]
    check("hash and gather", ours.view(-1, 64), two(0))
    return measure(
        rounds,
        device,
        lambda i: gather.hash_gather(batches[i % len(batches)], how, table, PLAIN, 64, dtype=torch.bfloat16),
        two,
        1.0,
    )


def _update(device: torch.device, sizes: Sizes) -> tuple[Tensor, Tensor, list[Tensor], Tensor, Rule]:
    table = _tables(4 * 64 * sizes.update_rows, 64, torch.float32, device)
    state = torch.zeros(len(table), device=device)
    sets = _ids(sizes.update_lookups, len(table), sizes.sets, device)
    grads = torch.randn(sizes.update_lookups, 64, generator=torch.Generator().manual_seed(1)).to(device)
    rule = Rule("rowwise_adam", lr=1e-3, beta2=0.99, eps=1e-8)
    judge, judge_state, ours, ours_state = table.clone(), state.clone(), table.clone(), state.clone()
    unique_U, sums_UW, _ = reference.sum_duplicates(sets[0], grads)
    reference_rows.update_rows(judge, judge_state, unique_U, sums_UW, rule)
    scatter.scatter_update(ours, ours_state, sets[0], grads, rule)
    check("row update", ours[unique_U], judge[unique_U], 1e-5)
    check("row state", ours_state, judge_state, 1e-5)
    return table, state, sets, grads, rule


def update_against_copy(rounds: int, device: torch.device, sizes: Sizes) -> Measured:
    """Sort, sum and update of look-ups: seconds a byte (gradients, rows twice, state twice) against `copy_`."""
    table, state, sets, grads, rule = _update(device, sizes)
    source = torch.empty(2**28 if device.type == "cuda" else 2**12, dtype=torch.uint8, device=device)
    to = torch.empty_like(source)
    moved = (grads.numel() * 4 * 3 + sizes.update_lookups * 16, 2 * source.numel())
    return measure(
        rounds,
        device,
        lambda i: scatter.scatter_update(table, state, sets[i % len(sets)], grads, rule),
        lambda i: to.copy_(source),
        1 / 0.5,
        moved,
    )


def update_against_adam(rounds: int, device: torch.device, sizes: Sizes) -> Measured:
    """The same against the backward of `nn.Embedding` and a step of dense Adam; target 1/50."""
    table, state, sets, grads, rule = _update(device, sizes)
    weight = torch.nn.Parameter(torch.zeros_like(table))
    adam = torch.optim.Adam([weight], lr=1e-3)

    def dense(index: int) -> None:
        torch.nn.functional.embedding(sets[index % len(sets)], weight).backward(grads)
        adam.step()
        adam.zero_grad()

    return measure(
        min(rounds, 10),
        device,
        lambda i: scatter.scatter_update(table, state, sets[i % len(sets)], grads, rule),
        dense,
        1 / 50,
    )


def _activations(device: torch.device, sizes: Sizes) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs of the gate and of the convolution in bf16, and a gradient of their output."""
    generator = torch.Generator().manual_seed(0)
    tokens, hidden = sizes.tokens[0], sizes.hidden

    def made(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(device, torch.bfloat16)

    given = {"x": made(1, tokens, 1, hidden), "key": made(1, tokens, 1, hidden), "value": made(1, tokens, hidden)}
    given |= {"norm": made(1, hidden), "taps": made(1, hidden, 4)}
    return {name: tensor.requires_grad_() for name, tensor in given.items()}, made(1, tokens, 1, hidden)


def _compared(
    name: str, rounds: int, device: torch.device, given: dict[str, Tensor], upstream: Tensor, calls: tuple[Any, Any]
) -> Measured:
    """Forward and backward of both calls; ours is first compared with plain torch in fp32, in every gradient.

    In bf16 plain torch is no judge: it rounds after each tap, and is off by a quarter at 2048 x 2048.
    """
    ours, theirs = calls

    def step(call: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        out: Tensor = call(tensors)
        out.backward(upstream.to(out.dtype))
        found = {"output": out.detach()}
        for key, tensor in tensors.items():
            if tensor.grad is not None:
                found[f"gradient of {key}"], tensor.grad = tensor.grad, None
        return found

    wide = {key: tensor.detach().float().requires_grad_() for key, tensor in given.items()}
    judge, found = step(theirs, wide), step(ours, given)
    for key, wanted in judge.items():
        scale = float(wanted.abs().max()) or 1.0  # 16-bit steps of the largest number
        check(f"{name}, {key}", found[key].float() / scale, wanted / scale, 0.02)
    return measure(rounds, device, lambda i: step(ours, given), lambda i: step(theirs, given), 1.0)


def gate_against_torch(rounds: int, device: torch.device, sizes: Sizes) -> Measured:
    """Gated value, forward and backward in bf16, against eager torch."""
    given, upstream = _activations(device, sizes)

    def call(module: Any) -> Any:
        return lambda t: module.gated_value(t["x"], t["key"], t["value"], t["norm"], t["norm"], 1e-6, "signed_sqrt")[0]

    return _compared("gated value", rounds, device, given, upstream, (call(gate), call(reference)))


def conv_against_torch(rounds: int, device: torch.device, sizes: Sizes) -> Measured:
    """Short convolution with norm and SiLU, forward and backward in bf16, against eager torch."""
    given, upstream = _activations(device, sizes)
    given = {"x": given["x"], "norm": given["norm"], "taps": given["taps"]}

    def call(module: Any) -> Any:
        return lambda t: module.conv_update(t["x"], t["norm"], t["taps"], 1e-5, 3)

    return _compared("convolution", rounds, device, given, upstream, (call(conv), call(reference)))


@lru_cache(maxsize=1)
def _pinned_values(device: torch.device, count: int) -> Tensor:
    """Page-locked numbers, no two pieces alike, drawn on the GPU: a CPU takes six seconds for 4 GiB."""
    values = torch.empty(count, pin_memory=device.type == "cuda")
    step = 2**26
    for start in range(0, count, step):
        part = values[start : start + step]
        part.copy_(torch.randn(len(part), device=device) + start // step)
    return values


def _pinned(device: torch.device, count: int, width: int) -> Tensor:
    return _pinned_values(device, count * width).view(count, width)


def pinned_against_copy(rounds: int, device: torch.device, sizes: Sizes, row_bytes: int, share: float) -> Measured:
    """Rows read in place from pinned host memory: seconds a byte against `copy_` from pinned memory to the device."""
    width = row_bytes // 4
    table = _pinned(device, sizes.pinned_bytes // row_bytes, width)
    sets = _ids(sizes.pinned_lookups, len(table), sizes.sets, device)
    out = torch.empty(sizes.pinned_lookups, width, device=device)
    judge = reference_rows.gather_rows(table, sets[0].cpu(), PLAIN, width)
    check("gather from pinned memory", gather.gather_rows(table, sets[0], PLAIN, width, out=out).cpu(), judge)
    size = min(table.numel(), 2**26)
    source = table.view(-1)[:size]
    to = torch.empty(size, device=device)
    return measure(
        rounds,
        device,
        lambda i: gather.gather_rows(table, sets[i % len(sets)], PLAIN, width, out=out),
        lambda i: to.copy_(source, non_blocking=True),
        1 / share,
        (sizes.pinned_lookups * row_bytes, 4 * size),
    )


def matmul_beside_gather(rounds: int, device: torch.device, sizes: Sizes) -> Measured:
    """Matrix products while a background gather reads pinned rows on a side stream, against without; target 1.03."""
    left, right = (torch.randn(sizes.matmul, sizes.matmul, device=device, dtype=torch.bfloat16) for _ in range(2))
    table = _pinned(device, sizes.pinned_bytes // 1024, 256)
    numbers = _ids(sizes.pinned_lookups, len(table), 1, device)[0]
    out = torch.empty(len(numbers), 256, device=device)
    products = 20 if device.type == "cuda" else 1
    if device.type == "cuda":  # long enough to lie under the gather, and not much longer
        gathers = timed(lambda _: gather.gather_rows(table, numbers, PLAIN, 256, out=out), 0, device)
        one = min(timed(lambda _: left @ right, i, device) for i in range(5))
        products = max(4, math.floor(0.8 * gathers / one))
    side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def alone(index: int) -> None:
        for _ in range(products):
            torch.matmul(left, right)

    def beside(index: int) -> None:
        if side is None:
            gather.gather_rows(table, numbers, PLAIN, 256, out=out, programs=gather.BACKGROUND)
        else:
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                gather.gather_rows(table, numbers, PLAIN, 256, out=out, programs=gather.BACKGROUND)
        alone(index)

    found = measure(rounds, device, beside, alone, 1.03)
    if side is not None:
        side.synchronize()
    check("gather beside products", out.cpu(), reference_rows.gather_rows(table, numbers.cpu(), PLAIN, 256))
    return found
