"""Put the results of a quickstart into the repository and its numbers into the README.

    .venv/bin/python docs/publish.py runs/quickstart

Copies each result.json to eval/results/quickstart/, two figures to docs/figures/, and rewrites the README's table.
tests/test_readme.py checks that the README still shows the committed results.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from engram.eval.report import markdown_table, read_result, verdict

ROOT = Path(__file__).resolve().parents[1]
FIGURES = {"loss.png": "quickstart-loss.png", "kl_by_depth.png": "quickstart-kl.png"}


def publish(run: Path) -> None:
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
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition("<!-- quickstart -->\n")
    after = rest.partition("<!-- /quickstart -->")[2]
    readme.write_text(f"{before}<!-- quickstart -->\n{block}<!-- /quickstart -->{after}", encoding="utf-8")


if __name__ == "__main__":
    publish(Path(sys.argv[1]))
