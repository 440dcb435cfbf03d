"""Statistics against scipy, figures that are the same bytes twice, and a report that escapes what it shows."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats as scipy_stats
from tokenizers import Tokenizer
from tokenizers.models import BPE

from engram.attaching import attach
from engram.config import EngramConfig
from engram.eval import report
from engram.eval.figures import (
    depth_curves,
    difference_points,
    gate_text,
    loss_curves,
    paired_differences,
    png_bytes,
    result_figures,
    save_png,
)
from engram.eval.gates import gate_sample, gate_summary
from engram.eval.lens import logit_lens
from engram.eval.loss import held_out_loss
from engram.eval.report import build_report, markdown_table, read_result, result, summary, verdict, write_json
from engram.eval.rows import count_ngrams, row_usage, text_rows
from engram.eval.stats import mean_interval, paired_difference, t_quantile

HOSTILE = [
    "<script>alert(1)</script>",
    '"&',
    "' onload='x",
    "</span><img src=http://x.org/a.png>",
    "\n",
    "   ",
    "{{ 7 * 7 }}",
]


def one_result(arm: str = "memory", seed: int = 0, loss: float = 3.2, rho: float = 0.6, **more: Any) -> dict[str, Any]:
    tokens = [*HOSTILE, "$x_1$", "漢", "plain"]
    columns = [{"index": i, "order": 2 + i // 2, "head": i % 2, "size": 11, "offset": 11 * i} for i in range(4)]
    head = {
        "order": 2, "head": 0, "size": 11, "reads": 9, "touched": 5, "share": 5 / 11, "expected": 0.5, "ngrams": 7,
        "most_ngrams": 3, "collided": 0.25, "collided_reads": 0.5, "heaviest": 4 / 9,
        "top": [{"row": 3, "reads": 4, "ngrams": 2, "examples": [["<b>&", 3], ["x", 1]]}],
    }  # fmt: skip
    metrics = {
        "arm": arm,
        "rho": rho,
        "loss": loss,
        "tokens": 1_000_000,
        "tokens_per_second": 1234.5,
        "parameters": {"total": 1_234_567, "active": 234_567},
        "flops": {"total": 2_345_678},
        "baselines": {"trigram": 3.9},
        "validation": [[1e5, loss + 2], [5e5, loss + 1], [1e6, loss]],
        "lens": {
            "depths": [0, 1, 2],
            "kl": [4.0, 1.0, 0.0],
            "js": [0.6, 0.3, 0.0],
            "cross_entropy": [8.0, 5.0, loss],
            "entropy": [2.0, 3.0, 3.1],
            "tokens": 99,
        },
        "memory_layers": [1],
        "gates": {
            "sample": {"ids": list(range(10)), "tokens": tokens, "layers": {"1": [[i / 10] for i in range(10)]}},
            "summary": {
                "1": {
                    "quantiles": {"0.5": 0.4},
                    "by_count": {"2": [{"from": 4096, "to": None, "tokens": 5, "mean": 0.4}]},
                }
            },
        },
        "rows": {
            "text": {
                "layer": 1,
                "ids": list(range(10)),
                "tokens": tokens,
                "columns": columns,
                "ngrams": {"2": [f"∅{t}" for t in tokens], "3": [f"∅∅{t}" for t in tokens]},
                "rows": [[p, 11 + p, 22 + p, 33 + p] for p in range(10)],
            },
            "usage": [{"layer": 1, "tokens": 9, "rows": 44, "touched": 20, "share": 20 / 44, "heads": [head]}],
        },
        **more,
    }
    return result({"name": "<i>toy</i>"}, seed, metrics)


class Page(HTMLParser):
    """Tags with their attributes, and the visible text, as a browser would read them."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes <{self.open[-1:]}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


# ---- stats ----


@pytest.mark.parametrize("values", [[1.0, 2.0], [3.21, 3.25, 3.19], list(np.random.default_rng(0).normal(size=7))])
def test_interval_equals_scipy(values: list[float]) -> None:
    one = mean_interval(values)
    low, high = scipy_stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=scipy_stats.sem(values))
    assert (one.low, one.high) == (pytest.approx(low), pytest.approx(high))
    assert one.mean == pytest.approx(np.mean(values)) and one.std == pytest.approx(np.std(values, ddof=1))
    assert one.half == pytest.approx((high - low) / 2)


def test_t_quantiles_of_the_tables() -> None:
    assert [round(t_quantile(n), 3) for n in (2, 3, 5)] == [12.706, 4.303, 2.776]
    with pytest.raises(ValueError, match="at least 2"):
        t_quantile(1)


