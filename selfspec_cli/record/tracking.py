"""Points to an experiment tracker. The only file that imports wandb, and only when it is asked for.

W&B gets a run for each point that a command measures, and one a command with its configuration, table, figures and
record; the runs of one command are a group. Everything is written to ./wandb first, without a network, so a sweep never
waits for one; where there is a key, a process of its own uploads it afterwards.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from selfspec_cli import extras
from selfspec_cli.config.schema import ConfigError, RunConfig, to_plain
from selfspec_cli.early_exit.errors import on_one_line
from selfspec_cli.record import folder, statistics, tables
from selfspec_cli.record.columns import Record, Summary, header, plain
from selfspec_cli.record.point import Point, to_json
from selfspec_cli.record.quality import arm_in_words

UPLOAD_LOG = "selfspec-upload.log"


class Tracker:
    """Takes points and figures; this one drops them. messages: for the user. reported: it has had a report."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.reported = False

    def log(self, point: Point) -> None:
        """Log one point."""

    def report(self, command: str, results: Path, rows: Sequence[Record], pictures: Sequence[Path]) -> None:
        """Log what a command measured in all: a table of rows, figures, and the files of the record."""


class _Wandb(Tracker):
    def __init__(self, wandb: Any, cfg: RunConfig, run_id: str) -> None:
        super().__init__()
        self._wandb, self._cfg, self._run_id = wandb, cfg, run_id
        self._mode = "disabled" if os.environ.get("WANDB_MODE") == "disabled" else "offline"
        self.places: list[Path] = []  # of the runs that were written

    def log(self, point: Point) -> None:
        row = tables.row(point)
        about = {"point": point.id, "key": point.key, "device": point.device, "status": row.status, "arm": point.arm}
        facts = about | {"digests": point.digests, "versions": point.versions, "git": point.git}
        title = f"{arm_in_words(point.arm)}, {tables.asked(row)}"
        with self._run(point.id, title, "point", (point.config or {}) | facts) as run:
            run.summary.update({name: value for name, value in asdict(row).items() if value is not None})
            for number, speed in enumerate(point.tok_s):
                run.log({"repeat": number, "tok_s": speed})
            times = statistics.by_name(request for repeat in point.repeats for request in repeat.requests)
            for name, seconds in times.items():
                if seconds:
                    run.log({f"latency/{name}_ms": self._wandb.Histogram([1000 * value for value in seconds])})
            artifact = self._wandb.Artifact(f"point-{point.id}", type="point")
            with artifact.new_file(f"{point.id}.json", encoding="utf-8") as file:
                file.write(to_json(point))
            run.log_artifact(artifact)

    def report(self, command: str, results: Path, rows: Sequence[Record], pictures: Sequence[Path]) -> None:
        self.reported = True
        config = to_plain(self._cfg) | {"command": command}
        with self._run(f"report-{self._run_id}", f"{command} {self._run_id}", "report", config) as run:
            held = {name for row in rows for name in plain(row)} | set(header(Summary))
            names = [name for name in header(Record) if name in held]
            data = [[getattr(row, name) for name in names] for row in rows]
            table = self._wandb.Table(columns=names, data=data, allow_mixed_types=True)
            run.log({"points": table} | {f"figures/{file.stem}": self._wandb.Image(str(file)) for file in pictures})
            artifact = self._wandb.Artifact(f"record-{self._run_id}", type="record")
            for name in folder.TABLES:
                if (results / name).is_file():
                    artifact.add_file(str(results / name), name)
            for file in (results / folder.RUNS / f"{row.point}.json" for row in rows if row.point):
                artifact.add_file(str(file), f"{folder.RUNS}/{file.name}")
            run.log_artifact(artifact)

    @contextmanager
    def _run(self, name: str, title: str, kind: str, config: dict[str, Any]) -> Iterator[Any]:
        settings = self._wandb.Settings(silent=True, console="off", x_disable_stats=True, disable_git=True)
        named = {"id": name, "name": title, "job_type": kind, "group": self._run_id}
        project = os.environ.get("WANDB_PROJECT", "selfspec")
        kept = {"project": project, "mode": self._mode, "config": config, "settings": settings}
        run = self._wandb.init(**named, **kept, reinit="finish_previous")
        try:
            if self._mode != "disabled":
                self.places.append(Path(run.dir).parent)
            yield run
        finally:
            run.finish()

    def close(self) -> None:
        """Begin the upload where there is a key, or say how to do it later; wait for nothing."""
        if not self.places:
            return
        root = self.places[0].parent
        command = f"wandb sync {root}/offline-run-*{self._run_id}"
        is_online = os.environ.get("WANDB_MODE", "online" if os.environ.get("WANDB_API_KEY") else "offline") == "online"
        if not is_online:
            self.messages.append(f"W&B: {len(self.places)} runs in {root}, not uploaded; to do it: {command}")
            return
        log = root / UPLOAD_LOG
        upload = [sys.executable, "-m", "wandb", "sync", *map(str, self.places)]
        with log.open("a", encoding="utf-8") as file:
            subprocess.Popen(upload, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True)
        self.messages.append(f"W&B: {len(self.places)} runs are being uploaded ({log}); to do it again: {command}")


@contextmanager
def open_tracker(cfg: RunConfig, run_id: str) -> Iterator[Tracker]:
    """The tracker that `cfg.tracker` names, for as long as the command runs; raises ConfigError without wandb. Without
    WANDB_API_KEY, or with WANDB_MODE=offline, nothing is uploaded, and the messages say how to do it later."""
    if cfg.tracker.kind == "none":
        yield Tracker()
        return
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(f"tracker=wandb: wandb is not installed: {extras.install('track')}") from error
    tracker = _Wandb(wandb, cfg, run_id)
    try:
        yield tracker
    finally:
        try:
            tracker.close()
        except Exception as error:  # the points are on disk: what W&B cannot do must not hide them
            tracker.messages.append(f"W&B: {on_one_line(error)}")
