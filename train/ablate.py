"""Ablations: a grid over any configuration keys and seeds, one result file per run, resumable, failures recorded.

    engram ablate configs/ablations/allocation.yaml --dry-run
    engram ablate configs/ablations/allocation.yaml --out runs/allocation

The YAML names a base run (`run`, TrainConfig fields), a `grid` of dotted keys with their values, and `seeds`. Every
combination is an arm. Arms of a seed see the same data in the same order and start from equal values where shapes
agree. Finished runs are skipped, interrupted ones resumed. On a CPU one run goes to each core, with one thread each.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import yaml
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from engram import __version__
from engram.eval.figures import result_figures, save_png
from engram.eval.report import build_report, markdown_table, read_result, verdict, write_json
from engram.eval.stats import mean_interval, paired_difference
from engram.strict import ConfigError, apply_overrides, from_dict, load_yaml, merge, require, to_dict
from engram.train.budget import describe
from engram.train.data import prepare
from engram.train.loop import train_run
from engram.train.recipe import TrainConfig, changed_fields
from engram.train.trackers import console

RUN_SNIPPET = "import sys; from engram.train.ablate import run_one; sys.exit(run_one(sys.argv[1]))"
POLL_SECONDS = 1.0


@dataclass(frozen=True)
class AblationConfig:
    """A study: `run` (TrainConfig fields), `grid` (dotted key -> values), `seeds`, and the arm that others are paired
    with.

    arms      named arms as lists of overrides, beside or instead of the grid: {"no gate": ["memory.gate=none"]}.
    baseline  name of the reference arm; default: the first.
    """

    name: str
    run: dict[str, Any]
    grid: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    arms: dict[str, tuple[str, ...]] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1, 2)
    baseline: str | None = None

    def __post_init__(self) -> None:
        require(bool(self.seeds), "seeds: at least one seed is needed, for example [0, 1, 2]")
        require(len(set(self.seeds)) == len(self.seeds), f"seeds: {list(self.seeds)} names a seed twice")
        require(bool(self.grid) or bool(self.arms), "grid: give at least one key with its values, or named arms")
        for key, values in self.grid.items():
            require(len(values) > 0, f"grid.{key}: needs at least one value")
        names = [name for name, _ in self.overrides()]
        folders = [_slug(name) for name in names]
        for name, folder in zip(names, folders, strict=True):
            require(folders.count(folder) == 1, f"arms: {name!r} shares its folder {folder!r} with another arm")
        for name, items in self.overrides():
            keys = {item.partition("=")[0].strip() for item in items}
            require(not keys & {"seed", "name"}, f"arms: {name!r} sets seed or name; seeds has the seeds of every arm")
        require(self.baseline is None or self.baseline in names, f"baseline: {self.baseline!r} is none of {names}")

    def overrides(self) -> list[tuple[str, list[str]]]:
        """Every arm as (name, overrides), grid first, in the order written."""
        arms = [(name, list(items)) for name, items in self.arms.items()]
        if self.grid:
            product = itertools.product(*([(key, value) for value in values] for key, values in self.grid.items()))
            cells = [[f"{key}={_inline(value)}" for key, value in cell] for cell in product]
            arms = [(", ".join(cell), cell) for cell in cells] + arms
        return arms

    def runs(self) -> list[Planned]:
        """Every run of every arm, seed by seed, so that pairs are finished together. Raises ConfigError."""
        planned = []
        for seed in self.seeds:
            for name, items in self.overrides():
                data = apply_overrides(merge(self.run, {"seed": seed, "name": name}), items)
                folder = f"{_slug(name)}/seed-{seed}"
                planned.append(Planned(name, seed, folder, from_dict(TrainConfig, data, f"arm {name}")))
        return planned


@dataclass(frozen=True)
class Planned:
    """One run to do: its arm's name, seed, folder below the study's, and configuration."""

    arm: str
    seed: int
    folder: str
    config: TrainConfig


def run_config(
    config: str,
    overrides: list[str],
    dry_run: bool = False,
    out: str | None = None,
    workers: int | None = None,
) -> dict[str, Any]:
    """`engram ablate`: a study's YAML -> summary dictionary; with `dry_run` the planned arms alone."""
    study = from_dict(AblationConfig, apply_overrides(load_yaml(config), overrides))
    if dry_run:
        return dry(study)
    return run_study(study, Path(out) if out else Path("runs") / study.name, workers)


