"""Put results into the repository and their numbers into the README and the pages of docs/.

    .venv/bin/python docs/publish.py quickstart runs/quickstart
    .venv/bin/python docs/publish.py overlap runs/overlap         # engram overlap configs/overlap/cpu.yaml --out ...
    .venv/bin/python docs/publish.py overlap-train runs/train     # engram overlap configs/overlap/cpu-train.yaml ...
    .venv/bin/python docs/publish.py overlap-train-disk runs/train-disk        # ... configs/overlap/cpu-train-disk.yaml
    .venv/bin/python docs/publish.py compile runs/compile         # engram bench --compile-only --out runs/compile
    .venv/bin/python docs/publish.py bench runs/bench             # OMP_NUM_THREADS=1 engram bench --out runs/bench
    .venv/bin/python docs/publish.py peers runs/peers             # OMP_NUM_THREADS=1 engram bench --peers --out ...

Copies result files to eval/results/, figures to docs/figures/, and rewrites the tables between their markers.
tests/test_readme.py checks that the pages still show the committed results.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engram.eval.bench import compiled_table
from engram.eval.bench_disk import disk_table
from engram.eval.bench_gather import gather_table
from engram.eval.exposure import hidden_table
from engram.eval.peers import beyond_table, checks_table, measured_table
from engram.eval.report import markdown_table, read_result, verdict

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "eval" / "results"
FIGURES = {"loss.png": "quickstart-loss.png", "kl_by_depth.png": "quickstart-kl.png"}


def publish_quickstart(run: Path) -> None:
    """A finished quickstart folder -> committed results, figures and README block."""
    target = RESULTS / "quickstart"
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(run.rglob("result.json")):
        shutil.copyfile(path, target / f"{path.parent.parent.name}.json")
    (ROOT / "docs" / "figures").mkdir(exist_ok=True)
    for name, copy in FIGURES.items():
        shutil.copyfile(run / name, ROOT / "docs" / "figures" / copy)
    results = [read_result(path) for path in sorted(target.glob("*.json"))]
    about, versions = results[0]["hardware"], results[0]["versions"]
    block = (
        f"`make quickstart` on {about['cores']} cores of {about['cpu']}, torch {versions['torch']}, "
        f"{results[0]['date'][:10]}:\n\n{markdown_table(results)}\n{verdict(results)}\n"
    )
    _rewrite("README.md", "quickstart", block)


def publish_overlap(run: Path) -> None:
    """The folder of `engram overlap --out` -> committed result, figure and both pages' blocks."""
    shutil.copyfile(run / "overlap.json", RESULTS / "overlap-cpu.json")
    shutil.copyfile(run / "overlap-prefill-entry.png", ROOT / "docs" / "figures" / "overlap-prefill.png")
    for page in ("README.md", "docs/stores.md"):
        _rewrite(page, "overlap", overlap_block())


def overlap_block() -> str:
    """The committed overlap measurement as Markdown."""
    found = _read("overlap-cpu")
    return f"Prefill of 512 tokens, 32 rows of 512 B a token ({_overlap_about(found)}):\n\n{hidden_table(found)}"


def publish_overlap_train(run: Path) -> None:
    """The folder of `engram overlap configs/overlap/cpu-train.yaml --out` -> committed result and the page's block."""
    shutil.copyfile(run / "overlap.json", RESULTS / "overlap-cpu-train.json")
    _rewrite("docs/stores.md", "overlap-train", overlap_train_block())


def publish_overlap_train_disk(run: Path) -> None:
    """The same for configs/overlap/cpu-train-disk.yaml."""
    shutil.copyfile(run / "overlap.json", RESULTS / "overlap-cpu-train-disk.json")
    _rewrite("docs/stores.md", "overlap-train", overlap_train_block())


def overlap_train_block() -> str:
    """The committed overlap measurements of training as Markdown: from RAM and a link, then from a file."""
    return "\n".join(_training(name) for name in ("overlap-cpu-train", "overlap-cpu-train-disk"))


def _training(name: str) -> str:
    found = _read(name)
    cells = [cell for cell in found["cells"] if cell["launch"] == "ahead"]
    shares = sorted(cell["fetch"] / cell["t_ready"] for cell in cells)
    shape = f"{cells[0]['tokens']} tokens, {cells[0]['rows_per_token']} rows of {cells[0]['row_bytes']} B a token"
    return (
        f"A training step of {shape}, one batch ahead; the fetch is {shares[0]:.0%} to {shares[-1]:.0%} of the step "
        f"({_overlap_about(found)}):\n\n{hidden_table(found, 'train', 'ahead')}"
    )


