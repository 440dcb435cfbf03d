"""Row formats: literal bytes, round trips, error bounds, awkward widths, refusals; stochastic rounding of bf16 rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engram.config import EngramConfig
from engram.stores.base import initial_rows
from engram.stores.formats import FORMATS, LARGEST, get_format, relative_errors, round_stochastic
from engram.strict import ConfigError

torch.set_num_threads(1)
WIDTHS = (1, 3, 31, 33, 64, 160, 256, 1280)
NAMES = tuple(FORMATS)


def normal(rows: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def hexed(name: str, values: list[float]) -> str:
    return bytes(get_format(name, len(values)).encode(torch.tensor([values]))[0].tolist()).hex(" ")


def unhexed(name: str, width: int, text: str) -> list[float]:
    row = torch.tensor([list(bytes.fromhex(text))], dtype=torch.uint8)
    return list(get_format(name, width).decode(row)[0].tolist())


def test_formats_are_those_of_the_configuration() -> None:
    for name in NAMES:
        assert EngramConfig(hidden_size=8, row_dtype=name).row_dtype == name  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="row_dtype: 'fp4' is not known; choose one of 'fp32'"):
        get_format("fp4", 8)
    with pytest.raises(ConfigError, match="head_dim: 0 must be at least 1"):
        get_format("bf16", 0)


def test_row_bytes() -> None:
    at_256 = {name: get_format(name, 256).row_bytes for name in NAMES}
    assert at_256 == {"fp32": 1024, "bf16": 512, "fp8_e4m3": 264, "int8": 260, "lut3": 105}
    at_160 = {name: get_format(name, 160).row_bytes for name in NAMES}
    assert at_160 == {"fp32": 640, "bf16": 320, "fp8_e4m3": 165, "int8": 164, "lut3": 69}
    for width in (160, 256):  # 3 + 72 / width bits a value
        assert get_format("lut3", width).row_bytes * 8 == 3 * width + 72


@pytest.mark.parametrize(
    ("name", "values", "row"),
    [
        ("fp32", [1.0, -2.0], "00 00 80 3f 00 00 00 c0"),
        # ties to even: 1 + 2^-8 -> 1, 1 + 3 * 2^-8 -> 1 + 2^-6
        ("bf16", [1 + 2.0**-8, 1 + 3 * 2.0**-8, -0.5], "80 3f 82 3f 00 bf"),
        # largest 1 = 256 * 2^-8: scale byte 119; codes of 256, -128, 0, 16
        ("fp8_e4m3", [1.0, -0.5, 0.0, 0.0625], "78 f0 00 58 77"),
        # scale 1.0; 1.5 is a tie and goes to 2
        ("int8", [127.0, -64.0, 1.5], "7f c0 02 00 00 80 3f"),
        # largest 1 = 64 * 2^-6: scale byte 121; levels -32, 0, 64; codes 2, 0, 1 = 2 + 0 * 8 + 1 * 64
        ("lut3", [1.0, -0.5, 0.0], "e0 00 40 40 40 40 40 40 79 42 00"),
    ],
)
def test_literal_bytes(name: str, values: list[float], row: str) -> None:
    assert hexed(name, values) == row
    back = unhexed(name, len(values), row)
    exact = {"bf16": [1.0, 1 + 2.0**-6, -0.5], "int8": [127.0, -64.0, 2.0]}
    assert back == exact.get(name, values)


def test_codes_of_three_bits_lie_densely() -> None:
    row = hexed("lut3", [float(v) for v in (-64, -48, -32, -16, 16, 32, 48, 64)])
    assert row == "c0 d0 e0 f0 10 20 30 40 7f 88 c6 fa"  # codes 0..7 in 24 bits: 0xfac688
    assert len(bytes.fromhex(row)) == get_format("lut3", 8).row_bytes
    for width in range(1, 20):
        values = torch.arange(width, dtype=torch.float32).remainder(8).unsqueeze(0) * 16 - 56
        rows = get_format("lut3", width)
        assert torch.equal(rows.decode(rows.encode(values)), values)


def test_fp8_rows_of_deepseek_v41() -> None:
    """256 codes, then 8 scales; every code under every scale, against torch's own types."""
    rows = get_format("fp8_e4m3", 256)
    scales = torch.arange(256, dtype=torch.uint8)
    row = torch.cat([scales.expand(256, 256), scales.unsqueeze(1).expand(256, 8)], dim=1)  # row s: all codes, scale s
    codes_C = scales.view(torch.float8_e4m3fn).to(torch.float32)
    scale_S = scales.view(torch.float8_e8m0fnu).to(torch.float32)
    wanted = codes_C * scale_S.unsqueeze(1)
    torch.testing.assert_close(rows.decode(row), wanted, rtol=0, atol=0, equal_nan=True)
    # one literal: block 3 has scale 2^(120 - 127), code 0x7e is 448; the other scale bytes are 127 (1.0)
    text = "00 " * 96 + "7e " * 32 + "b8 " * 128 + "7f 7f 7f 78 7f 7f 7f 7f"
    assert unhexed("fp8_e4m3", 256, text) == [0.0] * 96 + [3.5] * 32 + [-1.0] * 128