def dry(study: AblationConfig) -> dict[str, Any]:
    """The planned arms with parameters, FLOPs and deviations; trains nothing."""
    runs = study.runs()
    first = {run.arm: run for run in reversed(runs)}
    arms = {name: first[name].config.arm(first[name].config.data.vocab_size) for name, _ in study.overrides()}
    console().print(describe(list(arms.values())))
    return {
        "config": to_dict(study),
        "runs": len(runs),
        "tokens": sum(run.config.tokens for run in runs),
        "arms": {name: arm.to_dict() for name, arm in arms.items()},
    }


def run_study(study: AblationConfig, out: Path, workers: int | None = None, quiet: bool = False) -> dict[str, Any]:
    """Do every run that is not finished, then table, figures and report in `out` -> summary dictionary.

    workers  runs at a time; default one a core on a CPU, one on a GPU; 0 runs them one by one in this process.
    A failing run is recorded in its folder and in the summary while the rest goes on.
    """
    planned = study.runs()
    arms = {run.arm: run.config.arm(run.config.data.vocab_size) for run in planned}  # an impossible arm stops here
    _check_folder(out, study)
    if not quiet:
        console().print(describe(list(arms.values())))
    todo = [run for run in planned if not _finished(out, run, quiet)]
    if todo:
        prepare(todo[0].config.data, todo[0].seed)  # once, before the workers want it all at the same time
    failed: dict[str, str] = {}
    if workers == 0:
        for run in todo:
            error = _guarded(run, out / run.folder, quiet)
            if error:
                failed[run.folder] = error
    elif todo:
        failed = _in_processes(todo, out, workers or _default_workers(), quiet)
    return summarise(study, out, failed, quiet)


def summarise(
    study: AblationConfig, out: Path, failed: dict[str, str] | None = None, quiet: bool = False
) -> dict[str, Any]:
    """Results in `out` -> summary.json, table.md, figures, report.html. Raises RuntimeError when no run is finished."""
    results = finished_results(study, out)
    if not results:
        raise RuntimeError(f"no run of {study.name} is finished: {failed}")
    names = [name for name, _ in study.overrides()]
    baseline = study.baseline or names[0]
    summary = {
        "name": study.name,
        "baseline": baseline,
        "verdict": verdict(results),
        "arms": {name: _arm_summary(name, baseline, results) for name in names},
        "failed": failed or {},
        "missing": [r.folder for r in study.runs() if not (out / r.folder / "result.json").is_file()],
        "out": str(out),
    }
    write_json(out / "summary.json", summary)
    columns, rows = study_table(summary)
    table = "".join(f"| {' | '.join(line)} |\n" for line in [columns, ["--:"] * len(columns), *rows])
    (out / "table.md").write_text(f"{markdown_table(results)}\n{table}", encoding="utf-8")
    figures = result_figures(results)
    for name, figure in figures.items():
        save_png(figure, out / f"{name}.png")
    build_report(results, figures, out / "report.html", title=study.name, command=f"engram ablate … --out {out}")
    if not quiet:
        printed = Table(*columns, title=f"{study.name}: held-out nats/token", title_justify="left")
        for row in rows:
            printed.add_row(*row)
        console().print(printed, f"[bold]{summary['verdict']}[/bold]", str(out / "report.html"), sep="\n")
    return summary


def finished_results(study: AblationConfig, out: Path) -> list[dict[str, Any]]:
    """Results of exactly the study's runs that are finished, in their order."""
    paths = [out / run.folder / "result.json" for run in study.runs()]
    return [read_result(path) for path in paths if path.is_file()]


def read_study(out: Path) -> AblationConfig | None:
    """The study whose results a folder holds, or None."""
    path = out / "study.yaml"
    return from_dict(AblationConfig, load_yaml(path)) if path.is_file() else None