def publish_bench(run: Path) -> None:
    """The folder of `engram bench --out` -> committed result and the blocks of docs/stores.md."""
    shutil.copyfile(run / "bench.json", RESULTS / "bench-cpu.json")
    _rewrite("docs/stores.md", "gather", gather_block())
    _rewrite("docs/stores.md", "disk", disk_block())


def gather_block() -> str:
    """The gathers of the committed benchmark as Markdown."""
    found = _read("bench-cpu")
    sizes = found["config"]["gather"]
    about = (
        f"{sizes['lookups']:,} random rows of a table of {sizes['table_bytes'] >> 20} MiB, one thread of a machine of"
        f" {_bench_about(found)}"
    )
    return f"{about}:\n\n{gather_table(found['metrics']['claims'])}"


def disk_block() -> str:
    """The disk reads of the committed benchmark as Markdown."""
    found = _read("bench-cpu")
    sizes, warm = found["config"]["disk"], [one["rows_per_second"] for one in found["metrics"]["reported"]]
    about = (
        f"{sizes['lookups']:,} random rows of {sizes['row_bytes']:,} B a call, a file of "
        f"{sizes['file_bytes'] / 2**30:g} GiB, {_bench_about(found)}"
    )
    ending = "".join(f"\nA warm mapping reads {speed / 1e6:.1f} million rows a second.\n" for speed in warm)
    return f"{about}:\n\n{disk_table(found['metrics']['claims'])}{ending}"


def publish_peers(run: Path) -> None:
    """The folder of `engram bench --peers --out` -> committed result and the block of docs/peers.md."""
    shutil.copyfile(run / "peers.json", RESULTS / "peers.json")
    _rewrite("docs/peers.md", "peers", peers_block())


def peers_block() -> str:
    """The committed comparison with another package as Markdown."""
    found = _read("peers")
    metrics, config, about = found["metrics"], found["config"], found["hardware"]
    theirs, shape = metrics["sides"]["theirs"], metrics["shape"]
    values = sum(rows * width for rows, width in metrics["tables"].values())
    override = theirs["typing.override"]
    setting = (
        f"engram {metrics['sides']['ours']['version']} and engram-peft {theirs['version']} on {about['cores']} cores "
        f"({about['cpu']}), {theirs['threads']} thread, torch {found['versions']['torch']}, transformers "
        f"{found['versions']['transformers']}, Python {theirs['python']} (`typing.override`: {override}), "
        f"{found['date'][:10]}. Tables of {values / 1e6:.1f} million fp32 values in {len(metrics['tables'])} blocks, "
        f"{shape['batch']} x {shape['length']} tokens a step. Medians of {metrics['claims'][0]['turns']} turns in "
        f"{config['pairs']} pairs of processes; other programs took {metrics['foreign']:.0%} of all cores meanwhile; "
        f"processor time is what they disturb least."
    )
    return (
        f"{setting}\n\n{measured_table(metrics)}\nIn a setting that the peer does not have:\n\n{beyond_table(metrics)}"
        f"\nCorrectness:\n\n{checks_table(metrics)}"
    )


def publish_compile(run: Path) -> None:
    """The folder of `engram bench --compile-only --out` -> committed result and the block of docs/kernels.md."""
    shutil.copyfile(run / "compile.json", RESULTS / "compile.json")
    _rewrite("docs/kernels.md", "compile", compile_block())


def compile_block() -> str:
    """The committed compile report as Markdown."""
    found = _read("compile")
    return f"{found['compiled']} compiled with Triton {found['versions']['triton']}:\n\n{compiled_table(found)}"


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _overlap_about(found: Any) -> str:
    cpu = found["hardware"]["cpu"]
    return f"{cpu['cores']} cores of {cpu['model']}, one computes, one fetches; medians of {found['config']['rounds']}"


def _bench_about(found: Any) -> str:
    about = found["hardware"]
    return f"{about['cores']} cores ({about['cpu']}), medians of {found['config']['rounds']} rounds"


def _rewrite(page: str, name: str, block: str) -> None:
    path = ROOT / page
    before, _, rest = path.read_text(encoding="utf-8").partition(f"<!-- {name} -->\n")
    after = rest.partition(f"<!-- /{name} -->")[2]
    path.write_text(f"{before}<!-- {name} -->\n{block}<!-- /{name} -->{after}", encoding="utf-8")


PUBLISH: dict[str, Callable[[Path], None]] = {
    "quickstart": publish_quickstart,
    "overlap": publish_overlap,
    "overlap-train": publish_overlap_train,
    "overlap-train-disk": publish_overlap_train_disk,
    "bench": publish_bench,
    "compile": publish_compile,
    "peers": publish_peers,
}

if __name__ == "__main__":
    PUBLISH[sys.argv[1]](Path(sys.argv[2]))