def test_one_value_has_no_interval_and_none_is_an_error() -> None:
    one = mean_interval([3.0])
    assert (one.n, one.mean, one.std, one.half, one.low, one.high) == (1, 3.0, None, None, None, None)
    assert one.excludes_zero() is None
    with pytest.raises(ValueError, match="none given"):
        mean_interval([])
    with pytest.raises(ValueError, match="not finite"):
        mean_interval([1.0, math.nan])


def test_paired_difference_uses_common_seeds_only() -> None:
    a, b = {0: 3.0, 1: 3.5, 2: 4.1, 9: 7.0}, {0: 3.11, 1: 3.62, 2: 4.2, 5: 1.0}
    one = paired_difference(a, b)
    paired = scipy_stats.ttest_rel([3.0, 3.5, 4.1], [3.11, 3.62, 4.2]).confidence_interval(0.95)
    assert one.seeds == (0, 1, 2) and one.n == 3
    assert (one.low, one.high) == (pytest.approx(paired.low), pytest.approx(paired.high))
    assert one.excludes_zero() is True and paired.high < 0
    assert paired_difference({0: 1.0, 1: 2.0}, {0: 1.1, 1: 1.9}).excludes_zero() is False
    lone = paired_difference({0: 1.0}, {0: 1.5, 1: 2.0})
    assert (lone.n, lone.mean, lone.low) == (1, -0.5, None)
    nobody = paired_difference({0: 1.0}, {1: 1.0})
    assert (nobody.n, nobody.mean) == (0, None)
    assert json.loads(json.dumps(one.to_dict()))["seeds"] == [0, 1, 2]


# ---- figures ----


def test_figures_are_png_and_the_same_bytes_twice(tmp_path: Path) -> None:
    results = [one_result(), one_result("moe", 0, 3.3, 1.0)]
    first, second = result_figures(results), result_figures(results)
    assert list(first) == ["loss", "kl_by_depth", "loss_by_depth", "gates"]
    sizes = set()
    for name, figure in first.items():
        data = png_bytes(figure)
        assert data.startswith(b"\x89PNG") and len(data) < 120_000, name
        assert data == png_bytes(second[name]), name
        assert b"Software" not in data and b"tIME" not in data and b"Creation" not in data
        sizes.add(data)
    assert len(sizes) == 4
    path = save_png(first["loss"], tmp_path / "deep" / "loss.png")
    assert path.read_bytes() == png_bytes(first["loss"]) and [p.name for p in path.parent.iterdir()] == ["loss.png"]


def test_curves_show_the_mean_of_the_seeds_and_their_interval() -> None:
    axes: Any = loss_curves({"a": {0: [[1e6, 4.0], [2e6, 3.0]], 1: [[1e6, 5.0], [2e6, 3.5]]}}, {"trigram": 3.2}).axes[0]
    lines = {tuple(line.get_ydata()) for line in axes.lines}
    assert {(4.0, 3.0), (5.0, 3.5), (4.5, 3.25), (3.2, 3.2)} <= lines
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a (2 seeds)"]
    lens = one_result()["metrics"]["lens"]
    other = {**lens, "kl": [5.0, 2.0, 0.0]}
    axes = depth_curves({"a": [lens, other]}, "kl", [1]).axes[0]
    data, _, bars = axes.containers[0]
    assert data.get_ydata().tolist() == [4.5, 1.5, 0.0]
    half = mean_interval([4.0, 5.0]).half
    assert half is not None
    assert bars[0].get_segments()[0][:, 1].tolist() == pytest.approx([4.5 - half, 4.5 + half])


def test_difference_points_are_paired_by_seed_against_rho_one() -> None:
    losses = {1.0: (3.0, 3.4), 0.8: (2.9, 3.2), 0.6: (3.1, math.nan)}
    results = [
        one_result(f"rho{rho}", seed, loss, rho) for rho, pair in losses.items() for seed, loss in enumerate(pair)
    ]
    points = difference_points(results)
    assert [(point["rho"], point["n"]) for point in points] == [(0.6, 1), (0.8, 2)]
    assert points[1]["mean"] == pytest.approx(-0.15) and points[0]["low"] is None
    axes = paired_differences(points).axes[0]
    assert [round(float(container[0].get_ydata()[0]), 6) for container in axes.containers] == [0.1, -0.15]


def test_a_diverged_run_is_drawn_as_far_as_it_went() -> None:
    good, bad = one_result("moe", 0, 3.3, 1.0), one_result("memory", 0, math.nan)
    assert bad["metrics"]["loss"] is None and bad["metrics"]["validation"][0][1] is None
    figures = result_figures([good, bad])
    assert list(figures) == ["loss", "kl_by_depth", "loss_by_depth", "gates"]
    legend: Any = figures["loss"].axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["moe"]


