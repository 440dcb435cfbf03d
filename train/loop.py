"""The training loop: one run from a recipe to a result file, resumable bit for bit.

    engram train configs/runs/smoke.yaml --set steps=200 --out runs/smoke
    engram train configs/runs/smoke.yaml --out runs/smoke --resume

A run folder holds config.json (everything), log.jsonl (one line per `log_every` steps), checkpoint/, tokenizer/ and,
when it is finished, result.json. Ctrl-C finishes the step, saves, and says how to go on.
"""

from __future__ import annotations

import math
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

import engram.optim
from engram.config import EngramConfig
from engram.eval.loss import held_out_loss
from engram.eval.report import result, write_json
from engram.hashing import total_rows
from engram.stores import DeferredDiskStore
from engram.stores.formats import get_format
from engram.strict import ConfigError, require
from engram.table import RowProxy
from engram.train import snapshots
from engram.train.assembly import Built, assemble
from engram.train.balance import Balancer
from engram.train.budget import describe
from engram.train.data import Corpus, prepare
from engram.train.recipe import TrainConfig, changed_fields, load
from engram.train.study import examine
from engram.train.trackers import Tracker, console

LEARNING_CHECK = 10
"""Optimizer steps after which rows that have never been updated are an error."""
LOCK = ".lock"


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during training, after the state was saved; the message says how to go on."""


def run_config(
    config: str, overrides: list[str], dry_run: bool = False, out: str | None = None, resume: bool = False
) -> dict[str, Any]:
    """`engram train`: a YAML path and overrides -> result dictionary (or the plan alone, with `dry_run`)."""
    cfg = load(config, overrides)
    if dry_run:
        return dry(cfg)
    folder = Path(out) if out else Path("runs") / f"{Path(config).stem}-{cfg.seed}"
    return train_run(cfg, folder, resume=resume)


def dry(cfg: TrainConfig) -> dict[str, Any]:
    """The complete configuration, parameters, FLOPs per token and bytes per placement; trains nothing."""
    arm = cfg.arm(cfg.data.vocab_size)
    console().print(describe([arm]))
    return {
        "config": cfg.to_dict(),
        "arm": arm.to_dict(),
        "tokens": cfg.tokens,
        "bytes": _table_bytes(cfg, arm.memory),
    }


def _table_bytes(cfg: TrainConfig, memory: EngramConfig | None) -> dict[str, int]:
    """Bytes of rows and of their optimizer state by place, as they are for this placement, format and rule."""
    if memory is None:
        return {}
    rows = sum(total_rows(memory, layer) for layer in memory.layers)
    state = {"rowwise_adam": 4, "rowwise_adagrad": 4, "sgd": 0, "adam": 8 * memory.head_dim}[cfg.optimizer.row_rule]
    held: dict[str, int] = {memory.placement: rows * get_format(memory.row_dtype, memory.head_dim).row_bytes}
    where = "device" if memory.placement == "device" else "host"
    return {**held, f"{where}, optimizer state": rows * state}


def train_run(cfg: TrainConfig, folder: Path, resume: bool = False, quiet: bool = False) -> dict[str, Any]:
    """Train one run in `folder` -> its result, also written to result.json.

    Raises ConfigError before anything is trained when the configuration, the data, the folder or the free space will
    not do, when `folder` holds a run and `resume` is not set, or when its checkpoint belongs to another configuration.
    """
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    with only_one(folder):
        corpus = prepare(cfg.data, cfg.seed)
        built = assemble(cfg, corpus.vocab_size, corpus.tokenizer)
        try:
            saved = claim(folder, cfg, resume, built)
            return Run(cfg, folder, corpus, built, quiet).go(saved)
        finally:
            if built.handle is not None:
                built.handle.memory.close()


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """One process trains in a run folder; the lock ends with its process. Raises ConfigError."""
    from filelock import FileLock, Timeout

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(str(folder / LOCK))
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(f"out: another process is training in {folder}") from None
    except OSError as error:
        raise ConfigError(f"out: {folder} cannot be written: {error.strerror or error}") from error
    try:
        yield
    finally:
        lock.release()


class Diverged(RuntimeError):
    """Training ran into numbers that are no numbers; lower the learning rate."""


class Run:
    """One training run in progress; `go` does it all."""

    def __init__(self, cfg: TrainConfig, folder: Path, corpus: Corpus, built: Built, quiet: bool = False) -> None:
        from accelerate import Accelerator

        self.cfg, self.folder, self.corpus, self.built, self.quiet = cfg, folder, corpus, built, quiet
        cpu = cfg.device == "cpu" or not torch.cuda.is_available()
        require(cfg.device != "cuda" or not cpu, "device: 'cuda' is asked for, but there is no CUDA device")
        narrow = cfg.precision == "bf16" or (cfg.precision == "auto" and not cpu and torch.cuda.is_bf16_supported())
        self.accelerator = Accelerator(cpu=cpu, mixed_precision="bf16" if narrow else "no")
        require(
            self.accelerator.num_processes == 1,
            f"processes: {self.accelerator.num_processes}; this version trains in one process, start one",
        )
        self.reader = corpus.reader()
        windows = cfg.steps * cfg.accumulate
        require(
            len(self.reader) >= windows,
            f"steps: {cfg.steps} x accumulate {cfg.accumulate} need {windows} batches, there are {len(self.reader)}; "
            "lower steps, give more text, or allow repetition with data.epochs",
        )
        built.model.to(self.accelerator.device)
        o = cfg.optimizer
        optimizer = engram.optim.build(
            built.model,
            o.lr,
            o.row_lr_multiplier,
            betas=o.betas,
            weight_decay=o.weight_decay,
            row_rule=o.row_rule,
            row_betas=o.row_betas,
            row_weight_decay=o.row_weight_decay,
            row_decay=o.row_decay,
        )
        self.optimizer = optimizer
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: o.factor(step, cfg.steps))
        self.balancer = Balancer(built.model, cfg.loss_free_balancing)
        self.model = self.accelerator.prepare_model(built.model)
        self.ahead = built.handle is not None and built.handle.memory.cfg.placement != "device"
        self.step, self.seconds = 0, 0.0
        self.curve: list[list[float]] = []
        self.validation: list[list[float]] = []
        self.routing: dict[str, Any] = {}

    def go(self, saved: dict[str, Any] | None) -> dict[str, Any]:
        """Train to the end, study the model, write the result."""
        self._check_row_files(fresh=saved is None)
        if saved is not None:
            self._resume()
        elif self.folder.joinpath("log.jsonl").exists():
            self.folder.joinpath("log.jsonl").unlink()
        self.corpus.tokenizer.save_pretrained(str(self.folder / "tokenizer"))
        write_json(self.folder / "config.json", self.cfg)
        log = self.folder / "log.jsonl"
        with Tracker(log, self.cfg, self.step) as tracker, self._progress() as bar, _stop_signal() as stop:
            while self.step < self.cfg.steps:
                self._after_step(self._one_step(), tracker, bar)
                if stop:
                    self._save()
                    raise Interrupted(f"stopped at step {self.step} and saved; go on with --resume --out {self.folder}")
        self._save()
        facts = self._facts()
        finished = result(self.cfg, self.cfg.seed, {**facts, **self.examine()})
        write_json(self.folder / "result.json", finished)
        return finished

    @property
    def saved(self) -> nn.Module:
        """What checkpoints hold."""
        return self.built.model

    def examine(self) -> dict[str, Any]:
        """What the finished model is asked."""
        return examine(self.cfg, self.corpus, self.built, self.reader)

    def budget(self) -> dict[str, Any]:
        """Sizes and costs of the arm."""
        arm = self.built.arm
        assert arm is not None
        return {"budget": arm.to_dict(), "parameters": arm.parameters, "flops": arm.flops}

    def _check_row_files(self, fresh: bool) -> None:
        """Open files of rows before training; a new run does not take over the rows of an earlier one."""
        handle = self.built.handle
        for module in [] if handle is None else handle.memory.modules_by_layer():
            store = module.table.store
            if fresh and isinstance(store, DeferredDiskStore):
                require(
                    not store.exists(),
                    f"memory.path: {store.path} holds the rows of an earlier run; remove it, or choose another path",
                )
                store.open()

    def _one_step(self) -> dict[str, Any]:
        """One optimizer step over `accumulate` batches -> its log line."""
        cfg, began = self.cfg, time.perf_counter()
        self.built.model.train()
        total = torch.zeros((), dtype=torch.float64)
        for _ in range(cfg.accumulate):
            batch = {name: t.to(self.accelerator.device) for name, t in next(self.reader).items()}
            self._prefetch()
            loss = self._loss(batch) / cfg.accumulate
            self.accelerator.backward(loss)
            total += loss.detach().double().cpu()
        self._require_finite("loss", float(total))
        clip = cfg.optimizer.clip or float("inf")
        norm = torch.nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.grad is not None], clip)
        self._require_finite("gradient norm", float(norm))
        rate = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.routing = self.balancer.update()
        self.step += 1
        self.seconds += time.perf_counter() - began
        if self.step == LEARNING_CHECK and self.built.handle is not None:
            self.built.handle.memory.check_learning()
        return {"step": self.step, "tokens": self._tokens(), "loss": float(total), "lr": rate, "grad_norm": float(norm)}

    def _require_finite(self, name: str, value: float) -> None:
        if not math.isfinite(value):
            raise Diverged(f"{name}: {value} at step {self.step + 1}; lower optimizer.lr, or raise optimizer.warmup")

    def _prefetch(self) -> None:
        """Rows of the next batch are fetched while this one is trained; what this step updates is patched."""
        ahead = self.reader.peek() if self.built.handle is not None and self.ahead else None
        if ahead is not None and self.built.handle is not None:
            device = self.accelerator.device
            self.built.handle.prefetch(ahead["input_ids"].to(device), ahead["position_ids"].to(device))

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        with self.accelerator.autocast():
            logits_BTV = self.model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits_BTV.float().flatten(0, 1), batch["labels"].flatten())

    def _after_step(self, line: dict[str, Any], tracker: Tracker, bar: Progress) -> None:
        cfg, step = self.cfg, self.step
        line["seconds"] = round(self.seconds, 3)
        line["tokens_per_second"] = round(self._tokens() / self.seconds, 1)
        line.update(self.routing)
        if self.ahead:
            line["fetch"] = self._fetch()
        last = step == cfg.steps
        if step % cfg.log_every == 0 or step == 1 or last:
            line["rows_touched"] = {k: touched / rows for k, (touched, rows) in self.optimizer.touched_rows().items()}
            self.curve.append([line["tokens"], line["loss"]])
        if last or (cfg.eval_every and step % cfg.eval_every == 0):
            line["validation"] = held_out_loss(self.built.model, self.corpus.validation_batches()).nats
            self._require_finite("held-out loss", line["validation"])
            self.validation.append([line["tokens"], line["validation"], line["seconds"]])
        if step % cfg.log_every == 0 or step == 1 or "validation" in line:
            tracker.log(line)
            for task in bar.task_ids:
                bar.update(task, completed=step)
                bar.tasks[0].fields.update(_shown(line))
        if cfg.checkpoint_every and step % cfg.checkpoint_every == 0 and not last:
            self._save()

    def _facts(self) -> dict[str, Any]:
        """What is known without asking the model again."""
        touched = {str(k): [t, rows] for k, (t, rows) in self.optimizer.touched_rows().items()}
        return {
            "arm": self.cfg.name,
            "rho": self.cfg.rho,
            **self.budget(),
            "tokens": self._tokens(),
            "seconds": self.seconds,
            "tokens_per_second": self._tokens() / self.seconds,
            "curve": self.curve,
            "validation": [[tokens, loss] for tokens, loss, _ in self.validation],
            "validation_seconds": [[seconds, loss] for _, loss, seconds in self.validation],
            "routing": self.routing,
            "rows_touched": touched,
            "data": self.corpus.description,
            "consumed_sha256": self.reader.consumed_sha256,
            "fetch": self._fetch(),
        }

    def _fetch(self) -> dict[str, Any]:
        """Counters of the prefetcher by layer; empty where rows are on the device."""
        handle = self.built.handle
        stats = {} if handle is None else handle.stats()
        return {str(k): {"store": s["store"], **s["fetch"]} for k, s in stats.items() if "fetch" in s}

    def _tokens(self) -> int:
        return self.step * self.cfg.accumulate * self.cfg.data.batch_size * self.cfg.data.seq_len

    def _save(self) -> None:
        state = {
            "config": self.cfg.to_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "curve": self.curve,
            "validation": self.validation,
            "routing": self.routing,
            "reader": self.reader.state(),
            "data": self.corpus.description["key"],
            "schedule": {k: v for k, v in self.schedule.state_dict().items() if k != "lr_lambdas"},
            "updates": self._updates(),
        }
        snapshots.save(self.folder, self.saved, self.optimizer, state)

    def _updates(self) -> dict[str, int]:
        handle = self.built.handle
        return {} if handle is None else {str(k): s["updates"] for k, s in handle.stats().items()}

    def _resume(self) -> None:
        state = snapshots.load(self.folder, self.saved, self.optimizer)
        self.reader.load_state(state["reader"])
        self.schedule.load_state_dict({**state["schedule"], "lr_lambdas": [None] * len(self.optimizer.param_groups)})
        self.step, self.seconds = state["step"], state["seconds"]
        self.curve, self.validation, self.routing = state["curve"], state["validation"], state["routing"]
        for layer, updates in state["updates"].items():
            assert self.built.handle is not None
            self.built.handle.memory.layer(int(layer)).table.updates = updates

    def _progress(self) -> Progress:
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("loss {task.fields[loss]} · {task.fields[speed]} tok/s{task.fields[extra]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console(),
            disable=self.quiet,
        )
        bar.add_task(self.cfg.name, total=self.cfg.steps, completed=self.step, loss="-", speed="-", extra="")
        return bar


def _shown(line: dict[str, Any]) -> dict[str, str]:
    extra = ""
    if "routing_entropy" in line:
        extra += f" · routing {line['routing_entropy']:.2f}" + (" ALARM" if line.get("alarm") else "")
    if line.get("rows_touched"):
        extra += " · rows " + "/".join(f"{share:.0%}" for share in line["rows_touched"].values())
    if line.get("fetch"):
        hidden = [f["hidden"] for f in line["fetch"].values() if f["hidden"] is not None]
        extra += f" · hidden {min(hidden):.0%}" if hidden else ""
    if "validation" in line:
        extra += f" · held-out {line['validation']:.4f}"
    return {"loss": f"{line['loss']:.4f}", "speed": f"{line['tokens_per_second']:,.0f}", "extra": extra}


def claim(folder: Path, cfg: TrainConfig, resume: bool, built: Built) -> dict[str, Any] | None:
    """Check the run folder before training (writable, roomy, ours) -> the saved state to resume, or None."""
    saved = snapshots.read_state(folder) if folder.exists() else None
    if saved is not None and not resume:
        raise ConfigError(
            f"out: {folder} holds a run at step {saved['step']}; add --resume to go on, or choose another"
        )
    if saved is not None:
        theirs, changed = saved["config"], changed_fields(cfg, saved["config"])
        if changed:
            ours = cfg.to_dict()
            raise ConfigError(
                f"resume: {folder} was trained with another {', '.join(changed)} "
                f"({'; '.join(f'{k}: {theirs.get(k)!r} there, {ours[k]!r} here' for k in changed)})"[:900]
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.write_bytes(b"x")
        probe.unlink()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise ConfigError(f"out: {folder} cannot be written: {error.strerror or error}") from error
    needed = 2 * _checkpoint_bytes(built)
    require(free > needed, f"out: {folder} has {free:,} bytes free, two checkpoints of this run need {needed:,}")
    return saved


def _checkpoint_bytes(built: Built) -> int:
    """Weights, rows, and two moments for every dense parameter plus one scalar a row."""
    weights = sum(t.numel() * t.element_size() for t in built.model.state_dict().values())
    moments = sum(2 * p.numel() * p.element_size() for p in built.model.parameters() if not isinstance(p, RowProxy))
    return weights + moments + sum(4 * s["rows"] for s in (built.handle.stats() if built.handle else {}).values())


@contextmanager
def _stop_signal() -> Iterator[list[int]]:
    """Inside, the first Ctrl-C (or SIGTERM) is noted in the list, the second acts at once."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)
        print("engram: stopping after this step, saving; once more to stop at once", file=sys.stderr, flush=True)

    numbers = (signal.SIGINT, signal.SIGTERM)
    try:
        before = [signal.signal(number, note) for number in numbers]
    except ValueError:  # not the main thread: whoever started it decides
        yield seen
        return
    try:
        yield seen
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
