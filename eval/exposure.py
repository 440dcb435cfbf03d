"""What the times of `engram overlap` say: fetch, exposed and hidden time, the first block that hides all, tables.

cell = summarise_times({"without": [...], "ready": [...], "sync": [...], "prefetch": [...]})     # seconds
"""

from __future__ import annotations

import os
import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

VARIANTS = ("without", "ready", "sync", "prefetch")
NOISE = 0.05
"""A fetch below this share of its step cannot be told from noise; an exposed time below it is none."""


def summarise_times(times: dict[str, list[float]]) -> dict[str, Any]:
    """Seconds of each variant -> medians, quartiles, and what they say about the fetch."""
    median = {name: statistics.median(values) for name, values in times.items()}
    fetch, exposed = median["sync"] - median["ready"], median["prefetch"] - median["ready"]
    single = [after - before for after, before in zip(times["prefetch"], times["ready"], strict=True)]
    low, _, high = statistics.quantiles(single, n=4)
    noise = fetch < NOISE * median["ready"]
    reason = f"the fetch is under {NOISE:.0%} of the step" if noise else None
    return {
        **{f"t_{name}": median[name] for name in VARIANTS},
        "quartiles": {name: statistics.quantiles(values, n=4)[::2] for name, values in times.items()},
        "fetch": fetch,
        "exposed": exposed,
        "exposed_error": 1.57 * (high - low) / len(single) ** 0.5,  # McGill, Tukey, Larsen 1978
        "hidden": None if noise else 1 - exposed / fetch,
        "reason": reason,
        "overhead": median["prefetch"] / median["without"] - 1,
    }


def first_hidden(cells: list[dict[str, Any]]) -> dict[str, int | None]:
    """Store, phase and launch -> the first single block that exposes less than 5 % of its step, or None."""
    found: dict[str, int | None] = {}
    for cell in sorted(cells, key=lambda one: one["layers"]):
        key = f"{cell['store']}/{cell['phase']}/{cell['launch']}"
        found.setdefault(key, None)
        hidden = cell["exposed"] < NOISE * cell["t_ready"]
        if found[key] is None and len(cell["layers"]) == 1 and hidden:
            found[key] = cell["layers"][0]
    return found


def hidden_table(found: dict[str, Any], phase: str = "prefill", launch: str = "entry") -> str:
    """A measurement -> Markdown: hidden share, fetch and exposed milliseconds of each single block, a row a store."""
    cells = [c for c in found["cells"] if (c["phase"], c["launch"]) == (phase, launch) and len(c["layers"]) == 1]
    blocks = sorted({cell["layers"][0] for cell in cells})
    lines = [["store", "fetch, ms", *(f"block {block}" for block in blocks)], ["--:"] * (len(blocks) + 2)]
    for store in dict.fromkeys(cell["store"] for cell in cells):
        mine = {cell["layers"][0]: cell for cell in cells if cell["store"] == store}
        texts = [
            f"{1e3 * mine[b]['exposed']:.1f}"
            + (f" ± {1e3 * mine[b]['exposed_error']:.1f} ms" if "exposed_error" in mine[b] else " ms")
            + ("" if mine[b]["hidden"] is None else f", {mine[b]['hidden']:.0%} hidden")
            for b in blocks
        ]
        fetch = statistics.median(cell["fetch"] for cell in mine.values())
        lines.append([store, f"{1e3 * fetch:.1f}", *texts])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def show(found: dict[str, Any]) -> None:
    """Print the cells as a table, times in milliseconds."""
    heads = ("blocks", "store", "phase", "launch", *VARIANTS, "fetch", "exposed", "plan", "hidden", "overhead")
    table = Table(*heads, title="milliseconds, medians", title_justify="left")
    for cell in found["cells"]:
        times = [f"{1e3 * cell[f't_{name}']:.1f}" for name in VARIANTS]
        hidden = "noise" if cell["hidden"] is None else f"{cell['hidden']:.0%}"
        table.add_row(
            "+".join(map(str, cell["layers"])), cell["store"], cell["phase"], cell["launch"], *times,
            f"{1e3 * cell['fetch']:.1f}", f"{1e3 * cell['exposed']:.1f}",
            "–" if cell["predicted"] is None else f"{1e3 * cell['predicted']:.1f}", hidden, f"{cell['overhead']:+.1%}",
        )  # fmt: skip
    console = Console(width=None if os.isatty(1) else 140)
    console.print(table)
    errors = [abs(cell["prediction_error"]) for cell in found["cells"] if cell["prediction_error"] is not None]
    if errors:
        console.print(f"exposed time against engram plan: median error {1e3 * statistics.median(errors):.1f} ms")
    for key, layer in found["first_hidden"].items():
        console.print(f"{key}: first block with nothing exposed: {'none' if layer is None else layer}")
