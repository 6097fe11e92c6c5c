"""One unit of a sweep in a process of its own: `python -m selfspec_cli.stages.launch.worker UNIT.json SPOOL`.

It measures as `selfspec sweep` does, and writes each point as a file into the spool folder instead of a results folder.
Whoever started it moves the points on. A file appears under its name when it is whole.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

from selfspec_cli.config.schema import RunConfig
from selfspec_cli.record import point as points
from selfspec_cli.record.point import Point
from selfspec_cli.stages.launch.devices import CORES
from selfspec_cli.stages.launch.units import ENDS, keys_of
from selfspec_cli.whole import atomic_write


def main(words: Sequence[str]) -> int:
    """Measure the unit that a file describes; 0 if all points were reached, measured or failed."""
    file, spool = words
    Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    document = json.loads(Path(file).read_text(encoding="utf-8"))
    with suppress(OSError):  # cores that this machine does not have
        if os.environ.get(CORES):
            os.sched_setaffinity(0, {int(core) for core in os.environ[CORES].split(",")})
    measure([_config(planned["config"], Path(spool)) for planned in document["points"]], document, Path(spool))
    return 0


def _end_with(parent: int) -> None:
    """End this process group when the supervisor is gone: nobody would take its points, and it holds a GPU."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def measure(cfgs: Sequence[RunConfig], document: dict[str, Any], spool: Path) -> None:
    """Measure every config of a unit, the baselines first, and spool each point."""
    from selfspec_cli.engine.live import fork_engines, open_engine
    from selfspec_cli.stages import bench, sweep

    def keep(point: Point) -> None:
        atomic_write(spool / f"{point.number:04d}{ENDS}", points.to_json(point))

    fork_engines(cfgs[0])
    sweep.run_unit(
        cfgs,
        document["run_id"],
        keys_of(document, cfgs),
        open_engine=open_engine,
        bench=bench.run,
        keep=keep,
        ends=document["ends"],
    )


def _config(plain: dict[str, Any], spool: Path) -> RunConfig:
    from selfspec_cli.config.dumped import load_config

    file = spool / "config.json"
    file.write_text(json.dumps({"config": plain}), encoding="utf-8")
    return load_config(file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
