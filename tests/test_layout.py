"""The layout rules of docs/architecture.md, each a test: folders, links, import order, file length, names."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import engram
from engram import cli

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("kernels", "engram", "eval", "train", "tests")
"""Lowest first: a folder imports only from itself and from folders to its left."""

LINKS = ("kernels", "train", "eval", "configs")
TOP_LEVEL = {"engram", "kernels", "train", "eval", "configs", "docs", "tests"}
MADE_HERE = {"runs", "build", "dist"}
"""Folders that commands make and git ignores."""

ENGRAM_ORDER = (
    "strict",
    "config",
    "families",
    "compress",
    "window",
    "hashing",
    "lookup",
    "stores",
    "streams",
    "prefetch",
    "table",
    "decoding",
    "layer",
    "memory",
    "minimal",
    "modelcard",
    "saving",
    "editing",
    "hosts",
    "caches",
    "handles",
    "attaching",
    "backbone",
    "optim",
    "checkpoint",
    "controls",
    "released_layouts",
    "released",
    "releasing",
    "info",
    "inspecting",
    "cli",
)
"""Files (or folders) of engram/, lowest first: each imports only from files before it. Some are still to come."""

DISPATCH = "engram.kernels.dispatch"
"""The only file of kernels/ that engram/ imports from; eval/ and train/ reach kernels through engram/."""

BANNED = ("kernels", "train", "eval", "configs", "tests")
MAX_LINES = 500
MAX_YAML_LINES = 60


@dataclass(frozen=True)
class Import:
    """One import statement: the module it names, where it stands, and whether it runs at module level."""

    module: str
    line: int
    top: bool


def python_files() -> list[Path]:
    """Every Python file of the project once, by its real path, relative to the root."""
    files = [path for folder in (*FOLDERS, "docs", "configs") for path in real_files(ROOT / folder)]
    return [path.relative_to(ROOT) for path in files if path.suffix == ".py"]


def real_files(folder: Path) -> list[Path]:
    found = []
    for base, folders, names in os.walk(folder):  # does not follow links
        folders[:] = [name for name in folders if name != "__pycache__"]
        found += [Path(base) / name for name in names]
    return sorted(found)


def module_name(path: Path) -> str:
    """engram/x/y.py -> engram.x.y; kernels/y.py -> engram.kernels.y; tests/y.py -> tests.y."""
    parts = list(path.with_suffix("").parts)
    if parts[0] in LINKS:
        parts.insert(0, "engram")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def folder_of(module: str) -> str:
    """engram.train.loop -> train; engram.hashing -> engram."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "engram" and parts[1] in LINKS else parts[0]


MODULES = {module_name(path): path for path in python_files()}


