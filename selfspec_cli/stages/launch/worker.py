"""One unit of a sweep in a process of its own: `python -m selfspec_cli.stages.launch.worker UNIT.json SPOOL`.

It writes each point as a file into the spool folder, whole; whoever started it moves the points on.
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

from selfspec_cli.record.point import to_json
from selfspec_cli.stages.launch.work import CORES, ENDS, keys_of
from selfspec_cli.whole import atomic_write


def main(words: Sequence[str]) -> int:
    """Measure the unit that a file describes; 0 if all points were reached, measured or failed."""
    Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with suppress(OSError):  # cores that this machine does not have
        if os.environ.get(CORES):
            os.sched_setaffinity(0, {int(core) for core in os.environ[CORES].split(",")})
    from selfspec_cli.config.dumped import load_config
    from selfspec_cli.engine.live import fork_engines, open_engine
    from selfspec_cli.stages import measure, sweep

    spool = Path(words[1])
    document, file = json.loads(Path(words[0]).read_text(encoding="utf-8")), spool / "config.json"
    cfgs = []
    for planned in document["points"]:
        file.write_text(json.dumps(planned), encoding="utf-8")
        cfgs.append(load_config(file))
    fork_engines(cfgs[0])
    sweep.run_unit(
        cfgs,
        document["run_id"],
        keys_of(document, cfgs),
        open_engine=open_engine,
        bench=measure.bench,
        keep=lambda point: atomic_write(spool / f"{point.number:04d}{ENDS}", to_json(point)),
        ends=document["ends"],
    )
    return 0


def _end_with(parent: int) -> None:
    """End this process group when the supervisor is gone: nobody would take its points, and it holds a GPU."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
