"""Gathers through the kernel: the very bits of plain torch, for every format, width and place."""

from __future__ import annotations

import mmap

import pytest
import torch
from torch import Tensor

from engram import families
from engram.hashing import NgramHash
from engram.kernels import gather, operators, reference_rows
from engram.kernels.reference_rows import FP8, INT8, LUT3, PLAIN
from engram.stores.formats import get_format

NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux; memory that is only promised
WIDTHS = (1, 3, 31, 33, 64, 160, 256, 1280, 2048)
FORMATS = {"fp32": PLAIN, "bf16": PLAIN, "fp8_e4m3": FP8, "int8": INT8, "lut3": LUT3}


def _table(name: str, width: int, rows: int, device: torch.device) -> Tensor:
    values = torch.randn(rows, width, generator=torch.Generator().manual_seed(width))
    if FORMATS[name] == PLAIN:
        return values.to({"fp32": torch.float32, "bf16": torch.bfloat16}[name]).to(device)
    return get_format(name, width).encode(values).to(device)


def _same_bits(ours: Tensor, judge: Tensor) -> None:
    assert torch.equal(ours.isnan(), judge.isnan())
    assert torch.equal(ours.nan_to_num(0), judge.nan_to_num(0))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_the_bits_of_plain_torch(name: str, width: int, device: torch.device) -> None:
    table, kind = _table(name, width, 50, device), FORMATS[name]
    ids = torch.randint(-1, 52, (77,), generator=torch.Generator().manual_seed(0)).to(device)
    ids[:3] = torch.tensor([-1, 50, 2**40])  # not held here, and past the end
    ours, judge = gather.gather_rows(table, ids, kind, width), reference_rows.gather_rows(table, ids, kind, width)
    _same_bits(ours, judge)
    assert bool(ours[0].eq(0).all()) and bool(ours[1:3].isnan().all()) and ours.dtype == torch.float32
    out = torch.empty(77, width, dtype=torch.bfloat16, device=device)
    assert gather.gather_rows(table, ids, kind, width, out=out) is out
    held = ~judge.isnan()
    torch.testing.assert_close(out.float()[held], judge[held], rtol=2**-7, atol=0)
    if name == "bf16":
        assert torch.equal(out.float()[held], judge[held])


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's word on values beyond fp32
@pytest.mark.parametrize("name", ["fp8_e4m3", "lut3"])
def test_every_byte_of_a_code_and_of_a_scale(name: str, device: torch.device) -> None:
    """All 256 codes under all 256 scale bytes, 0 (2^-127, subnormal results) and 255 (NaN) among them."""
    width, rows = 256, 256
    form = get_format(name, width)
    table = torch.arange(256, dtype=torch.uint8).repeat(rows, 2)[:, : form.row_bytes].contiguous()
    first = form.row_bytes - form.row_bytes // 33 if name == "fp8_e4m3" else 8
    last = form.row_bytes if name == "fp8_e4m3" else 9
    table[:, first:last] = torch.arange(rows, dtype=torch.uint8).unsqueeze(1)
    ids = torch.arange(rows, device=device)
    table = table.to(device)
    _same_bits(
        gather.gather_rows(table, ids, FORMATS[name], width),
        reference_rows.gather_rows(table, ids, FORMATS[name], width),
    )


@pytest.mark.parametrize("ids", [[], [3], [5] * 1000, [n % 9 for n in range(9_000)]])
@pytest.mark.parametrize("programs", [None, 1, 3])
def test_every_line_is_written_by_many_programs_and_by_few(
    ids: list[int], programs: int | None, device: torch.device
) -> None:
    table = _table("fp32", 33, 9, device)
    numbers = torch.tensor(ids, dtype=torch.int64, device=device)
    out = torch.full((len(ids), 33), float("nan"), device=device)
    gather.gather_rows(table, numbers, PLAIN, 33, out=out, programs=programs)
    assert torch.equal(out, table[numbers])


