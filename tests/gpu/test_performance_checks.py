"""The micro performance check on a GPU, and faults that cost speed: each of them turns it red.

    python tests/gpu/test_performance_checks.py [--out FILE] [KEY=VALUE ...]

On the embedded model, two engines, two to four minutes; CUDA graphs without torch.compile, so that they start quickly.
A line a fault, all verdicts in FILE; exit code 1 if a fault was missed, or the check without a fault is red."""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))  # fixed_times
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from planted_checks import checks, of_counts, red

FILE = Path(__file__).parents[2] / "experiments" / "checks" / "h100_micro.yaml"
GRAPHS = [
    "engine.extra.compilation_config.mode=0",
    "engine.extra.compilation_config.cudagraph_mode=FULL_DECODE_ONLY",
    "workload.output_len=96",
    "repeats=3",
]
CAUGHT = {
    "lost_draft": "mean_accepted_len",
    "slower_step": "speedup",
    "eager_step": "eager_steps",
    "host_synchronisation": "host_synchronisations",
    "debug_copy": "host_copies",
}


def faults(words: list[str]) -> dict[str, Any]:
    """Every verdict by the fault that was planted, "none" first; and whether each is what it has to be."""
    found: dict[str, Any] = {"passed": True, "verdicts": {}}
    with tempfile.TemporaryDirectory() as results, checks(FILE, Path(results), [*GRAPHS, *words]) as run:
        for fault in (None, *CAUGHT):
            verdict = run(fault)
            if fault is None:
                fine = "red" not in of_counts(verdict).values() and "speedup" not in red(verdict)
            else:
                fine = CAUGHT[fault] in red(verdict)
            found["passed"] &= fine
            found["verdicts"][fault or "none"] = verdict
            print(
                f"{'ok  ' if fine else 'FAIL'} {fault or 'no fault'}: {verdict['outcome']}"
                f" ({', '.join(sorted(red(verdict))) or 'nothing'} red)",
                flush=True,
            )
    return found


def test_each_fault_turns_the_check_red():
    found = faults([])
    assert found["passed"], {name: red(verdict) for name, verdict in found["verdicts"].items()}


def main() -> int:
    options = argparse.ArgumentParser()
    options.add_argument("--out", type=Path, default=Path("performance_checks.json"))
    options.add_argument("words", nargs="*", metavar="KEY=VALUE")
    chosen = options.parse_args()
    found = faults(chosen.words)
    chosen.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
