"""The figures of reports and of the README: one style, readable at README size and without colour vision.

    save_png(loss_curves({"moe": {0: [[1e5, 6.2], [2e5, 5.4]]}}), "loss.png")
    result_figures(results)         # name -> figure, all that a list of result dictionaries holds

Colours are those of Okabe and Ito; arms also differ by marker and line style. No pyplot and no global state: each
function returns a Figure with an Agg canvas. Loss, KL and entropy are in nats per token.
"""

from __future__ import annotations

import io
import math
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram.eval.stats import mean_interval, paired_difference

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
SIZE = (6.4, 3.6)
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", "-.", ":", "-", "--", "-.")
GREY = "#666666"
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}
DEPTH_TITLES = {
    "kl": ("KL(final ‖ depth)", "How far the prediction at each depth is from the final one"),
    "js": ("Jensen-Shannon divergence", "How far the prediction at each depth is from the final one"),
    "cross_entropy": ("next-token loss", "Loss of the prediction at each depth"),
    "entropy": ("entropy", "Entropy of the prediction at each depth"),
}
TEXT_COLUMNS = 84
TEXT_LINES = 24
MONO_WIDTH = 0.602
"""Advance of a DejaVu Sans Mono character, in units of the font size."""

Curve = Sequence[Sequence[float]]


def loss_curves(
    curves: Mapping[str, Mapping[int, Curve]],
    baselines: Mapping[str, float] | None = None,
    title: str = "Held-out loss",
) -> Figure:
    """Arm -> seed -> [[training tokens, nats per token], ...] -> figure; thin lines are seeds, the thick one the mean.

    `baselines` (name -> nats) are drawn as horizontal lines. Raises ValueError when no curve has a point.
    """
    _require_points(point for seeds in curves.values() for curve in seeds.values() for point in curve)
    with _axes(title, "training tokens (millions)", "nats per token") as (figure, axes):
        for index, (arm, seeds) in enumerate(curves.items()):
            look = _look(index)
            runs = [[(x / 1e6, y) for x, y in curve] for curve in seeds.values() if curve]
            if len(runs) > 1:
                for run in runs:
                    axes.plot(*zip(*run, strict=True), color=look["color"], linewidth=0.6, alpha=0.45)
            mean = _mean_curve(runs)
            marker = look["marker"] if len(mean) <= 40 else None
            axes.plot(*zip(*mean, strict=True), **{**look, "marker": marker}, label=_label(arm, len(runs)))
        for name, value in (baselines or {}).items():
            axes.axhline(value, color=GREY, linewidth=0.9, linestyle=":")
            axes.annotate(
                name, (1, value), xycoords=("axes fraction", "data"), ha="right", va="bottom", color=GREY, size=8
            )
        axes.legend()
    return figure


def depth_curves(
    curves: Mapping[str, Sequence[Mapping[str, Any]]], quantity: str = "kl", memory_layers: Iterable[int] = ()
) -> Figure:
    """Arm -> lens curves (`LensCurves.to_dict()`, one a seed) -> figure of `quantity` over depth.

    quantity       "kl", "js", "cross_entropy" or "entropy".
    memory_layers  0-based blocks with a memory, marked where it enters (between depth l and l + 1).
    With several seeds the bars are 95 % t intervals. Raises ValueError for an unknown quantity or no curve.
    """
    if quantity not in DEPTH_TITLES:
        raise ValueError(f"quantity: {quantity!r} is not known; choose one of {', '.join(DEPTH_TITLES)}")
    _require_points(point for lenses in curves.values() for lens in lenses for point in lens["depths"])
    label, title = DEPTH_TITLES[quantity]
    with _axes(title, "depth (0: embedding, l: after block l - 1)", f"{label}, nats") as (figure, axes):
        for layer in memory_layers:
            axes.axvspan(layer, layer + 1, color="#F0E442", alpha=0.25, linewidth=0)
            axes.annotate(
                "memory", (layer + 0.5, 0.97), xycoords=("data", "axes fraction"), ha="center", va="top", size=8
            )
        for index, (arm, lenses) in enumerate((arm, lenses) for arm, lenses in curves.items() if lenses):
            columns = list(zip(*(lens[quantity] for lens in lenses), strict=True))
            points = [mean_interval([float(value) for value in column]) for column in columns]
            bars = [point.half or 0.0 for point in points] if len(lenses) > 1 else None
            means: Any = [point.mean for point in points]
            axes.errorbar(
                lenses[0]["depths"], means, yerr=bars, capsize=2, label=_label(arm, len(lenses)), **_look(index)
            )
        if quantity in ("kl", "js"):
            axes.set_ylim(bottom=0)
        axes.locator_params(axis="x", integer=True)
        axes.legend()
    return figure


