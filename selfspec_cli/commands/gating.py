"""`selfspec gate`: what it does with words, and its verdict as a table, as JSON and for a continuous integration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import typer
from rich.console import Console
from rich.table import Table

from selfspec_cli.commands import configs, loading, screen
from selfspec_cli.commands.measuring import ENGINES, Means
from selfspec_cli.commands.screen import RUN_FAILED, emit, say, warn
from selfspec_cli.commands.tracked import tracked
from selfspec_cli.commands.working import at_work
from selfspec_cli.config.keys import Keys
from selfspec_cli.config.schema import ConfigError
from selfspec_cli.early_exit.errors import closest
from selfspec_cli.record import folder as results_folder
from selfspec_cli.stages import gate as stage
from selfspec_cli.stages import gate_file, plan, preflight
from selfspec_cli.stages.gate_verdict import ABSENT, GREEN, RED, UNSURE, Check
from selfspec_cli.whole import written

STYLES = {GREEN: "green", RED: "bold red", UNSURE: "yellow"}
WIDTH = 160  # of a table that no terminal shows
PLANTS = "planted"  # folder of runs with a fault, below the results folder


def gate(
    path: Path, words: Sequence[str], *, plant: str | None, junit: Path | None, as_json: bool, dry_run: bool,
    debug: bool,
) -> None:  # fmt: skip
    """Measure and judge; the exit code: 0 green, 1 red or not measurable, which the last line says in words."""
    file = gate_file.with_words(gate_file.read(path), words)
    cfgs = [configs.one([*one.words], None) for one in file.gates]
    cfgs = loading.as_loads(cfgs) if file.served else cfgs
    if plant is not None and plant not in stage.PLANTED:
        raise ConfigError(closest(plant, stage.PLANTED, "--plant"))
    if plant is not None and file.served:
        raise ConfigError(f"--plant {plant}: faults are planted in engines, and {path} is about servers")
    if plant is not None:
        cfgs = [replace(cfg, results_dir=str(Path(cfg.results_dir) / PLANTS)) for cfg in cfgs]
    preflight.check_all(cfgs)
    asked, cfgs = cfgs, preflight.for_this_machine([preflight.with_calibration(cfg) for cfg in cfgs])
    eager = [one.engine for one in asked] != [one.engine for one in cfgs]
    warn([*preflight.warnings(cfgs), *([configs.NO_COMPILER] if eager else [])])
    folder = Path(plan.results_dir(cfgs))
    if dry_run:
        points = plan.plan(cfgs, results_folder.heads(folder), again=True)
        more: dict[str, Any] = {"refused": stage.refusal(file, folder, Keys().device(cfgs[0]))}
        more |= {one.name: [*map(str, one.reach), *one.invariants] for one in file.gates}
        if as_json:
            return emit(screen.plan_document(points) | more)
        screen.show_plan(points)
        return screen.show_facts(more)
    preflight.check_device(cfgs[0])
    means: Means = loading.servers(cfgs, []) if file.served else ENGINES
    run_id = results_folder.new_run_id()
    with tracked("gate", cfgs[0]), at_work("gate", folder, debug) as shown:
        open_engine, bench = means.opened(shown, run_id)
        document = stage.run(file, cfgs, open_engine=open_engine, bench=bench, progress=shown, plant=plant,
                             run_id=run_id)  # fmt: skip
    if junit is not None:
        with written(junit) as part:
            part.write_bytes(as_junit(document))
    emit(document) if as_json else show(document)
    raise typer.Exit(0 if document["outcome"] == GREEN else RUN_FAILED)


def show(document: dict[str, Any]) -> None:
    """A table for each gate, and the verdict in one line."""
    checks, console = [Check(**one) for one in document["checks"]], Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=WIDTH)
    for name in dict.fromkeys(check.gate for check in checks):
        table = Table(title=name, title_justify="left", title_style="bold", header_style="bold", box=None)
        for column in ("asked for", "measured", "outcome"):
            table.add_column(column, justify="right" if column == "measured" else "left", overflow="fold")
        for check in (check for check in checks if check.gate == name and check.outcome != ABSENT):
            said = check.outcome + (f": {check.note}" if check.note else "")
            table.add_row(check.asked, check.measured, said, style=STYLES[check.outcome])
        console.print(table)
    absent = [check for check in checks if check.outcome == ABSENT]
    for note in dict.fromkeys(check.note for check in absent):
        names = dict.fromkeys(check.asked.partition(" ")[0] for check in absent if check.note == note)
        say(f"{ABSENT}, because {note}: {', '.join(names)}", "dim")
    say(f"{document['outcome']}: {in_short(document)}", "bold")
    say(f"{document['seconds']} s, {len(document['points'])} points; {document['file']}")


def in_short(document: dict[str, Any]) -> str:
    """The verdict's reason on one line."""
    of = [f"{one['gate']}, {one['asked']}" for one in document["checks"] if one["outcome"] == document["outcome"]]
    times = f"after {document['runs']} run{'s' if document['runs'] > 1 else ''}"
    if document["outcome"] == GREEN:
        return f"{len(of)} checks of {document['gate']} {times}"
    return f"{'; '.join(of[:4])}{f' and {len(of) - 4} more' if len(of) > 4 else ''} ({times})"


def as_junit(document: dict[str, Any]) -> bytes:
    """The verdict as JUnit XML: red is a failure, not measurable an error, not applicable skipped."""
    checks = [Check(**one) for one in document["checks"]]
    tags = {RED: "failure", UNSURE: "error", ABSENT: "skipped"}
    suite = ElementTree.Element("testsuite", name=document["gate"], tests=str(len(checks)),
                                time=str(document["seconds"]), timestamp=document["time"])  # fmt: skip
    for outcome, name in ((RED, "failures"), (UNSURE, "errors"), (ABSENT, "skipped")):
        suite.set(name, str(sum(check.outcome == outcome for check in checks)))
    for check in checks:
        case = ElementTree.SubElement(suite, "testcase", classname=check.gate, name=check.asked)
        if check.outcome in tags:
            message = ": ".join(filter(None, (check.outcome, check.measured, check.note)))
            ElementTree.SubElement(case, tags[check.outcome], message=message)
    return bytes(ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)) + b"\n"