def test_gate_figure_draws_every_token_and_no_markup() -> None:
    sample = one_result()["metrics"]["gates"]["sample"]
    figure = gate_text(sample)
    drawn = "".join(text.get_text() for text in figure.axes[0].texts)
    assert "<script>alert(1)</script>" in drawn and "$x_1$" in drawn and "□plain" in drawn and "↵" in drawn
    assert not any(text.get_parse_math() for text in figure.axes[0].texts)
    with pytest.raises(ValueError, match="layer: 7 has no gates"):
        gate_text(sample, 7)


def test_empty_figures_are_errors() -> None:
    for draw in (lambda: loss_curves({"a": {0: []}}), lambda: depth_curves({}), lambda: paired_differences([])):
        with pytest.raises(ValueError, match="nothing to draw"):
            draw()
    with pytest.raises(ValueError, match="'surprise' is not known"):
        depth_curves({"a": [one_result()["metrics"]["lens"]]}, "surprise")


# ---- results ----


def test_result_holds_what_a_reader_needs_and_survives_json(tmp_path: Path) -> None:
    cfg = EngramConfig(hidden_size=16)
    one = result(
        cfg, np.int64(3), {"arm": "a", "loss": np.float32(2.5), "curve": np.array([[1, 2.0]]), "nan": math.nan}
    )
    assert tuple(one) == report.KEYS
    assert one["config"]["hidden_size"] == 16 and one["config"]["hash"]["engine"] == "xor"
    assert {"python", "torch", "transformers", "triton", "numpy", "engram"} <= set(one["versions"])
    assert one["hardware"]["cores"] >= 1 and one["hardware"]["ram_bytes"] > 2**20 and one["hardware"]["cpu"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", one["date"])
    path = write_json(tmp_path / "r" / "result.json", one)
    assert read_result(path) == one and one["metrics"]["nan"] is None and one["seed"] == 3
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]


def test_a_write_that_fails_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_json(tmp_path / "result.json", {"a": 1})
    with pytest.raises(TypeError, match=r"data\.b\[0\]: object is no plain data"):
        write_json(path, {"b": [object()]})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}


def test_files_that_are_no_results_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ValueError, match=r"x\.json: cannot be read"):
        read_result(tmp_path / "x.json")
    write_json(tmp_path / "y.json", {"config": {}, "metrics": {}})
    with pytest.raises(ValueError, match="lacks versions, hardware, date, seed"):
        read_result(tmp_path / "y.json")
    with pytest.raises(ValueError, match="none given"):
        build_report([], None, tmp_path / "r.html")
    with pytest.raises(ValueError, match=r"results\[0\]: metrics must be a mapping that names its 'arm'"):
        build_report([{**one_result(), "metrics": {}}], None, tmp_path / "r.html")


# ---- verdict and tables ----


def test_verdict_with_one_seed_and_with_several() -> None:
    pair = [one_result("memory", 0, 3.2), one_result("moe", 0, 3.3, 1.0)]
    assert verdict(pair) == "one seed, no verdict: memory − moe = -0.1000 nats/token"
    more = [
        *pair,
        one_result("memory", 1, 3.21), one_result("moe", 1, 3.32, 1.0),
        one_result("memory", 2, 3.19), one_result("moe", 2, 3.28, 1.0),
    ]  # fmt: skip
    assert re.fullmatch(
        r"memory − moe = -0\.1000 nats/token \[-0\.1248, -0\.0752\], 3 paired seeds, 95 % t interval: lower",
        verdict(more),
    )
    noisy = [*pair, one_result("memory", 1, 3.5), one_result("moe", 1, 3.32, 1.0)]
    assert verdict(noisy).endswith("no difference shown")
    assert verdict(pair[:1]) == "one arm, nothing to compare"
    assert "no seed in common" in verdict([pair[0], one_result("moe", 5, 3.3, 1.0)])
    assert verdict([pair[0], one_result("moe", 0, math.nan, 1.0)]).startswith("one seed, no verdict: ")


def test_summary_and_markdown() -> None:
    results = [one_result("moe", s, 3.3 + s / 10, 1.0) for s in range(3)] + [
        one_result("a|b<x>", 0, 3.2, tags=["short-training"])
    ]
    columns, rows = summary(results)
    assert columns[:3] == ["arm", "seeds", "loss (nats/token)"]
    assert rows[0][:4] == ["moe", "3", "3.4000 ± 0.2484", "3.9000"]
    assert rows[1][2] == "3.2000" and rows[1][-1] == "short-training" and "1,234,567" in rows[1]
    lines = markdown_table(results).splitlines()
    assert len(lines) == 4 and lines[3].startswith("| a\\|b&lt;x> | 1 | 3.2000 |")
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {len(columns) + 1}
    bare = result({}, 0, {"arm": "x"})
    assert summary([bare]) == (["arm", "seeds", "loss (nats/token)"], [["x", "1", "–"]])


# ---- the page ----


