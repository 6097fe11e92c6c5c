"""Measure and print the quality of the arms of one results folder: speed, accept rate, perplexities, scores.

    python experiments/quality_table.py reference results/quality/reference            what to run, in order
    python experiments/quality_table.py reference results/quality/reference --run      run it, then the table
    python experiments/quality_table.py reference results/quality/reference --run --steps sweep
    python experiments/quality_table.py reference results/quality/reference --table    the table alone
    python experiments/quality_table.py smollm2 results/quality/smollm2 --run model=/models/smollm2

`reference` is the embedded model, `smollm2` a folder ./smollm2 made by smollm2.py, or the one that model= names. Other
programs on the machine change the speed of an arm and not its quality. So the sweep comes last, for a machine with
nothing else to do. On two quiet cores `reference` takes about half an hour and `smollm2` a quarter; `--steps verify`
takes two minutes more for each verified arm.
"""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from experiments.arguments import all_among
from selfspec_cli.record import folder, quality, tables
from selfspec_cli.record.columns import Record
from selfspec_cli.record.quality import GENERATED, GREEDY, Book, arm_in_words

EAGER = "engine.enforce_eager=true"  # nothing is timed, and an engine starts in a quarter of the time
GATES = ("none", "adaedl", "entropy", "margin", "maxp", "survival", "varH")
HEADS = "lsq,lsq_argmax,translator,translator_r15"
STEPS = {
    "reference": [
        f"fit head={HEADS} layer=4,8,12",
        f"ppl experiment=quality {EAGER} --document-tokens 512 --prompts 64 --length 48",
        f"eval experiment=quality {EAGER}",
        "sweep experiment=quality repeats=3",
        *(f"verify layer=4 k=4 gate={gate} {EAGER}" for gate in GATES),
    ],
    "smollm2": [
        f"ppl experiment=quality_smollm2 {EAGER} --document-tokens 256 --prompts 16 --length 32",
        f"eval experiment=quality_smollm2 {EAGER} --limit 25",
        "sweep experiment=quality_smollm2 repeats=3",
        f"verify model=./smollm2 model.name=smollm2 model.dtype=float32 layer=30 k=4 draft_weights=int8 {EAGER}",
    ],
}
KINDS = sorted({step.split()[0] for steps in STEPS.values() for step in steps})
COLUMNS = (
    "arm",
    "tok/s",
    "accept rate",
    "PPL of text",
    "ΔPPL",
    "ΔPPL of greedy",
    "ΔPPL of sampled",
    "same greedy",
    "scores",
    "verdict",
)


def main() -> None:
    """Print the commands, run them, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=STEPS)
    parser.add_argument("results", type=Path)
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument(
        "--steps",
        type=all_among(KINDS, "step"),
        default="fit,ppl,eval,sweep",
        help="by their commands; verify is another",
    )
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="given to every step")
    options = parser.parse_intermixed_args()
    wanted = [step for step in STEPS[options.model] if step.split()[0] in options.steps]
    for step in [] if options.table else wanted:
        own = {word.split("=")[0] for word in options.words}
        words = [word for word in shlex.split(step) if word.split("=")[0] not in own]
        words += [*options.words, f"results_dir={options.results}"]
        print("selfspec", shlex.join(words), flush=True)
        if options.run:
            subprocess.run([sys.executable, "-m", "selfspec_cli", *words], check=True)
    if options.run or options.table:
        print(table(options.results))


def table(results: Path) -> str:
    """Return the Markdown table of every arm of a folder."""
    return "".join(f"| {' | '.join(line)} |\n" for line in [COLUMNS, ["---"] * len(COLUMNS), *cells(results)])


def cells(results: Path) -> list[list[str]]:
    """Return COLUMNS of every arm of a folder: the baseline first, then skip, then verified arms.

    Arms are matched by name and not by key, because a folder may hold findings of several commits.
    """
    book = quality.read(results)
    findings = sorted(book.findings.values(), key=lambda finding: finding.time)
    arms = {arm_in_words(finding.arm): finding.arm for finding in findings}
    quality_columns: dict[str, dict[str, Any]] = {name: {} for name in arms}
    verdicts = {arm_in_words(verdict["arm"]): verdict for verdict in book.verdicts.values() if "arm" in verdict}
    greedy: dict[str, dict[str, Any]] = {name: {} for name in arms}
    for finding in findings:
        name = arm_in_words(finding.arm)
        verdict = {finding.arm_key: verdicts[name]} if name in verdicts else {}
        one_finding = Book({(finding.kind, finding.arm_key): finding}, verdict)
        quality_columns[name] |= one_finding.columns(finding.arm_key, "")
        greedy[name] |= finding.found.get(GREEDY, {}) if finding.kind == GENERATED else {}
    rows = {arm_in_words(point.arm): tables.row(point) for point in folder.read(results)[0] if point.ok}
    order = ("baseline", "skip", "layer_skip")
    names = sorted(arms, key=lambda name: (order.index(arms[name]["arm"]), arms[name].get("E") or 0))
    return [_line(name, quality_columns[name], greedy[name], rows.get(name)) for name in names]


def _line(name: str, columns: dict[str, Any], greedy: dict[str, Any], row: Record | None) -> list[str]:
    speed = f"{row.tok_s_median:,.0f}" if row is not None and row.tok_s_median else ""
    rate = row.accept_rate if row is not None else None
    if rate is None and greedy.get("drafted"):
        rate = greedy["accepted"] / greedy["drafted"]
    return [
        name,
        speed,
        "" if rate is None else f"{rate:.0%}",
        _value(columns, "ppl", "{:,.2f}"),
        *(_value(columns, name, "{:+,.2f}") for name in ("delta_ppl", "delta_ppl_of_greedy", "delta_ppl_of_sampled")),
        f"{greedy['identical']} of {greedy['outputs']}" if "identical" in greedy else "",
        str(columns.get("scores", "")).replace("; ", "<br>"),
        str(columns.get("verdict", "")),
    ]


def _value(columns: dict[str, Any], name: str, form: str) -> str:
    value, low, high = (columns.get(part) for part in (name, f"{name}_low", f"{name}_high"))
    if value is None:
        return ""
    return form.format(value) + ("" if low is None else f" ({form.format(low)} to {form.format(high)})")


if __name__ == "__main__":
    main()
