"""The tables of docs/quality.md: speed, accept rate, perplexities and scores of arms, from one results folder.

    python experiments/quality_table.py reference results/published/quality/reference            what to run, in order
    python experiments/quality_table.py reference results/published/quality/reference --run      run it, then the table
    python experiments/quality_table.py reference results/published/quality/reference --table    the table alone

`reference` is the embedded model, `smollm2` a folder ./smollm2 made by smollm2.py. The quality of an arm does not hang
on who else works on the machine; its speed does, and so the sweep stands last, for a machine with nothing beside it.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from selfspec_cli.record import folder, quality, tables
from selfspec_cli.record.quality import GENERATED, arm_in_words
from selfspec_cli.record.tables import Record

EAGER = "engine.enforce_eager=true"  # nothing is timed, and an engine starts in a quarter of the time
HEADS = "lsq,lsq_argmax,translator,translator_r15"
STEPS = {
    "reference": [
        f"fit head={HEADS} layer=4,8,12",
        f"ppl experiment=quality {EAGER} --document-tokens 1024",
        f"eval experiment=quality {EAGER}",
        "sweep experiment=quality",
    ],
    "smollm2": [
        f"ppl experiment=quality_smollm2 {EAGER} --document-tokens 256 --prompts 16 --length 32",
        f"eval experiment=quality_smollm2 {EAGER} --limit 25",
        "sweep experiment=quality_smollm2",
    ],
}
COLUMNS = (
    "arm", "tok/s", "accept rate", "PPL of text", "ΔPPL", "ΔPPL of greedy", "ΔPPL of sampled", "same greedy", "scores",
)  # fmt: skip


def main() -> None:
    """Say what to run, run it, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=STEPS)
    parser.add_argument("results", type=Path)
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    for step in [] if options.table else STEPS[options.model]:
        words = [*shlex.split(step), f"results_dir={options.results}"]
        print("selfspec", shlex.join(words), flush=True)
        if options.run:
            subprocess.run([sys.executable, "-m", "selfspec_cli", *words], check=True)
    if options.run or options.table:
        text = table(options.results)
        (options.results / "table.md").write_text(text, encoding="utf-8")
        print(text)


def table(results: Path) -> str:
    """The Markdown table of every arm of a folder: baseline first, then skip, then what is verified."""
    book = quality.read(results)
    rows = {point.arm_key: tables.row(point) for point in folder.read(results)[0] if point.ok}
    arms = {finding.arm_key: finding.arm for finding in book.findings.values()}
    order = ("baseline", "skip", "layer_skip")
    keys = sorted(arms, key=lambda key: (order.index(arms[key]["arm"]), arms[key].get("E") or 0))
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(_line(arms[key], key, book, rows.get(key)) for key in keys)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _line(arm: dict[str, object], key: str, book: quality.Book, row: Record | None) -> list[str]:
    found = book.columns(key, "")
    generated = book.findings.get((GENERATED, key))
    greedy = generated.found.get(quality.GREEDY, {}) if generated is not None else {}
    speed = f"{row.tok_s_median:,.0f}" if row is not None and row.tok_s_median else ""
    rate = row.accept_rate if row is not None else None
    if rate is None and greedy.get("drafted"):
        rate = greedy["accepted"] / greedy["drafted"]
    return [
        arm_in_words(arm), speed, "" if rate is None else f"{rate:.0%}", _value(found, "ppl", "{:.2f}"),
        *(_value(found, name, "{:+.2f}") for name in ("delta_ppl", "delta_ppl_of_greedy", "delta_ppl_of_sampled")),
        f"{greedy['identical']} of {greedy['outputs']}" if "identical" in greedy else "",
        str(found.get("scores", "")).replace("; ", "<br>"),
    ]  # fmt: skip


def _value(found: dict[str, object], name: str, form: str) -> str:
    value, low, high = (found.get(part) for part in (name, f"{name}_low", f"{name}_high"))
    if value is None:
        return ""
    return form.format(value) + ("" if low is None else f" ({form.format(low)} to {form.format(high)})")


if __name__ == "__main__":
    main()
