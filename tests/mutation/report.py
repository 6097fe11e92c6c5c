"""The verdicts of mutants/*.jsonl as a table, and every mutant that is left with its explanation.

    python tests/mutation/report.py [REVISION]        prints Markdown; exit code 1 if a survivor is not explained

`explained.toml` holds groups of mutants that no test can tell from the original, or that none should: `why`, and for
each mutant a part of its module's path, and regular expressions that its function, the code before and the code after
match.
"""

import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from run import KILLED, ROOT, TIMEOUT, UNREACHED, rows

EXPLAINED = Path(__file__).with_name("explained.toml")
Row = dict[str, Any]


def explanation(row: Row, groups: Iterable[Row]) -> str | None:
    """Why a survivor may live; None where nobody has said."""
    for group in groups:
        for entry in group["mutants"]:
            if entry.get("module", "") in row["module"] and all(
                re.search(entry.get(name, ""), row[name]) for name in ("function", "was", "now")
            ):
                return str(group["why"])
    return None


def percent(part: int, whole: int) -> str:
    """A score; nothing of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else ""


def table(found: list[Row], groups: list[Row]) -> list[str]:
    """One line a module, and one for all: killed, and what is left."""
    modules = defaultdict(list)
    for row in found:
        modules[row["module"]].append(row)
    lines = [
        "| module | mutants | killed | explained | left | not reached |",
        "|---|---|---|---|---|---|",
    ]
    for name, here in [*modules.items(), ("all", found)]:
        killed = [row for row in here if row["verdict"] in (KILLED, TIMEOUT)]
        living = [row for row in here if row["verdict"] not in (KILLED, TIMEOUT)]
        known = sum(explanation(row, groups) is not None for row in living)
        unreached = sum(row["verdict"] == UNREACHED for row in living)
        file = f"`{name.removeprefix('selfspec_cli/')}`"
        dead = f"{len(killed)} ({percent(len(killed), len(here))})"
        cells = (file, len(here), dead, known, len(living) - known, unreached)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def main() -> int:
    """Print the table, the explained survivors by reason, and the others."""
    found = [row for file in sorted((ROOT / "mutants").glob("*.jsonl")) for row in rows(file)]
    groups = tomllib.loads(EXPLAINED.read_text(encoding="utf-8"))["group"] if EXPLAINED.exists() else []
    living: dict[str | None, list[Row]] = defaultdict(list)
    for row in found:
        if row["verdict"] not in (KILLED, TIMEOUT):
            living[explanation(row, groups)].append(row)
    left = living.pop(None, [])
    print("\n".join(table(found, groups)))
    for why, members in [*living.items(), ("Left", left)]:
        print(f"\n{why} ({len(members)})\n")
        for row in members:
            place = f"{row['module'].removeprefix('selfspec_cli/')}:{row['line']} {row['function']}"
            print(f"- {row['verdict']} {place}: `{row['was']}` → `{row['now']}`")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
