"""How much faster a sweep of eight engines is on two GPUs than on one, and whether its rows are the same.

    python experiments/scale/two_workers.py --out two_workers.json                        # joblib and Ray, two GPUs
    python experiments/scale/two_workers.py --runs joblib:2,joblib:1 --seconds 200 --out two_workers.json

Each run is the command of a user, in a folder of results of its own. A short sweep of the same engines by all workers
comes first and is not counted: it fills the caches of compiled kernels (`--warm` says that they are full). The file is
written after each run; none begins after `--seconds`.
Where a timeout outside of this script ends it (SIGTERM), the run under way is ended too, and kept with what it had
measured.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from selfspec_cli.record import folder
from selfspec_cli.record.point import Point
from selfspec_cli.scripts import among

RUNS = "joblib:2,joblib:1,ray:2,joblib:2"
LENGTH = "workload.output_len="


class Terminated(Exception):
    """Somebody asked this script to end."""


def terminated(number: int, frame: Any) -> None:
    """What SIGTERM does, once: the run under way is ended and kept."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated


def launched(text: str) -> list[tuple[str, str]]:
    """LAUNCHER:WORKERS with commas between them, as (launcher, workers)."""
    pairs = []
    for word in text.split(","):
        kind, _, workers = word.partition(":")
        among(("joblib", "ray"), "launcher")(kind)
        if not workers.isdigit():
            raise argparse.ArgumentTypeError(f"{word!r}: write LAUNCHER:WORKERS, such as joblib:2")
        pairs.append((kind, workers))
    return pairs


def shortened(words: list[str]) -> list[str]:
    """The same engines, which generate hardly anything."""
    return [*(word for word in words if not word.startswith(LENGTH)), f"{LENGTH}8"]


def run(kind: str, workers: str, words: list[str], results: Path, limit: float) -> dict[str, Any]:
    """One sweep: its seconds, its exit code, and what it measured."""
    command = [sys.executable, "-m", "selfspec_cli", "sweep", *words, f"launcher={kind}", f"launcher.workers={workers}",
               f"results_dir={results}"]  # fmt: skip
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _, said = process.communicate(timeout=limit)
    except (subprocess.TimeoutExpired, Terminated):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a timeout outside must not lose what was measured
        process.send_signal(signal.SIGINT)
        try:
            _, said = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            _, said = process.communicate()
    seconds = time.monotonic() - began
    points = folder.read(results)[0]
    return {
        "seconds": round(seconds, 1), "exit_code": process.returncode, "keys": sorted({point.key for point in points}),
        "failed": [point.reason for point in points if not point.ok], "workers_seconds": of_workers(points),
        "said": said[-600:],
    }  # fmt: skip


def of_workers(points: Iterable[Point]) -> dict[str, dict[str, float]]:
    """Seconds that each worker's engines took to start and to measure, by the run that the worker's points name.

    What a run took beyond the longest worker's sum is the launcher's, and imports.
    """
    found: dict[str, dict[str, float]] = {}
    for point in sorted(points, key=lambda point: point.run_id):
        sums = found.setdefault(point.run_id, {"starts": 0.0, "measured": 0.0})
        sums["starts"] += (point.start_seconds or 0.0) / (point.start_shared_by or 1)  # by the points of one engine
        sums["measured"] += point.seconds or 0.0
    return {run: {name: round(seconds, 1) for name, seconds in sums.items()} for run, sums in found.items()}


def compared(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Speedups over one worker, in the order of the runs, and whether all that ended well measured the same points."""
    good = [row for row in found if row["exit_code"] == 0 and not row["failed"]]
    single = next((row["seconds"] for row in good if row["workers"] == "1"), None)
    speedups = [
        {"run": f"{row['launcher']}, {row['workers']} workers", "speedup": round(single / row["seconds"], 3)}
        for row in good if single and row["workers"] != "1"
    ]  # fmt: skip
    return {"speedups": speedups, "same rows": len({tuple(row["keys"]) for row in good}) == 1 and len(good) > 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default=RUNS, type=launched, help="LAUNCHER:WORKERS, one after the other")
    parser.add_argument("--seconds", type=float, default=420.0, help="after which no run begins, and the last one ends")
    parser.add_argument("--warm", action="store_true", help="leave out the short sweep in front")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("words", nargs="*", default=["experiment=two_gpus"], help="what is swept")
    given = parser.parse_args()
    ends, found = time.monotonic() + given.seconds, []
    signal.signal(signal.SIGTERM, terminated)
    with tempfile.TemporaryDirectory() as place:
        head: dict[str, Any] = {"words": given.words}
        if not given.warm:
            most = max((workers for _, workers in given.runs), key=int)
            warm = run("joblib", most, shortened(given.words), Path(place) / "warm", given.seconds)
            print(f"warm-up: {warm['seconds']} s, exit code {warm['exit_code']}", flush=True)
            head["warm_up_seconds"] = warm["seconds"]
        for number, (kind, workers) in enumerate(given.runs):
            left = ends - time.monotonic()
            if left < 10 or signal.getsignal(signal.SIGTERM) != terminated:
                break
            row = {"launcher": kind, "workers": workers} | run(
                kind, workers, given.words, Path(place) / str(number), left
            )
            found.append(row)
            print(
                f"{kind}:{workers}: {row['seconds']} s, exit code {row['exit_code']}, {len(row['keys'])} points",
                flush=True,
            )
            if row["exit_code"]:
                print(row["said"], row["failed"][:1], flush=True)
            text = json.dumps(compared(found) | head | {"runs": found}, indent=1)
            given.out.write_text(text + "\n", encoding="utf-8")
    print(json.dumps(compared(found)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