def test_report_is_one_file_that_asks_for_nothing(tmp_path: Path) -> None:
    path = build_report(
        [one_result(), one_result("moe", 0, 3.3, 1.0)],
        None,
        tmp_path / "out" / "report.html",
        command="engram quickstart",
    )
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]
    page = Page(path.read_text(encoding="utf-8"))
    assert not page.open
    counts = Counter(tag for tag, _ in page.tags)
    assert counts["script"] == counts["link"] == counts["iframe"] == 0
    for tag, attributes in page.tags:
        for name in ("src", "href", "action", "data", "srcset", "poster"):
            value = attributes.get(name)
            assert value is None or value.startswith("data:image/png;base64,"), f"<{tag} {name}={value}>"
        assert not any(name.startswith("on") for name in attributes)
    assert counts["img"] == 3
    assert "url(" not in path.read_text(encoding="utf-8") and "@import" not in path.read_text(encoding="utf-8")
    for part in (
        "one seed, no verdict: memory − moe = -0.1000", "Summary", "trigram", "Gate values over a sample text: memory",
        "Where the rows came from: memory, block 1", "engram quickstart", '"transformers"', "memory, seed 0",
        "4,096 or more",
    ):  # fmt: skip
        assert part in page.text, part


def test_report_escapes_hostile_text(tmp_path: Path) -> None:
    hostile = "<script>x</script>\"'&"
    one = one_result(hostile, tags=[hostile])
    path = build_report([one], {hostile: b"\x89PNG"}, tmp_path / "r.html", title=hostile, command=hostile)
    raw = path.read_text(encoding="utf-8")
    assert "<script" not in raw and "<b>&" not in raw and "<i>toy" not in raw and "&lt;script&gt;" in raw
    page = Page(raw)
    assert not page.open
    tokens = [attributes for tag, attributes in page.tags if tag == "span"]
    assert len(tokens) == 20 // 2 and all(set(a) == {"class", "style", "title"} for a in tokens)
    assert page.text.count(hostile) >= 5
    for token in HOSTILE:
        assert token.replace("\n", "↵") in page.text, token
    assert "49" not in [text.strip() for text in page.text.splitlines()], "a token was read as a template"


def test_report_is_rebuilt_from_files_with_little_in_them(tmp_path: Path) -> None:
    full = [one_result(), one_result("moe", 0, 3.3, 1.0)]
    paths = [write_json(tmp_path / f"{i}.json", one) for i, one in enumerate(full)]
    first = build_report(full, None, tmp_path / "a.html").read_bytes()
    assert build_report([read_result(path) for path in paths], None, tmp_path / "b.html").read_bytes() == first
    bare = build_report([result({}, 0, {"arm": "x"})], None, tmp_path / "c.html").read_text(encoding="utf-8")
    assert "<img" not in bare and "one arm, nothing to compare" in bare


def test_a_real_memory_from_measurement_to_page(tmp_path: Path, tiny_model: Callable[..., Any]) -> None:
    """Every shape of metrics comes from the function that makes it, through JSON and back."""
    alphabet = [chr(c) for c in range(ord(" ") + 1, ord(" ") + 65)]
    tokenizer = Tokenizer(BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    model = tiny_model("deepseek_v3")
    handle = attach(model, EngramConfig(hidden_size=32, heads=2, head_dim=4, rows=53, init="normal"))
    ids_BT = torch.randint(0, 64, (2, 24))
    batch = {"input_ids": ids_BT, "labels": ids_BT.roll(-1, 1), "position_ids": torch.arange(24).expand(2, -1)}
    ngram_hash = handle.memory.layer(1).hash
    metrics = {
        "arm": "memory",
        "loss": held_out_loss(model, [batch]).nats,
        "lens": logit_lens(model, [batch]).to_dict(),
        "memory_layers": [1],
        "gates": {
            "sample": gate_sample(model, handle, tokenizer, "<B>&<SCRIPT>"),
            "summary": gate_summary(model, handle, [batch], count_ngrams(ngram_hash, [batch]))["layers"],
        },
        "rows": {
            "text": text_rows(ngram_hash, tokenizer, "<B>&<SCRIPT>"),
            "usage": [row_usage(ngram_hash, [batch], tokenizer).to_dict()],
        },
    }
    one = read_result(write_json(tmp_path / "result.json", result({}, 0, metrics)))
    raw = build_report([one], None, tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page(raw)
    assert not page.open and "<SCRIPT>" not in raw
    assert sum(tag == "span" for tag, _ in page.tags) == 12 and sum(tag == "img" for tag, _ in page.tags) == 2
    first_row = " ".join(map(str, one["metrics"]["rows"]["text"]["rows"][0][:2]))
    for part in (
        f"{metrics['loss']:.4f}",
        "∅<",
        first_row,
        "2-gram",
        "Block 1: 48 tokens touched",
        "quantiles of the gate",
    ):
        assert part in page.text, part