def test_addresses_pass_2_to_the_31(device: torch.device) -> None:
    """A table of 2^33 elements that is real only where it is touched: rows beyond 32-bit element and byte numbers."""
    if device.type != "cpu":
        pytest.skip("a virtual table needs the host's memory")
    rows, width = 2**27, 64
    block = mmap.mmap(-1, 2 * rows * width, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    table = torch.frombuffer(block, dtype=torch.bfloat16, count=rows * width).view(rows, width)
    far = torch.tensor([0, 2**25 - 1, 2**25, 2**26 + 12345, rows - 1])
    values = torch.arange(5 * width, dtype=torch.float32).view(5, width).bfloat16()
    gather.put_rows(table, far, values)
    assert torch.equal(table[far], values)
    assert torch.equal(gather.gather_rows(table, far, PLAIN, width), values.float())
    assert int(table[1].count_nonzero()) == 0


@pytest.mark.parametrize("name", FORMATS)
def test_hashing_and_gathering_at_once(name: str, device: torch.device) -> None:
    cfg = families.get("toy")
    module = NgramHash(cfg, 15).to(device)
    width, table = 31, _table(name, 31, module.total_rows, device)
    ids = torch.randint(-1, 1001, (2, 40), generator=torch.Generator().manual_seed(0)).to(device)
    pad = torch.rand(2, 40, generator=torch.Generator().manual_seed(1)).to(device) < 0.2
    memory, rows = gather.hash_gather(ids, module.constants, table, FORMATS[name], width, pad_BT=pad, skip=3)
    judge = reference_rows.hash_rows(ids, module.constants, pad_BT=pad, skip=3)[0]
    assert torch.equal(rows, judge) and memory.shape == (2, 37, cfg.columns * width)
    _same_bits(memory.view(-1, width), reference_rows.gather_rows(table, judge.view(-1), FORMATS[name], width))
    none, _ = gather.hash_gather(ids[:, :0], module.constants, table, FORMATS[name], width)
    assert none.shape == (2, 0, cfg.columns * width)


def test_the_fused_kernel_reads_golden_rows(device: torch.device) -> None:
    """Literal row numbers of DeepSeek's demo, through the kernel that hashes and gathers at once."""
    golden = families.golden()["toy"]
    cfg = families.get("toy")
    for layer, expected in golden["by_layer"].items():
        module = NgramHash(cfg, int(layer)).to(device)
        table = torch.arange(module.total_rows, dtype=torch.float32, device=device).unsqueeze(1)
        ids = torch.tensor([golden["ids"]], device=device)
        memory, rows = gather.hash_gather(ids, module.constants, table, PLAIN, 1)
        assert rows[0].tolist() == expected["rows"]
        assert memory[0].tolist() == expected["rows"]  # row r holds r


def test_tables_that_do_not_fit_are_refused(device: torch.device) -> None:
    ids = torch.tensor([0], device=device)
    for table, kind, width in (
        (torch.zeros(4, 8, device=device), PLAIN, 9),
        (torch.zeros(4, 8, dtype=torch.int32, device=device), PLAIN, 8),
        (torch.zeros(4, 8, dtype=torch.uint8, device=device), FP8, 8),
        (torch.zeros(4, 16, device=device)[:, ::2], PLAIN, 8),
    ):
        with pytest.raises(ValueError, match=f"rows of {width} values"):
            gather.gather_rows(table, ids, kind, width)
    constants = NgramHash(families.get("toy"), 1).to(device).constants
    both = reference_rows.stack([constants, constants])
    with pytest.raises(ValueError, match="2 layers"):
        gather.hash_gather(ids[None], both, torch.zeros(4, 8, device=device), PLAIN, 8)


def test_tiles_waste_few_lanes_and_shrink_for_few_look_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "INTERPRETED", False)
    for width, block in ((64, 64), (160, 32), (256, 256), (1280, 256), (2048, 1024)):
        tile = gather.tile(width, 2, 1 << 20, 528)
        assert tile.block == block and 1024 <= tile.rows * block <= 4096
    assert gather.tile(64, 2, 100, 528).rows == 2
    assert gather.tile(33, 4, 1 << 20, 528).rows * gather.tile(33, 4, 1 << 20, 528).block <= 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_written_inside_the_table_only(dtype: torch.dtype, device: torch.device) -> None:
    memory = torch.zeros(12, 33, dtype=dtype, device=device)
    table = memory[2:10]  # what lies before and after it belongs to others
    values = torch.randn(6, 33).to(device, dtype).float()  # the interpreter rounds to bf16 as no GPU does
    gather.put_rows(table, torch.tensor([0, 7, -1, -2, 8, 9], device=device), values)
    assert torch.equal(table[0], values[0].to(dtype)) and torch.equal(table[7], values[1].to(dtype))
    assert not memory[:2].any() and not memory[10:].any() and not table[1:7].any()
    with pytest.raises(ValueError, match="do not fit the table"):
        gather.put_rows(table, torch.tensor([0], device=device), values[:1, :32])


def test_more_operators_pass_torchs_own_checks(device: torch.device) -> None:
    ids, table = torch.tensor([3, 0], device=device), torch.zeros(5, 6, device=device)
    torch.library.opcheck(operators.put_rows_op, (table, ids, torch.randn(2, 6).to(device)))
    module = NgramHash(families.get("toy"), 1).to(device)
    table = _table("fp32", 7, module.total_rows, device)
    tokens, pad = torch.randint(0, 99, (2, 9)).to(device), torch.zeros(2, 9, dtype=torch.bool, device=device)
    flat = operators.spelled_out(module.constants)
    given = (tokens, *flat, table, PLAIN, 7, pad, None, None, 1)
    torch.library.opcheck(operators.hash_gather_op, given)
    memory, rows = operators.hash_gather_op(*given)
    judge = reference_rows.hash_rows(tokens, module.constants, pad, skip=1)[0]
    assert torch.equal(rows, judge) and torch.equal(memory, table[judge].flatten(-2))


@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_the_operator_passes_torchs_own_checks(name: str, device: torch.device) -> None:
    table = _table(name, 8, 10, device)
    ids = torch.tensor([0, 9, 4], device=device)
    torch.library.opcheck(operators.gather_rows_op, (table, ids, FORMATS[name], 8, True))
