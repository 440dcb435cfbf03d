"""The README's examples run, its numbers are those of the committed results, its links lead somewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from engram.eval.bench import compiled_table
from engram.eval.bench_disk import disk_table
from engram.eval.bench_gather import gather_table
from engram.eval.exposure import hidden_table
from engram.eval.peers import beyond_table, checks_table, measured_table
from engram.eval.report import markdown_table, read_result, verdict

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"<!-- example: (\w+) -->\n```python\n(.*?)```", README, flags=re.S))
LOG = ROOT / "eval" / "results" / "LOG.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", LOG, *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("name", ["own", "attach"])
def test_the_examples_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(EXAMPLES[name], f"README:{name}", "exec"), {"__name__": "readme"})
    if name == "attach":
        assert "torch.Size([2, 16, 1]) torch.Size([2, 16, 8])" in capsys.readouterr().out


def test_the_quickstart_table_is_that_of_the_committed_results() -> None:
    results = [read_result(path) for path in sorted((ROOT / "eval" / "results" / "quickstart").glob("*.json"))]
    assert len(results) == 2
    block = _block("README.md", "quickstart")
    assert markdown_table(results) in block and verdict(results) in block
    assert results[0]["hardware"]["cpu"] in block and results[0]["versions"]["torch"] in block


def test_the_difference_of_three_seeds_is_that_of_the_committed_study() -> None:
    study = json.loads((LOG.parent / "quickstart-seeds.json").read_text(encoding="utf-8"))
    found = study["arms"]["with memory"]["difference"]
    assert found["seeds"] == [0, 1, 2]
    assert f"{found['mean']:.4f} [{found['low']:.4f}, {found['high']:.4f}]" in LOG.read_text(encoding="utf-8")
    prose = " ".join(README.split())
    assert f"{found['mean']:.4f} nats/token, 95 % interval {found['low']:.4f} to {found['high']:.4f}" in prose
    assert study["command"] in prose


@pytest.mark.parametrize("page", ["README.md", "docs/stores.md"])
def test_the_overlap_table_is_that_of_the_committed_measurement(page: str) -> None:
    found = json.loads((ROOT / "eval" / "results" / "overlap-cpu.json").read_text(encoding="utf-8"))
    block = _block(page, "overlap")
    assert hidden_table(found) in block and found["hardware"]["cpu"]["model"] in block


@pytest.mark.parametrize("name", ["overlap-cpu-train", "overlap-cpu-train-disk"])
def test_the_training_table_is_that_of_the_committed_measurement(name: str) -> None:
    found = json.loads((LOG.parent / f"{name}.json").read_text(encoding="utf-8"))
    block = _block("docs/stores.md", "overlap-train")
    assert hidden_table(found, "train", "ahead") in block and found["hardware"]["cpu"]["model"] in block
    assert {cell["phase"] for cell in found["cells"]} == {"train"}


def test_the_tables_of_reads_are_those_of_the_committed_benchmark() -> None:
    found = read_result(LOG.parent / "bench-cpu.json")
    assert found["config"]["only"] == [], "the whole benchmark in one run"
    gather, disk = _block("docs/stores.md", "gather"), _block("docs/stores.md", "disk")
    assert gather_table(found["metrics"]["claims"]) in gather and disk_table(found["metrics"]["claims"]) in disk
    for block in (gather, disk):
        assert found["hardware"]["cpu"] in block and f"medians of {found['config']['rounds']} rounds" in block


def test_the_comparison_is_the_committed_one() -> None:
    found = read_result(LOG.parent / "peers.json")
    metrics, block = found["metrics"], _block("docs/peers.md", "peers")
    for table in (measured_table(metrics), beyond_table(metrics), checks_table(metrics)):
        assert table in block
    assert found["hardware"]["cpu"] in block and metrics["sides"]["theirs"]["version"] in block
    assert all(one["ours"]["ok"] for one in metrics["checks"]) and not metrics["failed"]


def test_the_compile_report_is_the_committed_one() -> None:
    found = json.loads((LOG.parent / "compile.json").read_text(encoding="utf-8"))
    assert compiled_table(found) in _block("docs/kernels.md", "compile") and not found["failed"]


def _block(page: str, name: str) -> str:
    """What stands between the markers of a page; empty where they are not there."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return text.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- /{name} -->")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) + re.findall(r'src="([^"]+)"', text)
    missing = [t for t in targets if not t.startswith("http") and not (page.parent / t).exists()]
    assert not missing