def test_scale_bytes_0_and_255() -> None:
    rows = get_format("fp8_e4m3", 2)
    assert unhexed("fp8_e4m3", 2, "38 b8 00") == [2.0**-127, -(2.0**-127)]  # not 0.0
    assert unhexed("fp8_e4m3", 2, "01 00 00") == [2.0**-136, 0.0]
    bad = rows.decode(torch.tensor([[0x38, 0, 255], [0x38, 0, 127], [0x7F, 0, 127]], dtype=torch.uint8))
    assert bad.isnan().tolist() == [[True, True], [False, False], [True, False]]
    assert rows.broken_rows(torch.tensor([[0, 0, 255], [1, 2, 127], [0, 0x7F, 1]], dtype=torch.uint8)).tolist() == [
        0,
        2,
    ]
    assert unhexed("lut3", 1, "01 01 01 01 01 01 01 01 00 00") == [2.0**-127]
    assert get_format("lut3", 1).broken_rows(torch.full((2, 10), 255, dtype=torch.uint8)).tolist() == [0, 1]


def test_fp8_scales_waste_nothing_and_saturate_nothing() -> None:
    """A block's largest code lies in 240..448: values up to 464 round to 448, larger ones take the next scale."""
    rows = get_format("fp8_e4m3", 1)
    at = {
        largest: rows.encode(torch.tensor([[largest]]))[0].tolist() for largest in (448.0, 464.0, 464.1, 232.0, 232.1)
    }
    assert at == {448.0: [0x7E, 127], 464.0: [0x7E, 127], 464.1: [0x77, 128], 232.0: [0x7E, 126], 232.1: [0x77, 127]}
    written = rows.encode(normal(4000, 1, seed=3) * torch.logspace(-30, 30, 4000).unsqueeze(1))
    assert int((written[:, 0] & 127).min()) >= 0x77 and int((written[:, 0] & 127).max()) <= 0x7E
    assert int(written[:, 1].min()) >= 1 and int(written[:, 1].max()) <= 247
    edge = rows.encode(torch.tensor([[LARGEST], [2.0**-126], [2.0**-137], [-(2.0**-137)]]))
    assert edge.tolist() == [[0x78, 246], [0x38, 1], [0, 0], [0x80, 0]]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_round_trip_is_canonical_and_within_bounds(name: str, width: int) -> None:
    rows = get_format(name, width)
    values = normal(97, width, seed=width) * torch.logspace(-3, 3, 97).unsqueeze(1)
    written = rows.encode(values)
    assert written.dtype == torch.uint8 and list(written.shape) == [97, rows.row_bytes]
    back = rows.decode(written)
    assert back.dtype == torch.float32 and torch.equal(rows.encode(back), written)
    error = (back - values).abs()
    largest = values.abs().amax(dim=1, keepdim=True)
    bounds = {
        "fp32": torch.zeros(()),
        "bf16": values.abs() * 2**-8,
        "fp8_e4m3": torch.maximum(values.abs() * 2**-4, largest * 2**-10 / 232),  # half a step of codes, of subnormals
        "int8": largest / 253.9,
        "lut3": largest,  # no useful bound on single values; the RMS below is
    }
    assert bool((error <= bounds[name]).all())
    typical = {"fp32": 0.0, "bf16": 0.0022, "fp8_e4m3": 0.032, "int8": 0.0085, "lut3": 0.19}
    assert float(relative_errors(values, rows).double().square().mean().sqrt()) <= typical[name]


