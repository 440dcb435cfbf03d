"""Result files, the one-file HTML report, and the README's table; all from the same plain dictionaries.

    one = result(config, seed=0, metrics={"arm": "memory", "loss": 3.21, ...})
    write_json("runs/x/result.json", one)
    build_report([one, other], out_path="runs/x/report.html", command="engram quickstart")

A result is {config, versions, hardware, date, seed, metrics}. Metrics are plain data; `arm` is required, everything
else is shown when present:
    arm, rho, tags              name of the arm, its share of routed experts, remarks such as "short-training"
    loss, tokens, tokens_per_second     held-out nats per token; training tokens; training speed
    parameters, flops           {"total", "active", ...} as in train/budget.py; flops are forward FLOPs of one token
    baselines                   {"unigram", "bigram", "trigram"}: nats per token on the same held-out tokens
    curve, validation           [[training tokens, nats per token], ...]: training and held-out loss
    lens, memory_layers         LensCurves.to_dict(); 0-based blocks with a memory
    gates                       {"sample": gate_sample(...), "summary": gate_summary(...)["layers"]}
    rows                        {"text": text_rows(...), "usage": [RowUsage.to_dict(), ...]}
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from engram.eval.figures import png_bytes, result_figures
from engram.eval.stats import Estimate, mean_interval, paired_difference
from engram.info import machine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEYS = ("config", "versions", "hardware", "date", "seed", "metrics")
CAPTIONS = {
    "loss": "Loss over training tokens.",
    "kl_by_depth": "KL divergence of the model's final prediction from the logit lens at each depth.",
    "loss_by_depth": "Next-token cross-entropy of the logit lens at each depth.",
    "differences": "Paired difference of the held-out loss from rho = 1, with 95 % t intervals.",
    "gates": "Gate values over the sample text.",
}
SHOWN_ROWS = 32
"""Positions of the sample text in the table of rows."""


def result(config: Any, seed: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Configuration (dataclass or mapping), seed, metrics -> the result dictionary with versions, hardware and date."""
    about = machine()
    return {
        "config": _plain(config),
        "versions": {"engram": about["engram"], "python": platform.python_version(), **about["packages"]},
        "hardware": {
            "cpu": about["cpu"]["model"],
            "cores": about["cpu"]["cores"],
            "threads": about["cpu"]["threads"],
            "ram_bytes": about["memory"]["total"],
            "devices": [f"{device['model']} ({device['architecture']})" for device in about["devices"]],
            "system": about["system"],
            "kernels": about["kernels"],
        },
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seed": int(seed),
        "metrics": _plain(metrics),
    }


