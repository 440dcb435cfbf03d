"""engram against the registry package engram-peft, in one run: `engram bench --peers`.

    OMP_NUM_THREADS=1 engram bench --peers --out runs/peers      # also runs/peers/peers.json, a result file

The same tiny Llama, memory of the same shape in the same blocks, the same text. Each side runs in fresh processes of
its own; a pair of them lives at a time and takes turns, step by step, and changes order. A ratio is that of the
medians; beside it the quartiles of the ratios of single turns, and the ratio within each pair of processes. Correctness
is a list of computations asked of both sides (eval/peer_checks.py).

Nothing is installed. Where engram-peft cannot be imported the command says why, and what would make it importable.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from engram.eval.peer_sides import PEER_VERSION, Shape
from engram.eval.report import result, write_json
from engram.info import foreign_seconds, machine
from engram.strict import ConfigError

PAIRS = 3
"""Pairs of fresh processes."""
TEXT_BYTES = 2_000_000
STEP_TARGET, MEMORY_TARGET = 1 / 2, 1 / 4
TURNS = ("step", "bare_step", "hash")
"""What the two sides of a pair do in turns."""
VARIANTS = ("ours, bf16 rows",)
INSTALL = f"pip install engram-peft=={PEER_VERSION}"
CLAIMS = {
    "peer-step": ("training step", "s", STEP_TARGET),
    "peer-step-busy": ("the same, processor time", "s", None),
    "peer-step-added": ("what the memory adds to it, processor time", "s", None),
    "peer-hash": ("hashing 1,000 tokens", "s", None),
    "peer-hash-busy": ("the same, processor time", "s", None),
    "peer-memory": ("peak memory above the imports", "B", MEMORY_TARGET),
    "peer-memory-added": ("peak memory above a step of the bare Llama", "B", MEMORY_TARGET),
    "peer-checkpoint": ("saved memory", "B", None),
}
"""Id of a measurement -> what it is, its unit, and the ratio that is aimed at."""


class Process:
    """A side in a process of its own; see eval/peer_worker.py. Raises RuntimeError for what goes wrong there."""

    def __init__(self, name: str, folder: Path, shape: Shape) -> None:
        program = (
            "import sys, json; from engram.eval.peer_worker import serve; "
            "serve(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))"
        )
        self.name = name
        self.log = open(folder / f"{time.monotonic_ns()}.log", "w+")  # noqa: SIM115 (closed with the process)
        # where this process finds packages, by absolute paths: the other one does not work in this folder
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
        environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, name, str(folder), json.dumps(asdict(shape))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            cwd=folder,
            env=environment,
        )

    def ask(self, what: str) -> Any:
        """One measurement."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"do": what}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.log.seek(0)
            raise RuntimeError(f"peers: the process of {self.name} ended: {self.log.read()[-500:]}")
        found = json.loads(line)
        if "error" in found:
            raise RuntimeError(f"peers: {self.name}, {what}: {found['error']}")
        return found["answer"]

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.close()
            self.process.wait(timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.log.close()


Start = Callable[[str, Path, Shape], Any]
"""Name of a side, work folder, shape -> something with `ask` that is entered and left."""


def measure_peers(
    rounds: int = 30, out: str | None = None, shape: Shape | None = None, start: Start = Process
) -> dict[str, Any]:
    """Both sides -> {"hardware", "sides", "shape", "claims", "checks", "beyond", "foreign", "failed"}.

    rounds  timed steps a side, spread over the pairs of processes.
    out     folder for a result file, peers.json.
    A claim holds the medians of ours ("value") and theirs ("against"), their ratio and its target. "checks" is a list
    of {"check", "ours", "theirs"}. "beyond" is engram in other settings, which the peer does not offer. "failed" names
    the checks that are red for us.
    Raises ConfigError where the peer cannot be imported or memory cannot be measured, RuntimeError when a process
    fails or the two sides do not have the same tables.
    """
    if not Path("/proc/self/clear_refs").exists():
        raise ConfigError("peers: peak memory is read from /proc/self, which this system does not have; use Linux")
    shape = Shape() if shape is None else shape
    began, others = time.perf_counter(), foreign_seconds()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sides = _sides(folder, shape, start)
        write_text(folder, shape)
        pairs, busy = [], 0.0
        for index in range(PAIRS):
            order = ("ours", "theirs") if index % 2 == 0 else ("theirs", "ours")
            pairs.append(_pair(order, -(-rounds // PAIRS), folder, shape, start))
            busy += sum(side["busy"] for side in pairs[-1].values())
        beyond = {}
        for variant in VARIANTS:
            pair = _pair((variant, "theirs"), max(2, rounds // PAIRS), folder, shape, start)
            beyond[variant] = claims([pair], variant)
            busy += sum(side["busy"] for side in pair.values())
        checks = _checks(folder, shape, start)
    foreign = (foreign_seconds() - others - busy) / (time.perf_counter() - began) / (os.cpu_count() or 1)
    failed = {one["check"]: one["ours"]["found"] for one in checks if not one["ours"]["ok"]}
    found: dict[str, Any] = {"sides": sides, "shape": asdict(shape), "tables": pairs[0]["ours"]["tables"]}
    found["distinct"] = {name: pairs[0][name]["distinct"] for name in ("ours", "theirs")}
    found |= {"claims": claims(pairs), "checks": checks, "beyond": beyond, "foreign": foreign, "failed": failed}
    if out:
        config = {"rounds": rounds, "pairs": PAIRS, "shape": asdict(shape), "threads": torch.get_num_threads()}
        write_json(Path(out) / "peers.json", result(config, 0, {"arm": "peers", **found}))
    return {"hardware": machine(), **found}


def _sides(folder: Path, shape: Shape, start: Start) -> dict[str, Any]:
    """What both sides are. Raises ConfigError where the peer's package cannot be imported."""
    found = {}
    for name in ("theirs", "ours"):
        try:
            with start(name, folder, shape) as side:
                found[name] = side.ask("about")
        except RuntimeError as error:
            if name == "theirs" and any(kind in str(error) for kind in ("ImportError", "ModuleNotFoundError")):
                raise ConfigError(
                    f"peers: engram-peft cannot be imported here ({error}). This command installs nothing; in the "
                    f"environment of engram, `{INSTALL}` makes it importable (or `pip install --no-deps --target "
                    f"FOLDER ...` of it and what it lacks, and PYTHONPATH=FOLDER)"
                ) from None
            raise
    return found


def _pair(names: Sequence[str], rounds: int, folder: Path, shape: Shape, start: Start) -> dict[str, dict[str, Any]]:
    """Two fresh processes, the first-named started first, that take turns -> name -> what was measured.

    Raises RuntimeError when their tables are not the same.
    """
    with start(names[0], folder, shape) as first, start(names[1], folder, shape) as second:
        sides = dict(zip(names, (first, second), strict=True))
        found = {name: {**side.ask("prepare"), **{what: [] for what in TURNS}} for name, side in sides.items()}
        tables = [side["tables"] for side in found.values()]
        if tables[0] != tables[1]:
            raise RuntimeError(f"peers: tables of {names[0]} and {names[1]} differ, so do their times: {tables}")
        for index in range(rounds):
            for what in TURNS:
                for name in names if index % 2 else reversed(names):
                    found[name][what].append(sides[name].ask(what))
        for name, side in sides.items():
            found[name]["saved"] = side.ask("save")
            found[name]["busy"] = side.ask("busy")
    return found


def _checks(folder: Path, shape: Shape, start: Start) -> list[dict[str, Any]]:
    """Every check with the verdicts of both sides."""
    verdicts = {}
    for name in ("ours", "theirs"):
        with start(name, folder, shape) as side:
            verdicts[name] = side.ask("checks")
    return [{"check": one, **{name: found[one] for name, found in verdicts.items()}} for one in verdicts["ours"]]


def claims(pairs: Sequence[Mapping[str, Any]], ours: str = "ours") -> list[dict[str, Any]]:
    """Pairs of processes, side -> what was measured -> one claim for every line of CLAIMS.

    "value" and "against" are medians of all turns, "quartiles" those of the ratios of single turns, "pairs" the ratio
    of the medians within each pair.
    """
    found = []
    for name, (_, unit, target) in CLAIMS.items():
        mine, theirs = ([_numbers(name, pair[side]) for pair in pairs] for side in (ours, "theirs"))
        value, against = (statistics.median([v for part in parts for v in part]) for parts in (mine, theirs))
        ratios = [a / b for one, two in zip(mine, theirs, strict=True) for a, b in zip(one, two, strict=True)]
        quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        ratio = value / against
        found.append(
            {
                "id": name,
                "value": value,
                "against": against,
                "unit": unit,
                "ratio": ratio,
                "quartiles": [quartiles[0], quartiles[2]],
                "pairs": [statistics.median(a) / statistics.median(b) for a, b in zip(mine, theirs, strict=True)],
                "turns": len(ratios),
                "target": target,
                "ok": None if target is None else ratio <= target,
            }
        )
    return found


def _numbers(claim: str, side: Mapping[str, Any]) -> list[float]:
    """What a claim compares, of one side in one pair."""
    memory = side["memory"]
    by_claim = {
        "peer-step": lambda: [wall for wall, _ in side["step"]],
        "peer-step-busy": lambda: [busy for _, busy in side["step"]],
        "peer-step-added": lambda: [_busy(side["step"]) - _busy(side["bare_step"])],
        "peer-hash": lambda: [wall for wall, _ in side["hash"]],
        "peer-hash-busy": lambda: [busy for _, busy in side["hash"]],
        "peer-memory": lambda: [memory["peak"] - memory["imports"]],
        "peer-memory-added": lambda: [memory["peak"] - memory["bare"]],
        "peer-checkpoint": lambda: [side["saved"]["bytes"]],
    }
    return [float(number) for number in by_claim[claim]()]


def _busy(turns: Sequence[Sequence[float]]) -> float:
    return statistics.median(busy for _, busy in turns)


def write_text(folder: Path, shape: Shape) -> None:
    """Source text of the standard library -> tokenizer.json (byte-level BPE) and ids.safetensors in `folder`."""
    text = ""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if len(text) < TEXT_BYTES:
            text += path.read_text(encoding="utf-8", errors="replace")
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=shape.vocab_size, special_tokens=["<pad>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = torch.tensor(tokenizer.encode(text).ids, dtype=torch.int32)
    save_file({"ids": ids}, str(folder / "ids.safetensors"))


def _amount(number: float, unit: str) -> str:
    if unit == "B":
        return f"{number / 2**20:.1f} MiB"
    return f"{1e3 * number:.1f} ms" if number >= 1e-2 else f"{1e3 * number:.3f} ms"


def _verdict(one: Mapping[str, Any]) -> str:
    return {True: "green", False: "red", None: "not offered"}[one["ok"]]


def _lines(found: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A line of cells for every claim."""
    lines = []
    for one in found:
        what, unit, target = CLAIMS[one["id"]]
        low, high = one["quartiles"]
        aim = "" if target is None else f"at most {target:.2f}: {'met' if one['ok'] else 'missed'}"
        amounts = [_amount(one[side], unit) for side in ("value", "against")]
        lines.append([what, *amounts, f"{one['ratio']:.2f}", f"{low:.2f} to {high:.2f}", aim])
    return lines


HEADS = ["measured", "ours", "engram-peft", "ratio", "quartiles", "target"]


def measured_table(found: Mapping[str, Any]) -> str:
    """The claims as Markdown."""
    return _markdown(HEADS, _lines(found["claims"]))


def beyond_table(found: Mapping[str, Any]) -> str:
    """engram in other settings as Markdown."""
    lines = []
    for variant, parts in found["beyond"].items():
        shown = [one for one in parts if one["id"] in ("peer-step", "peer-memory", "peer-memory-added")]
        lines += [[f"{variant.removeprefix('ours, ')}: {cells[0]}", *cells[1:5]] for cells in _lines(shown)]
    return _markdown(HEADS[:5], lines)


def checks_table(found: Mapping[str, Any]) -> str:
    """The checks as Markdown."""
    cells = [
        [one["check"], *(f"{_verdict(one[side])}: {one[side]['found']}" for side in ("ours", "theirs"))]
        for one in found["checks"]
    ]
    return _markdown(["claim", "ours", "engram-peft"], cells)


def _markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    every = [heads, ["---"] * len(heads), *([cell.replace("|", "\\|") for cell in line] for line in lines)]
    return "".join(f"| {' | '.join(line)} |\n" for line in every)


def show_peers(found: Mapping[str, Any]) -> None:
    """Print what `measure_peers` found."""
    console = Console()
    for title, parts in (("in the same setting", found["claims"]), *found["beyond"].items()):
        table = Table(Column(HEADS[0], overflow="fold"), *HEADS[1:], title=title, title_justify="left")
        for line in _lines(parts):
            table.add_row(*line)
        console.print(table)
    for one in found["checks"]:
        for side in ("ours", "theirs"):
            console.print(f"{_verdict(one[side]):>11} {side:<6} {one['check']}: {one[side]['found']}", highlight=False)
    console.print(f"other programs took {found['foreign']:.0%} of all cores meanwhile")