def gate_text(sample: Mapping[str, Any], layer: int | str | None = None) -> Figure:
    """`gate_sample` output -> figure of the text, each token on a ground as dark as its gate is open (mean of streams).

    Takes the first memory layer unless `layer` names one, and as many lines as fit. Raises ValueError for an unknown
    layer.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    layers = sample["layers"]
    key = str(next(iter(layers)) if layer is None else layer)
    if key not in layers:
        raise ValueError(f"layer: {key} has no gates; the sample has {', '.join(layers)}")
    gates = [statistics.fmean(row) for row in layers[key]]
    pieces = list(_wrapped(sample["tokens"], gates))
    lines = 1 + max(line for line, *_ in pieces)
    colours = ListedColormap(colormaps["Blues"](range(170)))  # darker ones would hide black letters
    scale = Normalize(min(gates), max(gates) if max(gates) > min(gates) else min(gates) + 1e-6)
    height = 0.75 + 0.2 * lines
    with _axes(f"Gate of the memory in block {key}, token by token", "", "", (SIZE[0], height)) as (figure, axes):
        axes.set(xlim=(0, TEXT_COLUMNS), ylim=(lines, 0))
        axes.axis("off")
        size = (SIZE[0] - 0.3) * 72 / TEXT_COLUMNS / MONO_WIDTH
        for line, column, text, gate in pieces:
            axes.add_patch(_box(column, line, len(text), colours(scale(gate))))
            axes.text(
                column, line + 0.5, text, family="DejaVu Sans Mono", size=size, va="center_baseline", parse_math=False
            )
        figure.set_layout_engine("none")
        axes.set_position((0.15 / SIZE[0], 0.45 / height, 1 - 0.3 / SIZE[0], 0.2 * lines / height))
        bar = figure.add_axes((0.15 / SIZE[0], 0.3 / height, 0.3, 0.1 / height))
        figure.colorbar(ScalarMappable(scale, colours), cax=bar, orientation="horizontal").outline.set_visible(False)  # type: ignore[operator]
        bar.tick_params(labelsize=7, length=2)
        bar.locator_params(nbins=4)
        bar.annotate("gate", (1.02, 0.5), xycoords="axes fraction", va="center", size=7)
    return figure


def paired_differences(points: Sequence[Mapping[str, Any]], baseline: str = "rho = 1") -> Figure:
    """Points {"rho", "n", "mean", "low", "high"} (see eval/stats.py) -> figure of the paired difference against rho.

    Bars are 95 % t intervals; a hollow point has one seed and no interval. Below zero the arm beats the baseline.
    Raises ValueError when there is no point.
    """
    points = sorted((point for point in points if point["mean"] is not None), key=lambda point: point["rho"])
    _require_points(points)
    with _axes(
        f"Loss difference from {baseline}, paired by seed",
        "rho: share of inactive parameters held by routed experts",
        "nats per token",
    ) as (figure, axes):
        axes.axhline(0, color=GREY, linewidth=0.9)
        axes.plot([p["rho"] for p in points], [p["mean"] for p in points], color=COLOURS[0], linewidth=0.8, alpha=0.5)
        for point in points:
            sure = point["low"] is not None
            bars = [[point["mean"] - point["low"]], [point["high"] - point["mean"]]] if sure else None
            axes.errorbar(
                [point["rho"]],
                [point["mean"]],
                bars,
                fmt="o",
                color=COLOURS[0],
                capsize=3,
                mfc=None if sure else "white",
            )
            axes.annotate(
                f"n={point['n']}", (point["rho"], point["mean"]), (5, 4), textcoords="offset points", size=7.5
            )
        axes.margins(x=0.08)
    return figure


def exposed_by_layer(cells: Sequence[Mapping[str, Any]], phase: str = "prefill", launch: str = "entry") -> Figure:
    """Cells of `engram overlap` -> figure of the exposed time (ms) of single blocks, a line a store, with quartiles.

    Raises ValueError when no cell of this phase and launch has a single block.
    """
    lines: dict[str, list[tuple[int, float, float, float]]] = {}
    for cell in cells:
        if len(cell["layers"]) == 1 and (cell["phase"], cell["launch"]) == (phase, launch):
            spread = [1e3 * (value - cell["t_ready"]) for value in cell["quartiles"]["prefetch"]]
            lines.setdefault(cell["store"], []).append((cell["layers"][0], 1e3 * cell["exposed"], *spread))
    _require_points(point for points in lines.values() for point in points)
    title = f"Retrieval that a layer waits for: {phase}, requested at {launch}"
    with _axes(title, "memory block (0-based)", "exposed time, ms") as (figure, axes):
        axes.axhline(0, color=GREY, linewidth=0.9)
        for index, (name, points) in enumerate(lines.items()):
            layers, exposed, low, high = zip(*sorted(points), strict=True)
            bars = [
                [max(0.0, e - q) for e, q in zip(exposed, low, strict=True)],
                [max(0.0, q - e) for e, q in zip(exposed, high, strict=True)],
            ]
            axes.errorbar(layers, exposed, yerr=bars, capsize=2, label=name, **_look(index))
        axes.locator_params(axis="x", integer=True)
        axes.legend()
    return figure


def result_figures(results: Sequence[Mapping[str, Any]]) -> dict[str, Figure]:
    """Result dictionaries (shape: eval/report.py) -> name -> figure, for what their metrics hold.

    Names: "loss", "kl_by_depth", "loss_by_depth", "gates", "differences" (needs `rho` and an arm with rho 1).
    """
    curves: dict[str, dict[int, Curve]] = {}
    lenses: dict[str, list[Mapping[str, Any]]] = {}
    memory_layers: set[int] = set()
    figures: dict[str, Figure] = {}
    for one in results:
        metrics = one["metrics"]
        points = metrics.get("validation") or metrics.get("curve") or ()
        curve = [point for point in points if _finite(point[1])]  # a diverged run ends where its loss did
        if curve:
            curves.setdefault(metrics["arm"], {})[one["seed"]] = curve
        if metrics.get("lens") and all(map(_finite, (*metrics["lens"]["kl"], *metrics["lens"]["cross_entropy"]))):
            lenses.setdefault(metrics["arm"], []).append(metrics["lens"])
        memory_layers |= set(metrics.get("memory_layers") or ())
    if curves:
        held_out = any(one["metrics"].get("validation") for one in results)
        trigrams = {one["metrics"].get("baselines", {}).get("trigram") for one in results} - {None}
        lines = {"trigram": next(iter(trigrams))} if len(trigrams) == 1 else {}
        figures["loss"] = loss_curves(curves, lines, "Held-out loss" if held_out else "Training loss")
    if lenses:
        figures["kl_by_depth"] = depth_curves(lenses, "kl", sorted(memory_layers))
        figures["loss_by_depth"] = depth_curves(lenses, "cross_entropy", sorted(memory_layers))
    sample = next((s for one in results if (s := (one["metrics"].get("gates") or {}).get("sample"))), None)
    if sample:
        figures["gates"] = gate_text(sample)
    differences = difference_points(results)
    if len(differences) > 1 or any(point["n"] > 1 for point in differences):  # one point of one seed is no figure
        figures["differences"] = paired_differences(differences)
    return figures


def difference_points(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Results with `rho` and `loss` -> for each rho below 1 its paired difference from rho = 1, as plain data."""
    losses: dict[float, dict[int, float]] = {}
    for one in results:
        rho, loss = one["metrics"].get("rho"), one["metrics"].get("loss")
        if rho is not None and _finite(loss):
            losses.setdefault(float(rho), {})[one["seed"]] = float(loss)
    base = losses.pop(1.0, {})
    differences = {rho: paired_difference(seeds, base) for rho, seeds in losses.items()}
    return [{"rho": rho, **one.to_dict()} for rho, one in sorted(differences.items()) if one.n]


