"""Two models of equal size, side by side: a mixture of experts, and one that gives part of its budget to memory.

    make quickstart            (or: engram quickstart)

Trains on the text of this machine's Python standard library, so nothing is downloaded, then compares loss and KL by
depth and shows gates and rows. It is an ordinary study (train/ablate.py) with a small configuration,
configs/quickstart.yaml.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.table import Table

import engram
from engram.eval.figures import result_figures, save_png
from engram.eval.report import build_report, read_result, summary, verdict
from engram.strict import apply_overrides, from_dict, load_yaml, require
from engram.train.ablate import AblationConfig, finished_results, read_study, run_study
from engram.train.trackers import console

TITLE, COMMAND = "Engram quickstart", "engram quickstart"
CONFIGS = Path(str(engram.__file__)).parent / "configs"


def run(out: str, overrides: list[str], toy: bool = False) -> dict[str, Any]:
    """`engram quickstart`: train both arms, compare, write report.html and PNG figures into `out` -> summary
    dictionary.

    toy  a size for tests: seconds instead of minutes, and losses that say nothing.
    Raises RuntimeError when a run failed, with its error.
    """
    began = time.monotonic()
    data = load_yaml(CONFIGS / ("quickstart-toy.yaml" if toy else "quickstart.yaml"))
    study, folder = from_dict(AblationConfig, apply_overrides(data, overrides)), Path(out)
    found = run_study(study, folder)
    if found["failed"]:
        raise RuntimeError("; ".join(f"{name}: {error}" for name, error in found["failed"].items()))
    found |= rebuild_report(out, TITLE, COMMAND)
    found["seconds"] = round(time.monotonic() - began, 1)
    console().print(f"{found['seconds']:.0f} s in all; report: {found['report']}", highlight=False)
    return found


def rebuild_report(run: str, title: str | None = None, command: str | None = None) -> dict[str, Any]:
    """`engram report`: results below a folder -> terminal table, report.html and PNG figures, from the files alone.

    Raises ConfigError when the folder holds no result.
    """
    folder = Path(run)
    study = read_study(folder)
    if study is None:
        results = [read_result(path) for path in sorted(folder.rglob("result.json"))]
    else:
        results = finished_results(study, folder)
    require(bool(results), f"run: {run} holds no result.json")
    results.sort(key=lambda one: (-(one["metrics"].get("rho") or 0.0), one["metrics"]["arm"], one["seed"]))
    figures = result_figures(results)
    for name, figure in figures.items():
        save_png(figure, folder / f"{name}.png")
    report = build_report(
        results, figures, folder / "report.html", title=title or folder.name, command=command or f"engram report {run}"
    )
    shown = console()
    columns, rows = summary(results)
    table = Table("", *(row[0] for row in rows), title_justify="left")  # one column an arm fits any terminal
    for index, name in enumerate(columns[1:], start=1):
        table.add_row(name, *(row[index] for row in rows))
    shown.print(table)
    if all(one["metrics"].get("lens") for one in results):
        shown.print(_depths(results))
    shown.print(f"[bold]{verdict(results)}[/bold]", highlight=False)
    return {"report": str(report), "figures": sorted(figures), "verdict": verdict(results)}


def _depths(results: list[dict[str, Any]]) -> Table:
    """KL(final || depth) of every arm, one column a depth."""
    depths = results[0]["metrics"]["lens"]["depths"]
    table = Table("arm", *(str(depth) for depth in depths), title="KL by depth, nats", title_justify="left")
    for one in results:
        table.add_row(one["metrics"]["arm"], *(f"{value:.3f}" for value in one["metrics"]["lens"]["kl"]))
    return table
