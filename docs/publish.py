"""Put results into the repository and their numbers into the README and docs/stores.md.

    .venv/bin/python docs/publish.py quickstart runs/quickstart
    .venv/bin/python docs/publish.py overlap runs/overlap        # made by: engram overlap ... --out runs/overlap

Copies result files to eval/results/, figures to docs/figures/, and rewrites the tables between their markers.
tests/test_readme.py checks that the pages still show the committed results.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from engram.eval.overlap import hidden_table
from engram.eval.report import markdown_table, read_result, verdict

ROOT = Path(__file__).resolve().parents[1]
FIGURES = {"loss.png": "quickstart-loss.png", "kl_by_depth.png": "quickstart-kl.png"}


def publish_quickstart(run: Path) -> None:
    """A finished quickstart folder -> committed results, figures and README block."""
    target = ROOT / "eval" / "results" / "quickstart"
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
    shutil.copyfile(run / "overlap.json", ROOT / "eval" / "results" / "overlap-cpu.json")
    shutil.copyfile(run / "overlap-prefill-entry.png", ROOT / "docs" / "figures" / "overlap-prefill.png")
    for page in ("README.md", "docs/stores.md"):
        _rewrite(page, "overlap", overlap_block())


def overlap_block() -> str:
    """The committed overlap measurement as Markdown."""
    found = json.loads((ROOT / "eval" / "results" / "overlap-cpu.json").read_text(encoding="utf-8"))
    cpu = found["hardware"]["cpu"]
    about = f"{cpu['cores']} cores of {cpu['model']}, one computes, one fetches; medians of {found['config']['rounds']}"
    return f"Prefill of 512 tokens, 32 rows of 512 B a token ({about}):\n\n{hidden_table(found)}"


def _rewrite(page: str, name: str, block: str) -> None:
    path = ROOT / page
    before, _, rest = path.read_text(encoding="utf-8").partition(f"<!-- {name} -->\n")
    after = rest.partition(f"<!-- /{name} -->")[2]
    path.write_text(f"{before}<!-- {name} -->\n{block}<!-- /{name} -->{after}", encoding="utf-8")


PUBLISH: dict[str, Callable[[Path], None]] = {"quickstart": publish_quickstart, "overlap": publish_overlap}

if __name__ == "__main__":
    PUBLISH[sys.argv[1]](Path(sys.argv[2]))