@pytest.mark.parametrize("name", NAMES)
def test_extreme_rows_stay_finite_and_canonical(name: str) -> None:
    for width in (1, 9, 33):
        rows = get_format(name, width)
        values = normal(40, width, seed=5).clamp(-4, 4) / 4
        scales = torch.tensor([2.0**k for k in (-149, -140, -133, -127, -126, -120, -60, 0, 60, 127)]).repeat(4)
        values = values * scales.unsqueeze(1)
        values[7:] = values[7:] * (normal(33, width, seed=6) > 0)  # zeros of both signs, few distinct values
        back = rows.decode(rows.encode(values))
        assert bool(back.isfinite().all()) and torch.equal(rows.encode(back), rows.encode(values))


@pytest.mark.parametrize("name", NAMES)
def test_zero_rows_are_zero_bytes_and_no_rows_are_no_bytes(name: str) -> None:
    for width in (1, 33, 256):
        rows = get_format(name, width)
        assert not rows.encode(torch.zeros(3, width)).any()
        assert torch.equal(rows.decode(torch.zeros(3, rows.row_bytes, dtype=torch.uint8)), torch.zeros(3, width))
        assert list(rows.encode(torch.zeros(0, width)).shape) == [0, rows.row_bytes]
        assert list(rows.decode(torch.zeros(0, rows.row_bytes, dtype=torch.uint8)).shape) == [0, width]


@pytest.mark.parametrize("name", NAMES)
def test_one_huge_outlier_harms_no_more_than_its_scale(name: str) -> None:
    rows = get_format(name, 64)
    values = normal(8, 64, seed=2)
    values[3, 40] = 1e30
    back = rows.decode(rows.encode(values))
    assert abs(float(back[3, 40]) / 1e30 - 1) < 2**-4
    calm = torch.ones(8, dtype=torch.bool)
    calm[3] = False
    assert torch.equal(back[calm], rows.decode(rows.encode(values[calm]))), "rows share nothing"
    if name == "fp8_e4m3":  # the scale is the block's: the other 32 values keep their precision
        assert bool(((back[3, :32] - values[3, :32]).abs() <= values[3, :32].abs() / 16 + 2**-18).all())
    if name in ("int8", "lut3"):  # the scale is the row's
        assert int((back[3] != 0).sum()) == 1
    mild = normal(1, 64, seed=2)
    mild[0, 40] = 20.0
    assert float(relative_errors(mild, rows)[0]) < 0.12


