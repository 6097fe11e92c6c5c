"""What a run of the tests did: its parts with their times, what was skipped and why.

    python tests/summary.py FOLDER    reads each part's seconds (FOLDER/NAME.seconds), and its JUnit file if it has one;
                                      the run began when FOLDER/begun was made

Exits with 1 if a test was skipped for want of a program that this machine could have installed.
"""

import re
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import programs

COLLECTION = re.compile(r"'Skipped: (.*)'\)$", re.DOTALL)
"""How pytest writes the reason of a file that was skipped whole."""


@dataclass
class Part:
    """One command of `make test`. skipped: reason -> tests."""

    name: str
    seconds: int
    tests: int = 0
    skipped: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


def read(seconds: Path) -> Part:
    """A part from its two files."""
    part = Part(seconds.stem, int(seconds.read_text()))
    report = seconds.with_suffix(".xml")
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            part.tests += 1
            for skip in case.iter("skipped"):
                whole_file = COLLECTION.search(skip.text or "")
                reason = whole_file[1] if whole_file else skip.get("message", "")
                part.skipped[reason].append(f"{case.get('classname') or ''}.{case.get('name')}".strip("."))
    return part


def table(parts: list[Part], seconds: int) -> str:
    """A line a part, and one for the run, which took `seconds`: fewer than its parts where some ran side by side."""
    rows = [(part.name, part.seconds, part.tests, sum(map(len, part.skipped.values()))) for part in parts]
    rows.append(("all", seconds, *(sum(row[place] for row in rows) for place in (2, 3))))
    lines = [f"{'part':13} {'seconds':>8} {'tests':>6} {'skipped':>8}"]
    lines += [f"{name:13} {took:8} {tests or '':>6} {skipped or '':>8}".rstrip() for name, took, tests, skipped in rows]
    return "\n".join(lines)


def skips(parts: list[Part]) -> tuple[str, list[str]]:
    """What was skipped and why, one line a reason; and programs for want of which something should not have been."""
    lines, avoidable = [], set()
    for part in parts:
        for reason, tests in sorted(part.skipped.items()):
            example = tests[0] if len(tests) == 1 else f"{tests[0]} and {len(tests) - 1} more"
            lines.append(f"skipped in {part.name}: {example}: {reason}")
            avoidable |= {name for name in programs.named_in(reason) if programs.PROGRAMS[name].installable()}
    return "\n".join(lines) or "nothing was skipped", sorted(avoidable)


def main(folder: str) -> int:
    """Print it; see above."""
    parts = [read(one) for one in sorted(Path(folder).glob("*.seconds"), key=lambda one: one.stat().st_mtime_ns)]
    said, avoidable = skips(parts)
    print(f"\n{table(parts, round(time.time() - (Path(folder) / 'begun').stat().st_mtime))}\n\n{said}")
    if avoidable:
        print(
            f"FAILED: tests were skipped for want of {', '.join(avoidable)}, which this machine can install: "
            "make programs"
        )
    return int(bool(avoidable))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
