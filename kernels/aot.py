"""Compile every kernel for several GPUs with none present, and look at the machine code.

    engram bench --compile-only            # a representative set; --full for every width, format and rule

Reported per kernel, variant and target: registers a thread, spills (stack and local memory), shared memory, how wide
global loads and stores are, and instructions. A variant fails when it spills, when a row that is a multiple of 16 bytes
is not read and written 16 bytes at a time, or when it needs more registers than its limit: 40 for a plain gather of
rows in one block (so that twelve programs of four warps fit a processor), 72 where rows are decoded, hashed, or read in
several blocks of columns (160 = 5 x 32: 46 to 56).

NVIDIA: registers from the disassembler in the Triton wheel. AMD: from the assembly's metadata.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from engram.kernels import conv, gate, gather, rows, scatter
from engram.kernels.launch import INSTALLED, INTERPRETED, NO_FUSION, triton
from engram.kernels.reference_rows import FP8, INT8, LUT3, PLAIN, RULES

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
GATHER_REGISTERS, FUSED_REGISTERS = 40, 72
MANY = 1 << 20  # look-ups: enough that tiles have their full size
PROGRAMS = 4 * 132
FORMATS = {"fp32": (PLAIN, "*fp32", 4), "bf16": (PLAIN, "*bf16", 2)}
FORMATS |= {"fp8": (FP8, "*u8", 1), "int8": (INT8, "*u8", 1), "lut3": (LUT3, "*u8", 1)}
WIDTHS = (1, 3, 31, 33, 64, 160, 256, 1280, 2048)


@dataclass(frozen=True)
class Variant:
    """One kernel with types and compile-time constants.

    types      argument -> Triton type; the other arguments are compile-time constants, in `constants`.
    registers  most registers a thread may use on NVIDIA, or None.
    wide       whether rows are read and written 16 bytes at a time ("both"), only written so ("stores"), or neither.
    """

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    warps: int = 4
    registers: int | None = None
    wide: str = ""
    aligned: tuple[str, ...] = field(default=())
    at_most: int | None = None  # registers that ptxas is held to

    def hints(self) -> list[str]:
        """Arguments that are known to be multiples of 16: every pointer, unless `aligned` names them."""
        return list(self.aligned) or [name for name, kind in self.types.items() if kind.startswith("*")]


HASHING = dict.fromkeys(("ids", "class_of", "segment", "eos", "multipliers", "sizes", "reciprocals", "offsets"), "*i64")
HASHING |= {"pad": "*u8", "dead": "*u8"}
HASHING |= dict.fromkeys(("length", "skip", "limit", "filler", "longest", "total"), "i32")
SWITCHES = {"HAS_MAP": False, "HAS_PAD": False, "HAS_DEAD": False, "HAS_SEGMENT": False, "NARROW": False, "E": 0}
RULES_OF = {
    "demo": {"C": 16, "N": 3, "HAS_MAP": True, "XOR": True, "RECIPROCAL": True},
    "v4.1": {"C": 24, "N": 4, "HAS_MAP": True, "HAS_DEAD": True, "HAS_SEGMENT": True, "XOR": True, "RECIPROCAL": True},
    "qwen3.8": {"C": 16, "N": 3, "E": 1, "HAS_PAD": True, "HAS_SEGMENT": True, "XOR": True, "RECIPROCAL": True},
    "longcat": {"C": 12, "N": 4, "E": 1, "XOR": False, "RECIPROCAL": True},
    "maxtext": {"C": 16, "N": 3, "HAS_MAP": True, "NARROW": True, "XOR": True, "RECIPROCAL": True},
    "blt": {"C": 6, "N": 8, "XOR": False, "RECIPROCAL": False},
}
"""What is compiled into the hashing kernels for each family (engram/families.py)."""


def hashing_variants() -> Iterator[Variant]:
    """Row numbers alone, for every family."""
    types = {"out": "*i64", "masked": "*i64", **HASHING, "per_group": "i32"}
    for family, switches in RULES_OF.items():
        constants = {**SWITCHES, **switches, "COUNT": True, "BLOCK": rows.BLOCK}
        yield Variant(f"rows {family}", rows.hash_rows_kernel, types, constants, rows.WARPS, GATHER_REGISTERS)


def _tile(name: str, width: int, out: str) -> dict[str, Any]:
    kind, _, item = FORMATS[name]
    tile = gather.tile(width, item, MANY, PROGRAMS, narrow=kind == LUT3)
    return {"W": width, "ROW": gather.row_bytes(kind, width), "ROWS": tile.rows, "BLOCK_W": tile.block, "KIND": kind}


def _wide(name: str, width: int, out: str) -> str:
    """Which accesses of a row can be 16 bytes wide: stored rows of other formats are no multiple of 16 bytes."""
    kind, _, item = FORMATS[name]
    if kind == LUT3:  # small tiles: see gather.tile
        return ""
    reads = kind == PLAIN and width * item % 16 == 0
    writes = width * (2 if out == "*bf16" else 4) % 16 == 0
    return "both" if reads and writes else "stores" if writes else ""


def gather_variants(names: Sequence[str], widths: Sequence[int], outs: Sequence[str] = ("*fp32",)) -> Iterator[Variant]:
    """Plain gathers."""
    for name in names:
        for width in widths:
            for out in outs:
                types = {"table": FORMATS[name][1], "ids": "*i64", "out": out}
                types |= dict.fromkeys(("held", "total", "width"), "i32")
                one_block = gather.tile(width, FORMATS[name][2], MANY, PROGRAMS).block >= width
                limit = GATHER_REGISTERS if FORMATS[name][0] == PLAIN and one_block else FUSED_REGISTERS
                yield Variant(
                    f"gather {name} {width} -> {out[1:]}",
                    gather.gather_kernel,
                    types,
                    _tile(name, width, out),
                    gather.WARPS,
                    limit,
                    _wide(name, width, out),
                )


def fused_variants(cases: Sequence[tuple[str, str, int]]) -> Iterator[Variant]:
    """Hash and gather at once: (family, format, width)."""
    for family, name, width in cases:
        types = {"table": FORMATS[name][1], "rows_out": "*i64", "out": "*fp32", **HASHING}
        types |= {"held": "i32", "width": "i32"}
        constants = {**SWITCHES, **RULES_OF[family], **_tile(name, width, "*fp32")}
        yield Variant(
            f"hash+gather {family} {name} {width}",
            gather.hash_gather_kernel,
            types,
            constants,
            gather.WARPS,
            FUSED_REGISTERS,
            _wide(name, width, "*fp32"),
            at_most=gather.FUSED_REGISTERS,
        )


def put_variants(widths: Sequence[int]) -> Iterator[Variant]:
    """Rows written over others."""
    for width in widths:
        for table in ("*fp32", "*bf16"):
            item = 4 if table == "*fp32" else 2
            tile = gather.tile(width, item, MANY, PROGRAMS)
            types = {"table": table, "ids": "*i64", "values": "*fp32"}
            types |= dict.fromkeys(("held", "count", "width"), "i32")
            constants = {"W": width, "ROWS": tile.rows, "BLOCK_W": tile.block}
            wide = "both" if width * item % 16 == 0 else ""
            yield Variant(f"put {table[1:]} {width}", gather.put_kernel, types, constants, gather.WARPS, None, wide)


def update_variants(rules: Sequence[str], widths: Sequence[int], tables: Sequence[str]) -> Iterator[Variant]:
    """Sums of duplicates ("sum") and the row rules, from look-ups and from sums."""
    numbers = {**dict.fromkeys(("lr", "beta2", "eps", "keep"), "fp32"), "key": "i64"}
    numbers |= dict.fromkeys(("rows", "count", "total"), "i32")
    for rule in rules:
        for width in widths:
            for table in tables if rule != "sum" else ("*fp32",):
                for summed in (False, True) if rule != "sum" else (False,):
                    how = scatter.layout(width)
                    types = {"table": table, "v": "*fp32", "ids": "*i64", "order": "*i64", "starts": "*i64"}
                    types |= {"grads": "*fp32", "partial": "*fp32", **numbers}
                    constants = {
                        "W": width,
                        "BLOCK_W": how["BLOCK_W"],
                        "ROWS": 1 if summed else scatter.ROWS,
                        "SPLIT": scatter.SPLIT,
                        "RULE": scatter.SUM if rule == "sum" else 1 + RULES.index(rule),
                        "SUMMED": summed,
                        "ROUND": table == "*bf16",
                    }
                    name = f"{rule} {table[1:]} {width}{' of sums' if summed else ''}"
                    warps, most = how["num_warps"], scatter.REGISTERS
                    yield Variant(name, scatter.rows_kernel, types, constants, warps, most, at_most=most)


def other_variants(widths: Sequence[int]) -> Iterator[Variant]:
    """Parts of long segments, and the optional atomic sum."""
    for width in widths:
        how = scatter.layout(width)
        types = {**dict.fromkeys(("order", "number", "starts"), "*i64"), "grads": "*fp32", "partial": "*fp32"}
        types["total"] = "i32"
        constants = {"W": width, "BLOCK_W": how["BLOCK_W"], "ROWS": scatter.ROWS, "SPLIT": scatter.SPLIT}
        yield Variant(f"partial sums {width}", scatter.partial_kernel, types, constants, how["num_warps"])
        types = {"number": "*i64", "grads": "*fp32", "sums": "*fp32", "total": "i32"}
        constants = {"W": width, "BLOCK_W": how["BLOCK_W"], "ROWS": 16}
        yield Variant(f"atomic sum {width}", scatter.atomic_kernel, types, constants, how["num_warps"])


def activation_variants(full: bool) -> Iterator[Variant]:
    """The gate's and the convolution's kernels: those for one stream of 256 in bf16, or all."""
    for given in (*gate.VARIANTS, *conv.VARIANTS):
        if full or (" D=256 " in given["name"] + " " and "bf16" in given["name"]):
            types = {name: kind for name, kind in given["signature"].items() if kind != "constexpr"}
            constants, aligned = given["constexprs"], tuple(given["aligned"])
            yield Variant(
                given["name"], given["kernel"], types, constants, given["num_warps"], given["registers"], "", aligned
            )


def variants(full: bool = False) -> list[Variant]:
    """What is compiled: the representative set, or every width, format, family and rule."""
    if full:
        cases = [(family, "bf16", width) for family in RULES_OF for width in (31, 64, 256)]
        cases += [(family, name, 160) for family in ("v4.1", "qwen3.8") for name in FORMATS]
        return [
            *hashing_variants(),
            *gather_variants(tuple(FORMATS), WIDTHS, ("*fp32", "*bf16")),
            *fused_variants(cases),
            *put_variants(WIDTHS),
            *update_variants(("sum", *RULES), (1, 31, 64, 160, 1280, 2048), ("*fp32", "*bf16")),
            *other_variants((1, 64, 160, 2048)),
            *activation_variants(full),
        ]
    fused = [("demo", "fp32", 64), ("v4.1", "fp8", 256), ("v4.1", "bf16", 256), ("qwen3.8", "bf16", 160)]
    return [
        *list(hashing_variants())[:2],
        *gather_variants(("fp32", "bf16"), (64, 256)),
        *gather_variants(("bf16",), (64, 1280), ("*bf16",)),
        *gather_variants(("fp8", "lut3"), (256,)),
        *fused_variants(fused),
        *put_variants((64,)),
        *update_variants(("sum", "rowwise_adam"), (64,), ("*fp32", "*bf16")),
        *other_variants((64,)),
        *activation_variants(full),
    ]


@contextmanager
def _own_cache() -> Iterator[Path]:
    """A compilation cache of its own, so that what is looked at was compiled now."""
    before = os.environ.get("TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory(prefix="engram-compile-") as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            yield Path(folder)
        finally:
            if before is None:
                del os.environ["TRITON_CACHE_DIR"]
            else:
                os.environ["TRITON_CACHE_DIR"] = before


def compile_variant(variant: Variant, target: str, folder: Path) -> dict[str, Any]:
    """Compile one variant for "sm_90" or "gfx942" -> what its machine code needs; `folder` for temporary files."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    nvidia = target.startswith("sm_")
    where = GPUTarget("cuda", int(target[3:]), 32) if nvidia else GPUTarget("hip", target, 64)
    names = list(variant.kernel.arg_names)
    signature = {name: variant.types.get(name, "constexpr") for name in names}
    constants = {name: variant.constants[name] for name in names if name not in variant.types}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in variant.hints()}
    began = time.perf_counter()
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=constants, attrs=attributes)
    options: dict[str, Any] = {"num_warps": variant.warps, **NO_FUSION}
    if nvidia and variant.at_most:
        options["maxnreg"] = variant.at_most
    made = triton.compile(source, target=where, options=options)
    found = _nvidia(made.asm["cubin"], folder) if nvidia else _amd(made.asm["amdgcn"])
    row = {"kernel": variant.name, "target": target, **found, "shared": made.metadata.shared}
    row["seconds"] = time.perf_counter() - began
    row["problems"] = _problems(variant, row, nvidia)
    return row