@pytest.mark.parametrize("name", NAMES)
def test_bad_values_are_refused_with_their_row(name: str) -> None:
    rows = get_format(name, 33)
    for bad in (float("nan"), float("inf"), float("-inf")):
        values = normal(5, 33)
        values[4, 32] = bad
        with pytest.raises(ValueError, match=f"{name}: row 4 holds {bad} in column 32"):
            rows.encode(values)
        with pytest.raises(ValueError, match="row 904 "):
            rows.encode(values, ids_U=torch.arange(900, 905))
    values = normal(2, 33)
    values[1, 0] = LARGEST * 1.5
    if name == "fp32":
        assert torch.equal(rows.decode(rows.encode(values)), values)
    else:
        with pytest.raises(
            ValueError, match="row 1 holds .*e\\+38 in column 0; rows must be finite and at most 1.70141"
        ):
            rows.encode(values)
    for wrong in (normal(2, 32), normal(1, 33)[0], torch.ones(2, 33, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"expected floats of shape \[rows, 33\]"):
            rows.encode(wrong)
    for wrong in (torch.zeros(2, rows.row_bytes + 1, dtype=torch.uint8), torch.zeros(2, rows.row_bytes)):
        with pytest.raises(ValueError, match=f"expected uint8 of shape \\[rows, {rows.row_bytes}\\]"):
            rows.decode(wrong)


@pytest.mark.parametrize("name", NAMES)
def test_memory_layout_does_not_matter(name: str) -> None:
    rows = get_format(name, 31)
    values = normal(7, 31)
    written = rows.encode(values)
    assert torch.equal(rows.encode(values.t().contiguous().t()), written)
    assert torch.equal(rows.encode(values.double()), written)
    buffer = torch.zeros(7 * (rows.row_bytes + 3) + 1, dtype=torch.uint8)  # an odd address, rows with gaps
    strided = buffer[1:].view(7, rows.row_bytes + 3)[:, : rows.row_bytes]
    strided.copy_(written)
    back = rows.decode(written)
    assert torch.equal(rows.decode(strided), back) and torch.equal(rows.decode(strided[:1]), back[:1])
    out = torch.full((7, 31), torch.nan)
    assert rows.decode(written, out=out) is out and torch.equal(out, back)
    written.zero_()
    assert torch.equal(rows.decode(strided), back) and torch.equal(out, back), "values are no view of the bytes"


def test_lut3_keeps_eight_distinct_values_and_is_near_the_optimum() -> None:
    rows = get_format("lut3", 100)
    few = torch.tensor([-96.0, -5.0, -1.0, 0.0, 2.0, 3.0, 50.0, 127.0])[torch.randint(0, 8, (6, 100))]
    assert torch.equal(rows.decode(rows.encode(few)), few)
    values = normal(12, 100, seed=4)
    error = (rows.decode(rows.encode(values)) - values).double().square().sum(dim=1)
    best = torch.tensor([_optimal(row) for row in values.double().sort(dim=1).values])
    ratio = float((error.sum() / best.sum()).sqrt())
    assert 1.0 <= ratio < 1.06, "more than the optimum would be a wrong optimum"


def _optimal(sorted_W: Tensor, levels: int = 8) -> float:
    """Least squared error of eight levels, by dynamic programming over all ways to cut a sorted row."""
    width = len(sorted_W)
    total, square = (torch.nn.functional.pad(x.cumsum(0), (1, 0)) for x in (sorted_W, sorted_W.square()))
    least = torch.full((width + 1,), torch.inf, dtype=torch.float64)
    least[0] = 0
    for _ in range(levels):
        new = torch.full_like(least, torch.inf)
        for stop in range(1, width + 1):
            start = torch.arange(stop)
            cost = square[stop] - square[start] - (total[stop] - total[start]).square() / (stop - start)
            new[stop] = (least[start] + cost).min()
        least = new
    return float(least[width])


def test_documented_errors_are_measured() -> None:
    """The command of docs/formats.md prints the table that stands below it."""
    text = (Path(__file__).parents[1] / "docs" / "formats.md").read_text(encoding="utf-8")
    command = re.search(r"<!-- errors -->\n```python\n(.*?)```", text, flags=re.S)
    table = text.partition("<!-- measured -->\n")[2].partition("<!-- /measured -->")[0]
    assert command is not None
    printed: list[str] = []
    exec(compile(command[1], "docs/formats.md", "exec"), {"print": lambda *words: printed.append(" ".join(words))})
    rows = [line for line in table.splitlines() if line.startswith("| ") and "|---" not in line]
    assert len(printed) == len(NAMES) and [line.split("|")[1].strip() for line in rows[1:]] == list(NAMES)
    for line, documented in zip(printed, rows[1:], strict=True):
        new, old = ([float(cell) for cell in x.split("|")[2:-1]] for x in (line, documented))
        assert new == pytest.approx(old, rel=0.02, abs=1e-9)


def test_stochastic_rounding_is_a_function_of_row_column_and_step() -> None:
    values, ids = normal(50, 33), torch.arange(50) * 7_000_000_001
    first = round_stochastic(values, 11, ids, 3)
    assert first.dtype == torch.bfloat16 and torch.equal(first, round_stochastic(values, 11, ids, 3))
    order = torch.randperm(50)
    assert torch.equal(round_stochastic(values[order], 11, ids[order], 3), first[order])
    assert torch.equal(round_stochastic(values[:, :9].contiguous(), 11, ids, 3), first[:, :9]), "width does not matter"
    for other in (
        round_stochastic(values, 12, ids, 3),
        round_stochastic(values, 11, ids, 4),
        round_stochastic(values, 11, ids + 1, 3),
    ):
        share = float((other != first).double().mean())
        assert 0.2 < share < 0.5  # independent rounding of uniform remainders differs in 1/3 of the values
    same = values[:1].expand(50, 33).contiguous()
    assert len(round_stochastic(same, 11, ids, 3).float().unique(dim=0)) == 50, "rows draw their own bits"


def test_stochastic_rounding_of_literal_values() -> None:
    """Bits computed from splitmix64 in Python integers."""

    def mix(x: int) -> int:
        mask = 2**64 - 1
        x = ((x & mask) ^ ((x & mask) >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    gamma, seed, row, step = 0x9E3779B97F4A7C15, 2**62 + 5, 2**40 + 3, 17
    key = mix(mix(mix(seed + gamma) + (step + 1) * gamma) + (row + 1) * gamma)
    bits = [(mix(key + (column // 4 + 1) * gamma) >> 16 * (column % 4)) & 0xFFFF for column in range(6)]
    for offset in (0, 1):  # value 1 + (2^16 - bit) / 2^23 is the least that the bit rounds up
        values = torch.tensor([[1 + (2**16 - bit - offset) / 2**23 for bit in bits]], dtype=torch.float32)
        rounded = round_stochastic(values, seed, torch.tensor([row]), step)
        assert rounded.float().tolist() == [[1.0 if offset else 1 + 2.0**-7] * 6]


def test_stochastic_rounding_has_the_value_as_its_mean() -> None:
    values = torch.tensor([[1 + share / 128 for share in (0.0, 0.1, 0.25, 0.5, 0.9)], [-0.3, 0.7, -1e-20, 1e20, 0.0]])
    steps = 4000
    total = torch.zeros(2, 5, dtype=torch.float64)
    for step in range(steps):
        total += round_stochastic(values, 1, torch.tensor([5, 6]), step).double()
    ulp = 2.0 ** (values.abs().clamp(min=1e-38).log2().floor() - 7)
    deviation = ((total / steps - values) / ulp).abs()  # standard error at most 0.5 / sqrt(4000) = 0.008 of a step
    assert float(deviation.max()) < 0.032
    exact = values.to(torch.bfloat16)
    assert torch.equal(round_stochastic(exact.float(), 1, torch.tensor([5, 6]), 9), exact), "bf16 numbers stay"


def test_rows_that_never_move() -> None:
    """Updates of 1/200 of a rounding step: with nearest rounding every row stands still, with stochastic none does."""
    ids = torch.arange(200)
    start = initial_rows(3, ids, 16, std=0.02).to(torch.bfloat16)
    sign = torch.where(normal(200, 16, seed=9) > 0, 1.0, -1.0)
    update = 2.0 ** (start.float().abs().log2().floor() - 7) / 200 * sign
    nearest, stochastic = start.clone(), start.clone()
    for step in range(100):
        nearest = (nearest.float() + update).to(torch.bfloat16)
        stochastic = round_stochastic(stochastic.float() + update, 0, ids, step)
    assert int((nearest == start).all(dim=1).sum()) == 200
    assert int((stochastic == start).all(dim=1).sum()) == 0
    travelled = ((stochastic.float() - start.float()) * sign).double().sum() / (100 * update.abs()).double().sum()
    assert 0.85 < float(travelled) < 1.15, "and on average rows go as far as they were told"


def test_stochastic_rounding_refuses_what_it_cannot_round() -> None:
    values = normal(3, 4)
    values[2, 1] = float("nan")
    with pytest.raises(ValueError, match="round_stochastic: row 12 holds nan in column 1"):
        round_stochastic(values, 0, torch.tensor([10, 11, 12]), 0)
    with pytest.raises(ValueError, match=r"ids \[2\]; expected fp32"):
        round_stochastic(normal(3, 4), 0, torch.tensor([1, 2]), 0)
    assert list(round_stochastic(torch.zeros(0, 4), 0, torch.zeros(0, dtype=torch.int64), 0).shape) == [0, 4]