def png_bytes(figure: Figure) -> bytes:
    """Figure -> PNG at a fixed resolution; the same figure gives the same bytes (no software name, no date)."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context(STYLE):
        figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None}, pil_kwargs={"optimize": True})
    return buffer.getvalue()


def save_png(figure: Figure, path: str | Path) -> Path:
    """Write a figure as PNG, aside and renamed -> its path. Folders are made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".tmp")
    aside.write_bytes(png_bytes(figure))
    os.replace(aside, path)
    return path


# ---- internals ----


@contextmanager
def _axes(title: str, x_label: str, y_label: str, size: tuple[float, float] = SIZE) -> Iterator[tuple[Figure, Axes]]:
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        axes.set(title=title, xlabel=x_label, ylabel=y_label)
        yield figure, axes


def _look(index: int) -> dict[str, Any]:
    number = index % len(COLOURS)
    return {"color": COLOURS[number], "marker": MARKERS[number], "linestyle": DASHES[number]}


def _label(arm: str, seeds: int) -> str:
    return arm if seeds < 2 else f"{arm} ({seeds} seeds)"


def _mean_curve(runs: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Mean over the runs at the points that all of them have."""
    by_x: dict[float, list[float]] = {}
    for run in runs:
        for x, y in run:
            by_x.setdefault(x, []).append(y)
    return [(x, statistics.fmean(ys)) for x, ys in sorted(by_x.items()) if len(ys) == len(runs)] or sorted(runs[0])


def _finite(value: Any) -> bool:
    """Result files hold null where a number was not finite."""
    return value is not None and math.isfinite(value)


def _require_points(points: Iterable[Any]) -> None:
    if next(iter(points), None) is None:
        raise ValueError("figure: nothing to draw, every curve is empty")


def _box(column: int, line: int, width: int, colour: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column, line + 0.06), width, 0.88, facecolor=colour, edgecolor="white", linewidth=0.4)


def _wrapped(tokens: Sequence[str], gates: Sequence[float]) -> Iterator[tuple[int, int, str, float]]:
    """Tokens -> (line, column, text, gate) on a grid of TEXT_COLUMNS; long tokens break, newlines show as ↵."""
    line = column = 0
    for token, gate in zip(tokens, gates, strict=True):
        parts = token.replace("\r", "").replace("\t", "    ").split("\n")
        for index, part in enumerate(parts):
            text = _drawable(part) + ("↵" if index < len(parts) - 1 else "")
            while text:
                if column + len(text) > TEXT_COLUMNS and column > 0 and len(text) <= TEXT_COLUMNS:
                    line, column = line + 1, 0
                if line >= TEXT_LINES:
                    return
                shown, text = text[: TEXT_COLUMNS - column], text[TEXT_COLUMNS - column :]
                yield line, column, shown, gate
                column += len(shown)
                if text:
                    line, column = line + 1, 0
            if index < len(parts) - 1:
                line, column = line + 1, 0


def _drawable(text: str) -> str:
    """Characters that the font lacks are shown as □ (matplotlib would warn and draw its own box)."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties(family="DejaVu Sans Mono")))
    return "".join(c if c.isprintable() and font.get_char_index(ord(c)) else "□" for c in text)