def imports(path: Path) -> list[Import]:
    """All imports of one file; `from engram import x` counts as engram.x where that is a module."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    found: list[Import] = []

    def visit(node: ast.AST, top: bool) -> None:
        for child in ast.iter_child_nodes(node):
            inner = top and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            if isinstance(child, ast.Import):
                found.extend(Import(alias.name, child.lineno, top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert not child.level, f"{path}:{child.lineno}: relative import"
                for alias in child.names:
                    deeper = f"{child.module}.{alias.name}"
                    package = deeper in MODULES or any(name.startswith(deeper + ".") for name in MODULES)
                    found.append(Import(deeper if package else str(child.module), child.lineno, top))
            visit(child, inner)

    visit(tree, True)
    return found


def first_party(path: Path) -> Iterator[Import]:
    return (item for item in imports(path) if item.module.split(".")[0] == "engram")


def test_links_are_relative_and_stored_as_links() -> None:
    for name in LINKS:
        link = ROOT / "engram" / name
        assert link.is_symlink(), f"engram/{name} must be a symbolic link"
        assert os.readlink(link) == f"../{name}"
        assert (ROOT / name).is_dir() and not (ROOT / name).is_symlink()
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "-s", *[f"engram/{name}" for name in LINKS]]
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        for line in listing.stdout.splitlines():
            assert line.startswith("120000 "), f"git holds something else than a link: {line}"


def test_git_ignores_no_source_file() -> None:
    if (ROOT / ".git").exists():
        files = [path.relative_to(ROOT) for folder in TOP_LEVEL for path in real_files(ROOT / folder)]
        names = "\n".join(str(path) for path in files if path.suffix in (".py", ".yaml", ".json", ".md"))
        done = subprocess.run(["git", "check-ignore", "--stdin"], cwd=ROOT, input=names, capture_output=True, text=True)
        assert done.stdout == "", "an entry of .gitignore without a leading slash holds in every folder"


def test_only_engram_has_init_files() -> None:
    inits = [path for path in python_files() if path.name == "__init__.py"]
    assert Path("engram/__init__.py") in inits
    assert all(path.parts[0] == "engram" for path in inits), inits


def test_top_level_folders_are_the_fixed_ones() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    folders = {name for name in folders if not name.endswith(".egg-info") and name != "__pycache__"}
    assert folders - MADE_HERE == TOP_LEVEL
    assert not list(ROOT.glob("*.py")), "Python files live in the folders"


def test_configs_holds_short_yaml_only() -> None:
    for path in real_files(ROOT / "configs"):
        assert path.suffix == ".yaml", f"{path}: configs/ holds YAML only"
        assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_YAML_LINES, f"{path}: longer than a screen"


def test_folders_import_only_to_the_left() -> None:
    for module, path in MODULES.items():
        own = folder_of(module)
        if own not in FOLDERS:  # scripts of docs/examples use whatever a user would
            continue
        for item in first_party(path):
            other = folder_of(item.module)
            where = f"{path}:{item.line} imports {item.module}"
            assert FOLDERS.index(other) <= FOLDERS.index(own), where
            if other == "kernels" and own in ("eval", "train"):
                pytest.fail(f"{where}: kernels are reached through engram only")
            if other == "kernels" and own == "engram":
                assert item.module == DISPATCH, f"{where}: engram/ imports {DISPATCH} only"


def test_bare_folder_names_are_never_imported() -> None:
    for path in python_files():
        for item in imports(path):
            assert item.module.split(".")[0] not in BANNED, f"{path}:{item.line}: use engram.{item.module}"


def test_ruff_bans_the_bare_names() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = text.partition("[tool.ruff.lint.flake8-tidy-imports.banned-api]")[2].partition("\n[")[0]
    assert all(f'"{name}".msg' in table for name in BANNED)
    assert '"TID"' in text


def test_engram_files_import_only_from_files_before_them() -> None:
    rank = {name: place for place, name in enumerate(ENGRAM_ORDER)}
    for module, path in MODULES.items():
        if folder_of(module) != "engram" or module == "engram":
            continue
        own = module.split(".")[1]
        assert own in rank, f"{path}: name it in ENGRAM_ORDER here and in docs/architecture.md"
        for item in first_party(path):
            if folder_of(item.module) != "engram":
                continue
            if item.module == "engram":
                names = ast.parse((ROOT / path).read_text(encoding="utf-8").splitlines()[item.line - 1]).body[0]
                assert isinstance(names, ast.ImportFrom) and [a.name for a in names.names] == ["__version__"], (
                    f"{path}:{item.line}: inside engram/, import from the file that defines the name"
                )
                continue
            other = item.module.split(".")[1]
            assert other == own or rank[other] < rank[own], f"{path}:{item.line}: {own} may not import {other}"


def test_documented_order_is_the_tested_one() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listing = text.partition("<!-- order -->")[2].partition("<!-- /order -->")[0]
    documented = [line.split("`")[1].removesuffix(".py") for line in listing.splitlines() if line.startswith("| `")]
    assert tuple(documented) == ENGRAM_ORDER


def test_documented_files_exist_or_are_marked_to_come() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listing = text.partition("<!-- order -->")[2].partition("<!-- /order -->")[0]
    for line in listing.splitlines():
        if line.startswith("| `"):
            name = line.split("`")[1].removesuffix(".py")
            there = (ROOT / "engram" / f"{name}.py").exists() or (ROOT / "engram" / name).is_dir()
            assert there != ("(to come)" in line), f"docs/architecture.md: {line}"


def test_documented_files_of_the_other_folders_are_the_files() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listing = text.partition("<!-- others -->")[2].partition("<!-- /others -->")[0]
    cells = [line.split("|")[1] for line in listing.splitlines() if line.startswith("| `")]
    named = {name for cell in cells for name in cell.split("`")[1::2]}
    there = {path.as_posix() for path in python_files() if path.parts[0] in ("kernels", "eval", "train")}
    assert named == there


def test_no_import_circle() -> None:
    graph = {
        module: {item.module for item in first_party(path) if item.module in MODULES} - {module}
        for module, path in MODULES.items()
    }
    for module in graph:
        graph[module].discard("engram")  # its names are strings, looked up later
    done: set[str] = set()

    def walk(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"import circle: {' -> '.join([*trail, module])}"
        if module not in done:
            for other in sorted(graph[module]):
                walk(other, (*trail, module))
            done.add(module)

    for module in sorted(graph):
        walk(module, ())


def test_first_party_imports_stand_at_the_top() -> None:
    for path in python_files():
        if path.parts[0] == "tests":  # a test may import late what it needs to import late
            continue
        for item in first_party(path):
            assert item.top, f"{path}:{item.line}: first-party import inside a function"


def test_no_file_is_long() -> None:
    lengths = {str(path): len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in python_files()}
    long = {path: lines for path, lines in lengths.items() if lines > MAX_LINES}
    assert not long, f"what would pass {MAX_LINES} lines becomes a folder of that name"


def test_public_names_differ_from_module_names() -> None:
    taken = {part for module in MODULES if not module.startswith("tests") for part in module.split(".")[1:]}
    clashes = [
        f"{path}:{node.lineno} {node.name}"
        for path in python_files()
        if path.parts[0] not in ("tests", "docs")
        for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in taken
    ]
    assert not clashes, "these are also names of modules"


def test_public_definitions_say_what_they_do() -> None:
    for path in python_files():
        if path.parts[0] in ("tests", "docs"):
            continue
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), f"{path}: no docstring"
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{path}:{node.lineno}: {node.name} has no docstring"


def test_string_tables_name_what_exists() -> None:
    missing = []
    parts = [module for given in cli.PARTS.values() for module in given.values()]
    for target in (*cli.TARGETS.values(), *cli.VIEWS.values(), *parts, *engram._NAMES.values()):
        module, _, name = target.partition(":")
        body = ast.parse((ROOT / MODULES[module]).read_text(encoding="utf-8")).body if module in MODULES else []
        defined = [node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
        if module not in MODULES or (name and name not in defined):
            missing.append(target)
    assert not missing


def test_importing_engram_is_light() -> None:
    names = "engram, engram.cli, engram.config, engram.families"
    check = f"import sys, {names}; assert not {{'torch', 'transformers', 'numpy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=True)


def test_lazy_names_resolve_and_others_fail() -> None:
    assert engram.EngramConfig.__module__ == "engram.config"
    assert engram.families.__name__ == "engram.families"
    assert set(engram._NAMES) <= set(dir(engram))
    with pytest.raises(AttributeError, match="EngramConfig"):
        _ = engram.no_such_name


def test_a_transformers_model_loads_with_the_root_on_the_path() -> None:
    # transformers asks whether a package called `kernels` can be imported; with the root on the path our folder is
    # found, and a folder with an __init__.py would be taken for it (transformers 5.10-5.12 fail, 5.0-5.9 on any).
    program = """
import sys, importlib.util
assert importlib.util.find_spec("kernels") is not None, "the root is not on the path: this test shows nothing"
import torch, transformers
config = transformers.LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                  num_attention_heads=2, num_key_value_heads=2)
logits = transformers.LlamaForCausalLM(config)(torch.arange(4)[None]).logits
assert logits.shape == (1, 4, 32) and logits.isfinite().all()
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, check=True)