def study_table(summary: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Summary of a study -> column titles and one row of texts an arm; intervals are 95 % t intervals."""
    titles = {
        "loss": "loss",
        "difference": f"minus {summary['baseline']}, paired",
        "loss_at_equal_time": "loss at equal time",
        "difference_at_equal_time": "difference at equal time",
    }
    rows = []
    for name, arm in summary["arms"].items():
        signs = ["+" if key.startswith("difference") else "" for key in titles]
        cells = [_cell(arm[key], sign) for key, sign in zip(titles, signs, strict=True)]
        rows.append([name, str(arm["loss"]["n"] if arm["loss"] else 0), *cells])
    return ["arm", "seeds", *titles.values()], rows


def _cell(estimate: dict[str, Any] | None, sign: str) -> str:
    if estimate is None or estimate["mean"] is None:
        return "–"
    text = f"{estimate['mean']:{sign}.4f}"
    if estimate["low"] is None:
        return text
    return f"{text} [{estimate['low']:{sign}.4f}, {estimate['high']:{sign}.4f}]"


def _arm_summary(name: str, baseline: str, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean and 95 % t interval, the paired difference from the baseline, and the loss at equal time."""
    mine = {r["seed"]: r["metrics"] for r in results if r["metrics"]["arm"] == name}
    base = {r["seed"]: r["metrics"] for r in results if r["metrics"]["arm"] == baseline}
    at_time = {seed: _loss_at_equal_time(seed, name, results) for seed in mine}
    base_time = {seed: _loss_at_equal_time(seed, baseline, results) for seed in base}
    known = {seed: loss for seed, loss in at_time.items() if loss is not None}
    return {
        "loss": mean_interval([m["loss"] for m in mine.values()]).to_dict() if mine else None,
        "difference": _difference({s: m["loss"] for s, m in mine.items()}, {s: m["loss"] for s, m in base.items()}),
        "loss_at_equal_time": mean_interval(list(known.values())).to_dict() if known else None,
        "difference_at_equal_time": _difference(known, {s: v for s, v in base_time.items() if v is not None}),
        "lens_kl": [list(m["lens"]["kl"]) for m in mine.values() if m.get("lens")],
        "tags": sorted({tag for m in mine.values() for tag in m["tags"]}),
    }


def _difference(ours: dict[int, float], theirs: dict[int, float]) -> dict[str, Any] | None:
    return paired_difference(ours, theirs).to_dict() if set(ours) & set(theirs) else None


def _loss_at_equal_time(seed: int, name: str, results: Sequence[dict[str, Any]]) -> float | None:
    """Held-out loss, read off the curve by straight lines, at the training seconds of the fastest arm of this seed."""
    curves = {r["metrics"]["arm"]: r["metrics"].get("validation_seconds") for r in results if r["seed"] == seed}
    ends = [curve[-1][0] for curve in curves.values() if curve]
    curve = curves.get(name)
    if not curve or not ends:
        return None
    limit = min(ends)
    if len(curve) < 2 or limit < curve[0][0]:
        return float(curve[-1][1]) if curve[-1][0] <= limit else None
    for (t0, loss0), (t1, loss1) in itertools.pairwise(curve):
        if t0 <= limit <= t1:
            return float(loss0 + (loss1 - loss0) * (limit - t0) / max(t1 - t0, 1e-9))
    return float(curve[-1][1])


def _guarded(run: Planned, folder: Path, quiet: bool) -> str | None:
    """Train one run in this process; an error is written to failed.json and returned. Ctrl-C passes."""
    try:
        train_run(run.config, folder, resume=True, quiet=quiet)
        (folder / "failed.json").unlink(missing_ok=True)
        return None
    except Exception as error:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "failed.json", {"error": repr(error), "traceback": traceback.format_exc()})
        return f"{type(error).__name__}: {error}"


def run_one(path: str) -> int:
    """A worker's whole life: the run described in the JSON file `path`; exit status 0, 1 failed, 130 interrupted."""
    _die_with_parent()
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    config = from_dict(TrainConfig, job["config"])
    try:
        error = _guarded(Planned(job["arm"], job["seed"], job["folder"], config), Path(job["folder"]), quiet=True)
    except KeyboardInterrupt:
        return 130
    if error:
        print(error, file=sys.stderr)
    return 1 if error else 0


