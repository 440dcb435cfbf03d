"""Where a run's numbers go: JSON lines always; Weights & Biases when asked for, whose failure never stops a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console

from engram.train.recipe import TrainConfig


def console() -> Console:
    """Standard error as a rich console; wide when it is no terminal, so that logs hold whole tables."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else 140)


class Tracker:
    """Appends one JSON object a line to `path`; on resume, lines past the resumed step are dropped first."""

    def __init__(self, path: Path, cfg: TrainConfig, resumed_at: int = 0) -> None:
        kept = []
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    if json.loads(line)["step"] <= resumed_at:
                        kept.append(line)
                except (ValueError, KeyError):  # a line cut short by a kill
                    continue
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")
        self._wandb = self._start_wandb(cfg, path.parent) if cfg.wandb else None

    def log(self, line: dict[str, Any]) -> None:
        """Write one line, flushed; and to wandb while that works."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._wandb is not None:
            self._guard("log", lambda: self._wandb.log(line, step=line["step"]))

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
        if self._wandb is not None:
            self._guard("finish", lambda: self._wandb.finish(exit_code=int(error is not None)))

    def _start_wandb(self, cfg: TrainConfig, folder: Path) -> Any:
        try:
            import wandb

            return wandb.init(project=cfg.wandb, name=cfg.name, config=cfg.to_dict(), dir=str(folder))
        except Exception as error:
            self._say("start", error)
            return None

    def _guard(self, what: str, call: Any) -> None:
        try:
            call()
        except Exception as error:
            self._say(what, error)
            self._wandb = None

    def _say(self, what: str, error: Exception) -> None:
        print(f"engram: wandb {what} failed ({error!r}); the run goes on with log.jsonl alone", file=sys.stderr)
