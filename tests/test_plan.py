"""The plan's arithmetic against cases worked by hand, published sizes, refusals; every hardware figure has a source."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from engram import families
from engram.cli import _finite
from engram.eval.plan import (
    TIER,
    BlockTime,
    Figure,
    Launch,
    Link,
    Machine,
    PlanConfig,
    Speed,
    StorePlan,
    block_times,
    exposed_times,
    fetch_time,
    first_free_layer,
    load_profile,
    make_plan,
    names_of_profiles,
    resolve,
    run_config,
    show,
)
from engram.hashing import total_rows
from engram.strict import ConfigError, from_dict

ROOT = Path(__file__).resolve().parents[1]
PLANS = ROOT / "configs" / "plan"
GIB = 2**30

UNKNOWN = {
    ("ascend-950dt", "memory_bytes"),
    ("ascend-950pr", "bf16_flops"),
    ("ascend-950pr", "memory_bytes"),
    ("cpu-disk", "peak_bandwidth"),
    ("cxl2-x16", "bandwidth"),
    ("cxl2-x16", "latency"),
    ("nvlink-c2c-gb300", "peak_bandwidth"),
    ("nvlink-c2c-gh200", "latency"),
    ("nvlink-c2c-rubin", "bandwidth"),
    ("nvlink-c2c-rubin", "latency"),
    ("nvlink-c2c-rubin", "peak_bandwidth"),
    ("nvme-pcie5", "latency"),
}
"""Figures for which no source was found. One that gets a value loses its line here, and gains a source there."""


def by_hand(**changes: Any) -> PlanConfig:
    """The toy family: 4,062 and 4,152 rows of 64 bytes at layers 1 and 15, 4 columns; 16 blocks of 2 ms."""
    slow = {"bandwidth": 1e6, "latency": 1e-3, "reads_per_second": 1e5, "granule": 128.0}
    fields: dict[str, Any] = {
        "name": "by hand",
        "family": "toy",
        "blocks": 16,
        "tokens": 100,
        "devices": 2,
        "block": {"seconds": 2e-3},
        "stores": {"slow": {"kind": "pinned", **slow}, "shared": {"kind": "disk", **slow}},
        "kv_bytes_per_token": 1000,
    }
    return from_dict(PlanConfig, {**fields, **changes})


def test_a_fetch_by_hand() -> None:
    disk = Speed(bandwidth=1e9, latency=10e-6, reads_per_second=1e6, granule=4096)
    assert fetch_time(disk, 1000, 264) == (pytest.approx(10e-6 + 4.096e-3), "bandwidth")  # a row moves a page
    assert fetch_time(disk, 1000, 4097) == (pytest.approx(10e-6 + 8.192e-3), "bandwidth")
    fast = Speed(bandwidth=10e9, latency=10e-6, reads_per_second=1e6, granule=4096)
    assert fetch_time(fast, 1000, 264) == (pytest.approx(1.01e-3), "reads")
    assert fetch_time(fast, 1, 264) == (pytest.approx(11e-6), "latency")
    assert fetch_time(fast, 0, 264) == (0.0, "nothing")
    assert fetch_time(Speed(52e9, 12e-6, granule=32), 12_288, 264)[0] == pytest.approx(12e-6 + 12_288 * 288 / 52e9)


@pytest.mark.parametrize(
    ("reads", "row_bytes", "speed", "seconds"),
    [  # a table of transfer times computed elsewhere: tokens x heads, bytes a row
        (2_048 * 16, 128, Speed(24e9, 0), 0.17e-3),
        (32_768 * 24, 256, Speed(24e9, 0), 8.4e-3),
        (32_768 * 24, 256, Speed(45e9, 0), 4.5e-3),
        (2_048 * 16, 128, Speed(7.88e9, 0, 130e3, 4096), 252e-3),
        (32_768 * 16, 128, Speed(15.75e9, 0, 1.5e6, 4096), 350e-3),
    ],
)
def test_fetches_of_a_published_table(reads: int, row_bytes: int, speed: Speed, seconds: float) -> None:
    assert fetch_time(speed, reads, row_bytes)[0] == pytest.approx(seconds, rel=0.03)


def test_windows_and_waits_by_hand() -> None:
    blocks, fetches = [1e-3] * 4, {2: 3e-3, 0: 0.5e-3}
    entry = exposed_times(fetches, blocks, 1e-3, "entry")
    # layer 0 has no window and waits 0.5; layer 2's rows are there at 3.5, the layer is reached at 2 + 0.5
    assert entry == {0: (0.0, pytest.approx(0.5e-3)), 2: (2e-3, pytest.approx(1e-3))}
    assert exposed_times(fetches, blocks, 1e-3, "one_ahead") == {0: (5e-3, 0.0), 2: (5e-3, 0.0)}
    assert exposed_times({0: 4e-3, 2: 3e-3}, blocks, 1e-3, "one_ahead")[2][1] == pytest.approx(2e-3)
    assert [exposed for _, exposed in exposed_times(fetches, blocks, 0, "layer").values()] == [0.5e-3, 3e-3]
    uneven = exposed_times({2: 3e-3}, [2e-3, 0.5e-3, 9.0], 0, "entry")
    assert uneven[2] == (2.5e-3, pytest.approx(0.5e-3))
    with pytest.raises(ConfigError, match="layers: 4 is outside of the blocks 0..3"):
        exposed_times({4: 1.0}, blocks, 0, "entry")


@pytest.mark.parametrize("launch", ["entry", "one_ahead"])
def test_waits_equal_a_step_played_through(launch: Launch) -> None:
    for _ in range(200):
        blocks = [random.uniform(0.1, 1) for _ in range(8)]
        outside = random.uniform(0, 2)
        fetches = {layer: random.uniform(0.1, 3) for layer in random.sample(range(8), 3)}
        clock = 0.0 if launch == "entry" else sum(blocks) + outside  # fetches start at 0, one after the other
        link, waits = 0.0, {}
        ready = {layer: (link := link + fetches[layer]) for layer in sorted(fetches)}
        for number, seconds in enumerate(blocks):
            if number in ready:
                waits[number] = max(0.0, ready[number] - clock)
                clock += waits[number]
            clock += seconds
        times = exposed_times(fetches, blocks, outside, launch)
        # rows fetched a step ahead may be asked for before block 0, so they get no window inside of their own step
        if launch == "one_ahead":
            total = max(0.0, sum(fetches.values()) - sum(blocks) - outside)
            assert sum(exposed for _, exposed in times.values()) == pytest.approx(total)
        else:
            assert {layer: exposed for layer, (_, exposed) in times.items()} == pytest.approx(waits)
        assert all(exposed <= fetches[layer] + 1e-12 for layer, (_, exposed) in times.items())


def test_the_first_layer_with_nothing_exposed() -> None:
    blocks = [1e-3] * 4
    assert first_free_layer(2.5e-3, blocks, 0, "entry") == 3
    assert first_free_layer(3.5e-3, blocks, 9, "entry") is None, "time after the last block is no window"
    assert first_free_layer(3.5e-3, blocks, 9, "one_ahead") == 0
    assert first_free_layer(5e-3, blocks, 0.5e-3, "one_ahead") is None
    assert first_free_layer(1e-9, blocks, 0, "layer") is None
    assert first_free_layer(0.0, blocks, 0, "entry") == 0


def test_a_plan_by_hand() -> None:
    plan = make_plan(by_hand())
    assert (plan["rows"], plan["row_bytes"], plan["table_bytes"]) == (8214, 64, 525_696)
    assert (plan["rows_per_token"], plan["bytes_per_token"]) == (8, 512)
    first, last = (cell for cell in plan["cells"] if cell["store"] == "slow")
    # 100 tokens x 4 columns over 2 devices; 128 bytes each at 1 MB/s
    assert (first["reads"], first["bytes_per_token"], first["bound"]) == (200, 256, "bandwidth")
    assert first["fetch"] == last["fetch"] == pytest.approx(26.6e-3)
    assert (first["window"], first["exposed"]) == (pytest.approx(2e-3), pytest.approx(24.6e-3))
    assert (last["window"], last["exposed"]) == (pytest.approx(30e-3), 0.0), "53.2 ms of fetches in 30 + 24.6 ms"
    assert (first["hidden"], last["hidden"]) == (pytest.approx(2 / 26.6), 1.0)
    store = plan["stores"]["slow"]
    assert store["overhead"] == pytest.approx(24.6 / 32) and store["first_free_layer"] == 14
    # buffers: 200 rows x 2 layers x 64 bytes on each of two devices
    assert store["tiers"] == {"device": 51_200, "host": 525_696, "disk": 0, "cxl": 0}
    assert (store["freed_bytes"], store["kv_tokens"], store["device_memory_share"]) == (474_496, 474, None)
    shared = plan["stores"]["shared"]
    assert [cell["reads"] for cell in plan["cells"]] == [200, 200, 400, 400], "one drive serves both devices"
    assert shared["tiers"] == {"device": 51_200, "host": 51_200, "disk": 525_696, "cxl": 0}


def test_shares_copies_and_launches_by_hand() -> None:
    def cell(**changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        plan = make_plan(by_hand(**changes))
        return plan["cells"][0], plan["stores"]["slow"]

    assert cell(unique_share=0.5, hit_share=0.5)[0]["reads"] == 50
    found, store = cell(hit_share=1.0)
    assert (found["reads"], found["fetch"], found["exposed"], found["hidden"]) == (0, 0.0, 0.0, None)
    assert store["first_free_layer"] == 0
    found, store = cell(launch="one_ahead", outside_seconds=8e-3)
    assert found["window"] == pytest.approx(40e-3) and store["exposed"] == pytest.approx(13.2e-3)
    assert store["tiers"]["device"] == 2 * 51_200
    found, store = cell(launch="layer")
    assert store["exposed"] == pytest.approx(2 * 26.6e-3)
    assert cell(layers=[3])[0]["layer"] == 3
    assert cell(row_format="bf16")[0]["bytes_per_token"] == 4 * 32 and cell(row_bytes=100)[0]["bytes_per_token"] == 400
    found, store = cell(copies="each", row_state=True)
    assert found["reads"] == 400 and store["tiers"]["device"] == 2 * 400 * 2 * 64 + 4 * 8214
    assert store["freed_bytes"] == 2 * 525_696 - 2 * 400 * 2 * 64 and store["tiers"]["host"] == 525_696
    device = {"device": {"kind": "device", "bandwidth": 1e9}}
    store = make_plan(by_hand(copies="each", stores=device))["stores"]["device"]
    assert (store["tiers"]["device"], store["freed_bytes"], store["kv_tokens"]) == (2 * 525_696, 0, 0)


def test_block_times_by_hand() -> None:
    h200 = load_profile("h200", Machine)
    stores = {"device": StorePlan("device")}

    def times(block: BlockTime, **changes: Any) -> tuple[float, ...]:
        cfg = PlanConfig("x", 3, 1000, block, stores, family="toy", layers=(1,), machine="h200", **changes)
        return block_times(cfg, h200)

    assert times(BlockTime(seconds=0.5)) == (0.5, 0.5, 0.5)
    assert times(BlockTime(seconds=(0.1, 0.2, 0.3))) == (0.1, 0.2, 0.3)
    assert times(BlockTime(flops_per_token=1e9, efficiency=0.5))[0] == pytest.approx(1e12 / (989e12 * 0.5))
    fp8 = BlockTime(flops_per_token=1e9, efficiency=0.5, precision="fp8")
    assert times(fp8, devices=4)[0] == pytest.approx(1e12 / (4 * 1979e12 * 0.5))
    reading = BlockTime(flops_per_token=1e9, efficiency=0.5, weight_bytes=48e9)
    assert times(reading)[0] == pytest.approx(48e9 / (4.8e12 * 0.5)) == pytest.approx(20e-3)


def test_published_sizes_of_deepseek_v41() -> None:
    plan = run_config(str(PLANS / "deepseek-v4.1-flash.yaml"), [])
    memory = families.get("deepseek-v4.1")
    assert plan["rows"] == sum(total_rows(memory, layer) for layer in memory.layers) == 768_022_850
    assert plan["row_bytes"] == 264 and round(plan["table_bytes"] / GIB, 2) == 188.83
    assert plan["rows_per_token"] == 48 and round(plan["bytes_per_token"] / 1024, 1) == 12.4
    assert round(plan["table_bytes"] / plan["devices"] / GIB, 1) == 47.2  # per rank at four ranks
    assert [cell["layer"] for cell in plan["cells"]] == [1, 14] * 3
    pinned = plan["stores"]["pinned"]
    assert pinned["exposed"] == 0 and pinned["first_free_layer"] == 1
    assert plan["stores"]["disk"]["first_free_layer"] is None
    assert plan["stores"]["device"]["figures"]["bandwidth"]["value"] == pytest.approx(4.8e12 * 2.65 / 3.35, rel=2e-3)
    assert plan["stores"]["device"]["device_memory_share"] == pytest.approx(188.83 * GIB / (4 * 141e9), rel=1e-4)
    assert pinned["kv_tokens"] == int(pinned["freed_bytes"] / 3790)
    decode = run_config(str(PLANS / "deepseek-v4.1-flash-decode.yaml"), [])
    assert decode["bytes_per_token"] == plan["bytes_per_token"] and decode["stores"]["pinned"]["exposed"] == 0


def test_published_sizes_of_qwen38() -> None:
    plan = run_config("qwen3.8-flash-next", [])  # a preset by its name
    assert plan["rows"] == 320_001_536 == total_rows(families.get("qwen3.8-flash-next"), 1)
    assert plan["table_bytes"] == 102_400_491_520 and round(plan["table_bytes"] / GIB, 1) == 95.4
    assert plan["bytes_per_token"] == 5 * 1024 and plan["row_bytes"] == 320
    assert plan["stores"]["pinned"]["exposed"] == 0 and plan["step_seconds"] == pytest.approx(26.4e-3)
    fp8 = run_config("qwen3.8-flash-next", ["row_bytes=160"])  # the FP8 release: one scale for the whole table
    assert round(fp8["table_bytes"] / GIB, 1) == 47.7 and fp8["bytes_per_token"] == 2.5 * 1024


def test_the_papers_100b_table() -> None:
    """The paper hides it behind block 1 counted from 0; even in series the transfer is less than its published loss."""
    plan = run_config(str(PLANS / "paper-100b.yaml"), [])
    assert plan["rows"] * 160 == pytest.approx(100e9, rel=1e-4) and round(plan["table_bytes"] / GIB, 1) == 186.3
    assert plan["step_seconds"] == pytest.approx(512 / 9031.62, rel=2e-3)
    pinned = plan["stores"]["pinned"]
    assert pinned["exposed"] == 0 and pinned["first_free_layer"] == 1
    in_series = run_config(str(PLANS / "paper-100b.yaml"), ["launch=layer"])["stores"]["pinned"]
    assert 0 < in_series["overhead"] < 1 - 8858.28 / 9031.62
    at_entry = run_config(str(PLANS / "paper-100b.yaml"), ["layers=[0]"])["stores"]["pinned"]
    assert at_entry["exposed"] == pytest.approx(in_series["exposed"]), "block 0 hides nothing"
    assert plan["stores"]["disk"]["first_free_layer"] is None


def test_profiles_of_the_2_core_machine_give_its_measured_fetches() -> None:
    """262,144 rows of 256 B took 20.2 ms from RAM, 2,000 pages 33.1 ms from the virtual disk."""
    host, _ = resolve("host", StorePlan("host", profile="cpu-host"))
    disk, _ = resolve("disk", StorePlan("disk", profile="cpu-disk"))
    assert fetch_time(host, 262_144, 256)[0] == pytest.approx(20.2e-3, rel=0.01)
    assert fetch_time(disk, 2_000, 256)[0] == pytest.approx(33.1e-3, rel=0.1)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "hardware").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_figure_has_a_source_and_known_ones_are_plausible(path: Path) -> None:
    kind: Any = Machine if path.stem in names_of_profiles("machine") else Link
    profile = load_profile(path.stem, kind)
    assert profile == load_profile(str(path), kind), "a file of one's own is read like a profile"
    figures = {name: value for name, value in vars(profile).items() if isinstance(value, Figure)}
    assert len(figures) == (4 if kind is Machine else 5)
    for name, figure in figures.items():
        assert len(figure.source) > 5 and (figure.value == "unknown") == ((path.stem, name) in UNKNOWN), name
    if isinstance(profile, Machine):
        assert set(profile.links) <= set(TIER) and set(profile.links.values()) <= set(names_of_profiles("link"))
    elif "unknown" not in (profile.bandwidth.value, profile.peak_bandwidth.value):
        assert float(profile.bandwidth.value) < float(profile.peak_bandwidth.value), "reached, so below the peak"


def test_the_machines_that_the_field_compares_are_there() -> None:
    wanted = {"h100", "h200", "b200", "gb200", "b300", "gb300", "vera-rubin", "tpu-v7", "ascend-950dt", "ascend-950pr"}
    assert set(names_of_profiles("machine")) == wanted
    assert {"pcie4-x16", "pcie5-x16", "nvme-pcie4", "nvme-pcie5", "cxl2-x16"} <= set(names_of_profiles("link"))
    for name, gigabytes, terabytes in (("h100", 80, 3.35), ("h200", 141, 4.8)):
        machine = load_profile(name, Machine)
        assert (machine.memory_bytes.value, machine.memory_bandwidth.value) == (gigabytes * 1e9, terabytes * 1e12)
    for name, transfers, lanes in (("pcie4-x16", 16e9, 16), ("pcie5-x16", 32e9, 16), ("nvme-pcie4", 16e9, 4)):
        raw = transfers * lanes * 128 / 130 / 8
        assert load_profile(name, Link).peak_bandwidth.value == pytest.approx(raw, rel=1e-3)


def test_the_documented_profiles_are_the_files() -> None:
    text = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    for kind, lines in (("links", _link_table()), ("machines", _machine_table())):
        assert text.partition(f"<!-- {kind} -->\n")[2].partition(f"<!-- /{kind} -->")[0] == "\n".join(lines) + "\n"


def _said(figure: Figure, unit: float) -> str:
    if figure.value == "unknown":
        return "unknown"
    value = figure.value / unit
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _link_table() -> list[str]:
    lines = ["| link | peak GB/s | reached GB/s | latency us | reads/s | granule B |", "|---|---|---|---|---|---|"]
    for name in names_of_profiles("link"):
        link = load_profile(name, Link)
        rate = "no limit" if link.reads_per_second.value == float("inf") else _said(link.reads_per_second, 1)
        cells = (_said(link.peak_bandwidth, 1e9), _said(link.bandwidth, 1e9), _said(link.latency, 1e-6), rate)
        lines.append(f"| `{name}` | {' | '.join(cells)} | {_said(link.granule, 1)} |")
    return lines


def _machine_table() -> list[str]:
    lines = ["| machine | memory GB | TB/s | bf16 TFLOPS | fp8 TFLOPS | links |", "|---|---|---|---|---|---|"]
    for name in names_of_profiles("machine"):
        machine = load_profile(name, Machine)
        speeds = (_said(figure, 1e12) for figure in (machine.memory_bandwidth, machine.bf16_flops, machine.fp8_flops))
        links = ", ".join(f"{kind}: `{link}`" for kind, link in machine.links.items()) or "none published"
        lines.append(f"| `{name}` | {_said(machine.memory_bytes, 1e9)} | {' | '.join(speeds)} | {links} |")
    return lines


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"machine": "h300"}, r"machine: profile 'h300' is not known \(did you mean 'h200'\?\); choose one of ascend"),
        ({"machine": "pcie5-x16"}, "machine: profile 'pcie5-x16' is a link; choose one of"),
        ({"stores": {"d": {"kind": "disk", "profile": "nvme"}}}, "link: profile 'nvme' is not known"),
        (
            {"stores": {"d": {"kind": "disk", "profile": "nvme-pcie5"}}},
            r"nvme-pcie5: latency is unknown .*give stores.d.lat",
        ),
        (
            {"stores": {"c": {"kind": "cxl", "profile": "cxl2-x16"}}},
            "link cxl2-x16: bandwidth is unknown .*stores.c.band",
        ),
        (
            {"stores": {"p": {"kind": "pinned"}}},
            "stores.p: bandwidth, latency, .*Give the figures, or `profile`: one of",
        ),
        (
            {"stores": {"p": {"kind": "pinned"}}, "machine": "tpu-v7"},
            "machine tpu-v7 names no published link for kind pinned",
        ),
        ({"stores": {"d": {"kind": "device"}}}, "stores.d.bandwidth: unknown without a machine"),
        ({"stores": {"d": {"kind": "device", "bandwidth": 0}}}, "stores.d.bandwidth: 0.0 is too small"),
        ({"stores": {"d": {"kind": "tape"}}}, "stores.d.kind: 'tape' is not known"),
        ({"stores": {"d": None}}, "stores: at least one is needed"),
        ({"layers": [16]}, "layers: 16 is outside of the model's blocks 0..15"),
        ({"blocks": 15}, "layers: 15 is outside of the model's blocks 0..14"),
        ({"family": "toys"}, "family: 'toys' is not known"),
        ({"family": None}, "family, memory: give one of the two"),
        ({"memory": {"hidden_size": 8}}, "family, memory: give one of the two"),
        ({"row_format": "fp4"}, "row_format: 'fp4' is not known"),
        ({"launch": "early"}, "launch: 'early' is not known"),
        ({"tokens": 0}, "tokens: 0 must be at least 1"),
        ({"unique_share": 0}, "unique_share: 0.0 must lie above 0"),
        ({"hit_share": 1.5}, "hit_share: 1.5 must lie in 0..1"),
        ({"kv_bytes_per_token": 0}, "kv_bytes_per_token: 0.0 must be above 0"),
        ({"outside_seconds": -1}, "outside_seconds: -1.0 must not be negative"),
        ({"block": {}}, "block: give seconds .measured., or flops_per_token and efficiency together with a machine"),
        ({"block": {"seconds": [1.0, 2.0]}}, "block.seconds: 2 times for 16 blocks"),
        ({"block": {"seconds": 0}}, "block.seconds: 0.0 must be above 0"),
        ({"block": {"seconds": 1, "flops_per_token": 1}}, "block: seconds and flops_per_token are both given"),
        (
            {"block": {"flops_per_token": 1e9, "efficiency": 2}, "machine": "h100"},
            "block.efficiency: 2.0 must lie above 0",
        ),
        (
            {"block": {"flops_per_token": 1e9, "efficiency": 0.5}, "machine": "ascend-950pr"},
            r"ascend-950pr: bf16_flops is unknown \(not in the announcement\); measure it and give block.seconds",
        ),
        ({"speed": 3}, "speed: unknown key"),
    ],
)
def test_what_is_unknown_or_wrong_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(by_hand(**changes))


def test_an_unknown_figure_can_be_given() -> None:
    given = {"d": {"kind": "disk", "profile": "nvme-pcie5", "latency": 60e-6}}
    figures = make_plan(by_hand(stores=given))["stores"]["d"]["figures"]
    assert figures["latency"] == {"value": 60e-6, "source": "given in the plan"}
    assert figures["reads_per_second"]["value"] == 1.55e6 and "T705" in figures["reads_per_second"]["source"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("title: x\nkind: link\n", "link .*: missing required field"),
        ("title: x\nkind: machine\nmemory_bytes: 3\n", "machine .*memory_bytes: expected a mapping of fields"),
        ("kind: machine\nmemory_bytes: {value: 3}\n", "memory_bytes: missing required field.s. source"),
        ("kind: machine\nmemory_bytes: {value: 3, source: ' '}\n", "source: every figure needs one"),
        ("kind: machine\nmemory_bytes: {value: -3, source: x}\n", "value: -3.0 must be above 0, or unknown"),
        ("kind: machine\nmemory_bytes: {value: many, source: x}\n", "fits none of|is not known"),
    ],
)
def test_profiles_are_read_strictly(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_profile(str(path), Link if "link" in text else Machine)


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_preset_is_plain_data_and_can_be_shown(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = run_config(str(path), ["tokens=128"])
    assert json.loads(json.dumps(_finite(plan), allow_nan=False))["tokens"] == 128
    assert from_dict(PlanConfig, plan["config"]) == from_dict(PlanConfig, json.loads(json.dumps(plan["config"])))
    assert {cell["store"] for cell in plan["cells"]} == set(plan["stores"])
    show(plan)
    shown = capsys.readouterr().out
    assert plan["name"] in shown and "nothing exposed" in shown
    assert all(f" {cell['bytes_per_token']} " in shown for cell in plan["cells"])


def test_overrides_replace_and_remove(tmp_path: Path) -> None:
    changes = ["machine=gb300", "stores.disk=null", "stores.pinned.latency=1e-5", "launch=one_ahead"]
    plan = run_config("deepseek-v4.1-flash", changes)
    assert set(plan["stores"]) == {"device", "pinned"} and plan["machine"] == "NVIDIA GB300"
    assert plan["stores"]["pinned"]["figures"]["latency"]["value"] == 1e-5
    with pytest.raises(ConfigError, match="config .*none.yaml: No such file"):
        run_config(str(tmp_path / "none.yaml"), [])