def _nvidia(cubin: bytes, folder: Path) -> dict[str, Any]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    usage, code = (
        subprocess.run([tool, flag, path], capture_output=True, text=True, check=True).stdout
        for flag in ("-res-usage", "-sass")
    )
    numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return {
        "registers": numbers["REG"],
        "spills": numbers["STACK"] + numbers["LOCAL"],
        "wide_loads": len(re.findall(r"\bLDG\.E\S*\.128", code)),
        "wide_stores": len(re.findall(r"\bSTG\.E\S*\.128", code)),
        "loads": len(re.findall(r"\bLDG\.", code)),
        "stores": len(re.findall(r"\bSTG\.", code)),
        "instructions": len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+\S", code, flags=re.MULTILINE)),
    }


def _amd(code: str) -> dict[str, Any]:
    def number(name: str) -> int:
        return int(re.findall(rf"\.{name}:\s+(\d+)", code)[0])

    return {
        "registers": number("vgpr_count"),
        "spills": number("vgpr_spill_count") + number("private_segment_fixed_size"),  # of scalars: into registers
        "wide_loads": len(re.findall(r"\b(?:global|buffer|flat)_load_dwordx4", code)),
        "wide_stores": len(re.findall(r"\b(?:global|buffer|flat)_store_dwordx4", code)),
        "loads": len(re.findall(r"\b(?:global|buffer|flat)_load_", code)),
        "stores": len(re.findall(r"\b(?:global|buffer|flat)_store_", code)),
        "instructions": len(re.findall(r"^\t[a-z]\w+", code, flags=re.MULTILINE)),
    }


