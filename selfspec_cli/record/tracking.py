"""Rows and charts to an experiment tracker. The only file that imports wandb, and only when it is asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from selfspec_cli.config.schema import ConfigError, RunConfig, TrackerKind, to_plain
from selfspec_cli.record.tables import Record, header


class Tracker:
    """Takes rows and a chart; this one drops them."""

    def log(self, record: Record) -> None:
        """Log one row."""

    def chart(self, png: Path) -> None:
        """Log a chart of the results folder, and beside it the rows logged so far as a table."""


class _Wandb(Tracker):
    def __init__(self, run: Any, table: Callable[..., Any], image: Callable[[str], Any]) -> None:
        self._run, self._table, self._image = run, table, image
        self._rows: list[list[Any]] = []

    def log(self, record: Record) -> None:
        self._rows.append(list(asdict(record).values()))
        measured = {name: value for name, value in asdict(record).items() if isinstance(value, (int, float))}
        self._run.log(measured)

    def chart(self, png: Path) -> None:
        self._run.log({"rows": self._table(columns=header(Record), data=self._rows), "chart": self._image(str(png))})


@contextmanager
def open_tracker(cfg: RunConfig, run_id: str) -> Iterator[Tracker]:
    """The tracker that `cfg.tracker` names, for as long as the command runs.

    Without WANDB_API_KEY and without a WANDB_MODE of the user's own, W&B runs offline, into ./wandb.

    Raises:
        ConfigError: wandb is asked for and not installed.
    """
    if cfg.tracker.kind is TrackerKind.none:
        yield Tracker()
        return
    try:
        import wandb
    except ImportError as error:
        raise ConfigError("tracker=wandb: wandb is not installed; pip install 'selfspec[track]'") from error
    mode: Any = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
    settings = wandb.Settings(silent=True, console="off")  # stdout belongs to selfspec
    run = wandb.init(
        project=cfg.tracker.project,
        entity=cfg.tracker.entity,
        name=run_id,
        mode=mode,
        config=to_plain(cfg),
        settings=settings,
    )
    try:
        yield _Wandb(run, wandb.Table, wandb.Image)
    finally:
        try:
            run.finish()
        except Exception as error:  # the rows are on disk: what W&B cannot do must not hide them
            print(f"warning: tracker: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
