"""How many usual settings of the draft's kernels `selfspec tune-kernels` measured as best, or within 3 % of it.

A file of `tune-kernels` holds the best setting of each case, and the usual one of the code that ran. A usual setting of
today that is neither was not measured, and counts as such.

    python experiments/kernels/usual_settings.py [results/published/gpu/tune_kernels_h200.json]
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import triton

from experiments.arguments import existing
from selfspec_cli.early_exit.draft_weights.integers import GROUP
from selfspec_cli.stages.tune_kernels import WITHIN
from selfspec_cli.vllm_plugin.kernel_timing import Attention, Case, Product

PUBLISHED = Path(__file__).parents[2] / "results/published/gpu/tune_kernels_h200.json"


def verdicts(measured: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Of each case of a file: what it is, and what its usual setting was and is: "best", "within 3 %", "slower" or "not
    measured"."""
    for row in measured["chosen"]:
        case: Case
        if row["kind"] == "attention":
            case = Attention(*measured["heads"], row["tokens"], row["context"], (row["context"],))
        else:
            case = Product(row["kind"], *measured["products"][row["kind"]], measured["bits"], row["tokens"])
        then = "within 3 %" if row["usual_over_best"] <= WITHIN else "slower"
        now = "not measured"
        if _program(case, dict(case.usual)) == _program(case, row["usual"]):
            now = then
        if _program(case, dict(case.usual)) == _program(case, row["setting"]):
            now = "best"
        yield f"{row['kind']} {row['tokens']} {row.get('context', '')}".strip(), then, now


def _program(case: Case, setting: Mapping[str, int]) -> dict[str, int]:
    """What a setting compiles to: one token takes a row that is shorter than a step at once, however long a step is."""
    if not isinstance(case, Product) or case.tokens > 1:
        return dict(setting)
    return {**setting, "at_once": min(setting["at_once"], triton.next_power_of_2(case.columns // GROUP))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=existing, default=PUBLISHED)
    path = parser.parse_args().file
    for name, measured in json.loads(path.read_text(encoding="utf-8"))["shapes"].items():
        found = list(verdicts(measured))
        for title, column in (("when it was measured", 1), ("now", 2)):
            counts = Counter(one[column] for one in found)
            print(f"{name}, {measured['device']}, {title}: {dict(counts)} of {len(found)}")
        print("  not within 3 % now:", [one for one in found if one[2] in ("slower", "not measured")])


if __name__ == "__main__":
    main()
