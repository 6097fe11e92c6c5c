"""Read by Python as it starts, where a test puts this folder on PYTHONPATH: workers get engines that are made up.

FAKE_WORKER names a folder. A worker leaves its pid, its niceness and its GPUs or cores in it when it measures, and
`ended-PID` when it has. `die-N` in it kills the worker that measures layer N, once; `die-always-N` each time;
`together` makes workers wait until two of them have measured something.
"""

import os
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

PLACE = Path(os.environ.get("FAKE_WORKER", ""))


def bench(cfg, engine, progress):
    from points import measured

    (PLACE / f"pid-{os.getpid()}").write_text(str(os.nice(0)))
    has = os.environ.get("CUDA_VISIBLE_DEVICES") or os.environ.get("SELFSPEC_CORES", "")
    (PLACE / f"has-{os.getpid()}").write_text(has)
    with (PLACE / "measured").open("a") as log:
        log.write(f"{cfg.method} {cfg.layer}\n")
    if (PLACE / f"die-always-{cfg.layer}").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    if (PLACE / f"die-{cfg.layer}").exists():
        (PLACE / f"die-{cfg.layer}").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    until = time.monotonic() + 60
    while (PLACE / "together").exists() and len(list(PLACE.glob("pid-*"))) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(float(os.environ.get("FAKE_SECONDS", "0")))
    (PLACE / f"ended-{os.getpid()}").touch()
    return measured(*((100.0, 101.0, 99.0) if cfg.method == "baseline" else (150.0, 151.0, 149.0)))


@contextmanager
def open_engine(cfg):
    yield SimpleNamespace(set_gate=lambda *_: None)


if "selfspec_cli.stages.launch.work" in sys.orig_argv:
    # In place of the modules themselves, whose import of PyTorch takes longer than all that a worker does here.
    of_worker = {
        "engine.live": {"open_engine": open_engine, "fork_engines": lambda cfg: None},
        "stages.measure": {"bench": bench},
    }
    for name, functions in of_worker.items():
        module = sys.modules[f"selfspec_cli.{name}"] = ModuleType(f"selfspec_cli.{name}")
        vars(module).update(functions)