def _in_processes(todo: Sequence[Planned], out: Path, workers: int, quiet: bool) -> dict[str, str]:
    """One process a run, `workers` at a time -> folder -> error of those that failed."""
    children: dict[str, subprocess.Popen[str]] = {}
    stopping = threading.Event()

    def work(run: Planned) -> str | None:
        folder = out / run.folder
        if stopping.is_set():
            return "not started"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "failed.json").unlink(missing_ok=True)
        job = folder / "job.json"
        write_json(job, {"arm": run.arm, "seed": run.seed, "folder": str(folder), "config": run.config.to_dict()})
        threads = str(run.config.threads or 1)
        env = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        with (folder / "output.txt").open("w", encoding="utf-8") as output:
            child = subprocess.Popen(
                [sys.executable, "-c", RUN_SNIPPET, str(job)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                text=True,
            )
            children[run.folder] = child
            code = child.wait()
            children.pop(run.folder, None)
        if code == 0:
            return None
        if not (folder / "failed.json").is_file():  # killed: it could not say so itself
            write_json(folder / "failed.json", {"error": f"exit status {code}", "output": str(folder / "output.txt")})
        tail = (folder / "output.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return (tail[-1] if tail else "no output") + f" (exit status {code}; see {folder / 'output.txt'})"

    failed: dict[str, str] = {}
    with _Board(todo, out, quiet) as board, ThreadPoolExecutor(workers) as pool, _term_is_interrupt():
        futures = {pool.submit(work, run): run for run in todo}
        try:
            for future in as_completed(futures):
                error = future.result()
                board.done(futures[future], error)
                if error:
                    failed[futures[future].folder] = error
        except KeyboardInterrupt:
            stopping.set()
            for child in list(children.values()):  # each finishes its step, saves, and ends
                child.send_signal(signal.SIGTERM)
            for child in list(children.values()):
                child.wait()
            raise KeyboardInterrupt(f"stopped; the runs are saved, the same command goes on in {out}") from None
    return failed


def _die_with_parent() -> None:
    """Ask the kernel for a SIGTERM when the study's process ends, however it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


@contextmanager
def _term_is_interrupt() -> Iterator[None]:
    """Inside, SIGTERM does what Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Board:
    """Progress of all runs together, read from their logs."""

    def __init__(self, todo: Sequence[Planned], out: Path, quiet: bool) -> None:
        self._todo, self._out, self._stop = todo, out, threading.Event()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:>3.0f}% · {task.fields[note]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console(),
            disable=quiet,
        )
        steps = sum(run.config.steps for run in todo)
        self._all: TaskID = self._bar.add_task(f"{len(todo)} runs", total=steps, note="")
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _Board:
        self._bar.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._update()
        self._bar.stop()

    def done(self, run: Planned, error: str | None) -> None:
        """One line for a finished run."""
        if self._bar.disable:
            return
        if error:
            self._bar.console.print(f"[red]failed[/red] {run.folder}: {error}", highlight=False)
        else:
            loss = read_result(self._out / run.folder / "result.json")["metrics"]["loss"]
            self._bar.console.print(f"done {run.folder}: held-out {loss:.4f} nats/token", highlight=False)

    def _watch(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            self._update()

    def _update(self) -> None:
        lines = {run.folder: _last_line(self._out / run.folder / "log.jsonl") for run in self._todo}
        steps = sum(line.get("step", 0) for line in lines.values())
        running = [
            f"{name} {line['loss']:.2f}" for name, line in lines.items()
            if line and not (self._out / name / "result.json").is_file()
        ]  # fmt: skip
        self._bar.update(self._all, completed=steps, note=" · ".join(running[:4]))


def _last_line(path: Path) -> dict[str, Any]:
    """The last whole JSON line of a log, or nothing."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 8192))
            for line in reversed(file.read().decode("utf-8", errors="replace").splitlines()):
                try:
                    return dict(json.loads(line))
                except ValueError:
                    continue
    except OSError:
        pass
    return {}


def _finished(out: Path, run: Planned, quiet: bool) -> bool:
    path = out / run.folder / "result.json"
    if not path.is_file():
        return False
    found = read_result(path)
    changed = changed_fields(run.config, found["config"])
    if changed:
        raise ConfigError(
            f"out: {path} is the result of another configuration ({', '.join(changed)}); "
            f"use another --out, or remove that folder"
        )
    made_by = found["versions"].get("engram")
    if not quiet:
        other = "" if made_by == __version__ else f" by engram {made_by}, this is {__version__}"
        console().print(f"skipped {run.folder}: finished {found['date']}{other}", highlight=False)
    return True


def _check_folder(out: Path, study: AblationConfig) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        aside = out / "study.yaml.tmp"
        aside.write_text(yaml.safe_dump(to_dict(study), sort_keys=False), encoding="utf-8")
        os.replace(aside, out / "study.yaml")
    except OSError as error:
        raise ConfigError(f"out: {out} cannot be written: {error.strerror or error}") from error


def _default_workers() -> int:
    return 1 if torch.cuda.is_available() else len(os.sched_getaffinity(0))


def _inline(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).strip().removesuffix("\n...").strip()


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.=-]+", "_", name).strip("_.") or "arm"