def write_json(path: str | Path, data: Any) -> Path:
    """Write plain data (also dataclasses, numpy values, paths) as JSON, aside and renamed -> its path.

    A number that is not finite becomes null: NaN is no JSON. Raises TypeError naming the place of anything else.
    """
    return _write(path, json.dumps(_plain(data), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_result(path: str | Path) -> dict[str, Any]:
    """Read one result file. Raises ValueError when it is no JSON or lacks a key of a result."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"result {path}: cannot be read: {error}") from error
    check_result(data, str(path))
    return dict(data)


def check_result(data: Any, where: str = "result") -> None:
    """Raise ValueError unless `data` has the keys of a result and its metrics name an arm."""
    missing = [key for key in KEYS if key not in data] if isinstance(data, Mapping) else list(KEYS)
    if missing:
        raise ValueError(f"{where}: no result, it lacks {', '.join(missing)}")
    if not isinstance(data["metrics"], Mapping) or "arm" not in data["metrics"]:
        raise ValueError(f"{where}: metrics must be a mapping that names its 'arm'")


def build_report(
    results: Sequence[Mapping[str, Any]],
    figures: Mapping[str, Figure | bytes] | None = None,
    out_path: str | Path = "report.html",
    *,
    title: str = "Engram report",
    command: str = "",
) -> Path:
    """Results (at least one) -> one self-contained HTML file, written aside and renamed -> its path.

    figures  name -> figure or PNG bytes; default: all that the results hold (`result_figures`).
    command  the command line that made the results, shown at the end.
    The page makes no request and runs no script; every text in it is escaped. Raises ValueError for a malformed result.
    """
    if not results:
        raise ValueError("results: none given; a report needs at least one")
    for index, one in enumerate(results):
        check_result(one, f"results[{index}]")
    drawn = result_figures(results) if figures is None else figures
    pictures = [
        {
            "name": name,
            "caption": CAPTIONS.get(name, name.replace("_", " ").capitalize() + "."),
            "data": base64.b64encode(picture if isinstance(picture, bytes) else png_bytes(picture)).decode("ascii"),
        }
        for name, picture in drawn.items()
        if name != "gates"  # shown as text, which is readable at any width
    ]
    columns, rows = summary(results)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    page = environment.from_string(PAGE).render(
        title=title,
        verdict=verdict(results),
        columns=columns,
        rows=rows,
        pictures=pictures,
        gates=[view for one in results for view in _gate_views(one["metrics"])],
        tables=[view for one in results if (view := _rows_view(one["metrics"])) is not None],
        runs=[
            {
                "name": f"{one['metrics']['arm']}, seed {one['seed']}",
                "date": one["date"],
                "config": json.dumps(one["config"], indent=1, ensure_ascii=False),
                "about": json.dumps({"versions": one["versions"], "hardware": one["hardware"]}, indent=1),
            }
            for one in results
        ],
        command=command,
    )
    return _write(out_path, page)


def summary(results: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Results -> column titles and one row of texts an arm; with several seeds means +- half of the 95 % interval."""
    columns = [
        "arm", "seeds", "loss (nats/token)", "trigram", "parameters", "active", "FLOPs/token", "tokens", "tokens/s",
        "tags",
    ]  # fmt: skip
    rows = []
    for arm, ones in _by_arm(results).items():
        metrics = [one["metrics"] for one in ones]
        rows.append(
            [
                arm,
                str(len({one["seed"] for one in ones})),
                _interval([m.get("loss") for m in metrics]),
                _mean([(m.get("baselines") or {}).get("trigram") for m in metrics], "{:.4f}"),
                _mean([(m.get("parameters") or {}).get("total") for m in metrics], "{:,.0f}"),
                _mean([(m.get("parameters") or {}).get("active") for m in metrics], "{:,.0f}"),
                _mean([(m.get("flops") or {}).get("total") for m in metrics], "{:,.0f}"),
                _mean([m.get("tokens") for m in metrics], "{:,.0f}"),
                _mean([m.get("tokens_per_second") for m in metrics], "{:,.0f}"),
                ", ".join(sorted({tag for m in metrics for tag in m.get("tags") or ()})),
            ]
        )
    keep = [index for index in range(len(columns)) if index < 3 or any(row[index] not in ("–", "") for row in rows)]
    return [columns[index] for index in keep], [[row[index] for index in keep] for row in rows]


def markdown_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Results -> the summary as a Markdown table for the README, ending in a newline."""
    columns, rows = summary(results)
    lines = [columns, [":--", *["--:"] * (len(columns) - 1)], *rows]
    cells = [[cell.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def verdict(results: Sequence[Mapping[str, Any]]) -> str:
    """Results -> what they allow to say of each arm against the first (rho = 1, if there is one), in one line.

    With fewer than two common seeds it starts with "one seed, no verdict".
    """
    losses = {arm: {one["seed"]: one["metrics"].get("loss") for one in ones} for arm, ones in _by_arm(results).items()}
    pure = next((one["metrics"]["arm"] for one in results if one["metrics"].get("rho") == 1), None)
    base = pure if pure is not None else next(iter(losses))
    known = {arm: {seed: loss for seed, loss in seeds.items() if _finite(loss)} for arm, seeds in losses.items()}
    said = [_sentence(arm, base, paired_difference(known[arm], known[base])) for arm in known if arm != base]
    if not said:
        return "one arm, nothing to compare"
    lone = all(len(set(known[arm]) & set(known[base])) < 2 for arm in known if arm != base)
    return ("one seed, no verdict: " if lone else "") + "; ".join(said)


def _sentence(arm: str, base: str, one: Estimate) -> str:
    if one.mean is None:
        return f"{arm} and {base} have no seed in common"
    difference = f"{arm} − {base} = {one.mean:+.4f} nats/token"
    if one.low is None or one.high is None:
        return difference
    found = "lower" if one.high < 0 else "higher" if one.low > 0 else "no difference shown"
    return f"{difference} [{one.low:+.4f}, {one.high:+.4f}], {one.n} paired seeds, 95 % t interval: {found}"


def _gate_views(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One view a memory layer: tokens with the opacity of their ground (0.04..0.62 over the layer's own range)."""
    gates = metrics.get("gates") or {}
    sample: Any = gates.get("sample")
    by_layer = gates.get("summary") or {}
    views: list[dict[str, Any]] = []
    for layer, rows in (sample["layers"] if sample else {}).items():
        values = [statistics.fmean(row) for row in rows]
        low, high = min(values), max(values)
        spread = (high - low) or 1.0
        about = by_layer.get(layer) or {}
        views.append(
            {
                "arm": metrics["arm"],
                "layer": layer,
                "low": f"{low:.3f}",
                "high": f"{high:.3f}",
                "quantiles": [(name, f"{value:.3f}") for name, value in (about.get("quantiles") or {}).items()],
                "buckets": [
                    (f"{order}-gram", _bucket(b), f"{b['tokens']:,}", f"{b['mean']:.3f}")
                    for order, buckets in (about.get("by_count") or {}).items()
                    for b in buckets
                ],
                "tokens": [
                    {
                        "text": token.replace("\n", "↵\n"),
                        "alpha": f"{0.04 + 0.58 * (value - low) / spread:.2f}",
                        "value": f"{value:.3f}",
                    }
                    for token, value in zip(sample["tokens"], values, strict=True)
                ],
            }
        )
    return views


def _rows_view(metrics: Mapping[str, Any]) -> dict[str, Any] | None:
    """The two tables of rows of one result: positions of the text, and use of each column's table."""
    rows = metrics.get("rows") or {}
    text: Any = rows.get("text")
    usage = rows.get("usage") or []
    if not text and not usage:
        return None
    positions, orders = [], list(text["ngrams"]) if text else []
    for t in range(min(SHOWN_ROWS, len(text["tokens"])) if text else 0):
        cells = []
        for order in orders:
            chosen = [
                row
                for row, column in zip(text["rows"][t], text["columns"], strict=True)
                if str(column["order"]) == order
            ]
            cells.append((text["ngrams"][order][t].replace("\n", "↵"), " ".join(map(str, chosen))))
        positions.append({"position": t, "token": text["tokens"][t].replace("\n", "↵"), "cells": cells})
    return {
        "arm": metrics["arm"],
        "layer": text["layer"] if text else None,
        "orders": orders,
        "positions": positions,
        "total": len(text["tokens"]) if text else 0,
        "usage": [
            {
                "layer": one["layer"],
                "tokens": f"{one['tokens']:,}",
                "touched": f"{one['touched']:,} of {one['rows']:,} rows ({one['share']:.1%})",
                "heads": [
                    [
                        f"{head['order']}-gram", str(head["head"]), f"{head['size']:,}", f"{head['share']:.1%}",
                        f"{head['expected']:.1%}", f"{head['ngrams']:,}", f"{head['collided']:.1%}",
                        f"{head['collided_reads']:.1%}", _heaviest(head),
                    ]
                    for head in one["heads"]
                ],
            }
            for one in usage
        ],
    }  # fmt: skip


def _heaviest(head: Mapping[str, Any]) -> str:
    """The most read row with its share of the reads and its commonest n-gram."""
    if not head["top"]:
        return f"{head['heaviest']:.1%}"
    top = head["top"][0]
    example = top["examples"][0][0]
    shown = example.replace("\n", "↵") if isinstance(example, str) else " ".join(map(str, example))
    return f"{top['row']} ({head['heaviest']:.1%}): “{shown}”"


def _bucket(bucket: Mapping[str, Any]) -> str:
    low, high = bucket["from"], bucket["to"]
    return f"{low:,} or more" if high is None else f"{low:,}" if low == high else f"{low:,}–{high:,}"


def _by_arm(results: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    arms: dict[str, list[Mapping[str, Any]]] = {}
    for one in results:
        arms.setdefault(str(one["metrics"]["arm"]), []).append(one)
    return arms


def _finite(value: Any) -> bool:
    return value is not None and math.isfinite(value)


def _mean(values: Sequence[Any], form: str) -> str:
    numbers = [float(value) for value in values if _finite(value)]
    return form.format(statistics.fmean(numbers)) if numbers else "–"


def _interval(values: Sequence[Any]) -> str:
    numbers = [float(value) for value in values if _finite(value)]
    if not numbers:
        return "–"
    one = mean_interval(numbers)
    return f"{one.mean:.4f}" if one.half is None else f"{one.mean:.4f} ± {one.half:.4f}"


def _plain(value: Any, where: str = "data") -> Any:
    """Plain data for JSON: dataclasses, mappings, sequences, numpy values and paths taken apart, non-finite -> None."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _plain(getattr(value, field.name), f"{where}.{field.name}")
            for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist(), where)
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise TypeError(
        f"{where}: {type(value).__name__} is no plain data; results hold numbers, texts, lists and mappings"
    )


def _write(path: str | Path, text: str) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".tmp")
    with open(aside, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    return path


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>{{ title }}</title>
<style>
:root { color-scheme: light dark; --ground: #fff; --ink: #1b1b1b; --soft: #666; --line: #ddd; --gate: 0, 114, 178; }
@media (prefers-color-scheme: dark) { :root { --ground: #16181c; --ink: #e8e8e8; --soft: #a0a0a0; --line: #3a3d44;
  --gate: 86, 180, 233; } }
body { background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.verdict { font-size: 1.05rem; border-left: 4px solid #d55e00; padding-left: .7rem; }
.soft, figcaption { color: var(--soft); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; }
td, th { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
td:first-child, th:first-child, .text { text-align: left; }
.token, .text, pre, code { font-family: ui-monospace, monospace; } .text { white-space: pre; }
.tokens { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem; line-height: 1.7; }
.token { background: rgba(var(--gate), var(--a)); border-radius: 2px; }
figure { margin: 1rem 0; } img { max-width: 100%; background: #fff; border-radius: 6px; }
pre { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; padding: .7rem; font-size: .8rem; }
</style></head><body>
<h1>{{ title }}</h1>
<p class="verdict">{{ verdict }}</p>
<h2>Summary</h2>
<div class="wide"><table><tr>{% for column in columns %}<th>{{ column }}</th>{% endfor %}</tr>
{% for row in rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
<p class="soft">Loss is next-token cross-entropy on held-out text. FLOPs are those of one token in the forward pass
without the head. ± is half of the 95 % t interval over seeds.</p>
{% for picture in pictures %}
<figure id="{{ picture.name }}"><img alt="{{ picture.caption }}" src="data:image/png;base64,{{ picture.data }}">
<figcaption>{{ picture.caption }}</figcaption></figure>
{% endfor %}
{% for view in gates %}
<h2>Gate values over a sample text: {{ view.arm }}, block {{ view.layer }}</h2>
<p class="soft">The stronger the ground, the wider the gate: {{ view.low }} (weakest) to {{ view.high }}
(strongest); the value of a token shows when the pointer rests on it.</p>
<div class="tokens">{% for token in view.tokens %}<span class="token" title="{{ token.value }}"
style="--a: {{ token.alpha }}">{{ token.text }}</span>{% endfor %}</div>
{% if view.quantiles %}
<p>Held-out text, quantiles of the gate: {% for name, value in view.quantiles %}{{ name }}: {{ value }}{{ ", " if not
loop.last }}{% endfor %}.</p>
{% endif %}
{% if view.buckets %}
<table><tr><th>order</th><th>seen in training text</th><th>tokens</th><th>mean gate</th></tr>
{% for bucket in view.buckets %}
<tr>{% for cell in bucket %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table>
{% endif %}
{% endfor %}
{% for table in tables %}
<h2>Where the rows came from: {{ table.arm }}{% if table.layer is not none %}, block {{ table.layer }}{% endif %}</h2>
{% if table.positions %}
<p class="soft">The first {{ table.positions | length }} of {{ table.total }} tokens; each n-gram with the row it reads
in each head. ∅ is the filler.</p>
<div class="wide"><table><tr><th>token</th>{% for order in table.orders %}<th class="text">{{ order }}-gram</th>
<th>rows</th>{% endfor %}</tr>
{% for line in table.positions %}
<tr><td class="text">{{ line.token }}</td>{% for ngram, numbers in line.cells %}<td class="text">{{ ngram }}</td>
<td>{{ numbers }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
{% endif %}
{% for use in table.usage %}
<p>Block {{ use.layer }}: {{ use.tokens }} tokens touched {{ use.touched }}.</p>
<div class="wide"><table><tr><th>order</th><th>head</th><th>rows</th><th>touched</th><th>ideal hash</th>
<th>distinct n-grams</th><th>of them sharing a row</th><th>reads of shared rows</th><th>most read row</th></tr>
{% for head in use.heads %}
<tr>{% for cell in head %}<td{{ ' class="text"' | safe if loop.last }}>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
{% endfor %}
{% endfor %}
<h2>How it was made</h2>
{% if command %}<pre><code>{{ command }}</code></pre>{% endif %}
{% for run in runs %}
<details><summary>{{ run.name }}, {{ run.date }}</summary>
<pre>{{ run.config }}</pre><pre>{{ run.about }}</pre></details>
{% endfor %}
</body></html>
"""