def _problems(variant: Variant, row: dict[str, Any], nvidia: bool) -> list[str]:
    found = []
    if row["spills"]:
        found.append(f"spills {row['spills']} bytes")
    if variant.registers is not None and nvidia and row["registers"] > variant.registers:
        found.append(f"{row['registers']} registers, at most {variant.registers} are allowed")
    for access, wanted in (("loads", variant.wide == "both"), ("stores", variant.wide in ("both", "stores"))):
        if wanted and not row[f"wide_{access}"]:
            found.append(f"no 16-byte {access}")
    return found


def _compile_part(first: int, step: int, targets: tuple[str, ...], folder: Path) -> list[dict[str, Any]]:
    own = folder / f"part-{first}"
    own.mkdir()
    return [compile_variant(one, target, own) for one in variants(True)[first::step] for target in targets]


def compile_report(full: bool = False, targets: Sequence[str] = TARGETS) -> dict[str, Any]:
    """Compile the set -> {"versions", "targets", "compiled", "rows", "failed"}; no GPU is needed.

    "failed" lists "variant on target: problem". Raises RuntimeError where Triton is not installed, or in a process that
    runs its interpreter, in which nothing can be compiled.
    """
    if not INSTALLED or INTERPRETED:
        why = "TRITON_INTERPRET=1 is set: nothing can be compiled" if INSTALLED else "Triton is not installed"
        raise RuntimeError(f"compile report: {why}")
    chosen = variants(full)
    with _own_cache() as folder:
        if full:  # every process compiles every so many-th variant
            jobs = max(1, len(os.sched_getaffinity(0)))
            with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
                parts = pool.map(_compile_part, range(jobs), [jobs] * jobs, [tuple(targets)] * jobs, [folder] * jobs)
                found = [row for part in parts for row in part]
        else:
            found = [compile_variant(one, target, folder) for one in chosen for target in targets]
    failed = [f"{row['kernel']} on {row['target']}: {problem}" for row in found for problem in row["problems"]]
    versions = {"triton": triton.__version__}
    return {"versions": versions, "targets": list(targets), "compiled": len(found), "rows": found, "failed": failed}
