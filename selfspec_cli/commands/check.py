"""`selfspec check`: is the speed still what a file asks for; the verdict as a table, as JSON and as JUnit XML."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from xml.etree import ElementTree

import typer

from selfspec_cli.commands import configs, screen
from selfspec_cli.commands.measuring import ENGINES, Backend, tracked
from selfspec_cli.commands.screen import ROWS_KEPT, RUN_FAILED, Output, say, warn
from selfspec_cli.commands.serve import as_loads, servers
from selfspec_cli.commands.shared import Overrides, command
from selfspec_cli.commands.working import at_work
from selfspec_cli.config.schema import ConfigError, RunConfig
from selfspec_cli.early_exit.errors import closest
from selfspec_cli.record import folder as results_folder
from selfspec_cli.stages import check as stage
from selfspec_cli.stages import plan, preflight
from selfspec_cli.stages.check import ABSENT, GREEN, RED, UNSURE, CheckFile, Result
from selfspec_cli.vllm_plugin.wrap import FAULTS_FOLDER
from selfspec_cli.whole import written

STYLES = {GREEN: "green", RED: "bold red", UNSURE: "yellow"}
PLANTS = "planted"  # folder of runs with a fault, below the results folder


@command(
    epilog="Examples: selfspec check experiments/checks/cpu_micro.yaml   ·   selfspec check "
    "experiments/checks/h100_8b.yaml results_dir=results/h100 --junit checks.xml",
    settings=False,
    then=ROWS_KEPT,
)
def check(
    out: Output,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="One of experiments/checks/; docs/report.md.")],
    overrides: Overrides = None,
    junit: Annotated[Path | None, typer.Option("--junit", help="Write the verdict as JUnit XML, too.")] = None,
    plant: Annotated[
        str | None, typer.Option("--plant", help="Plant a fault that costs speed: the verdict must be red.")
    ] = None,
) -> None:
    """Performance check: is the speed still what FILE asks for? Exit code 0: green; 1: red, or not measurable, which
    the last line says; 2: bad input."""
    asked = stage.with_words(stage.read(file), overrides or [])
    cfgs = _configs(asked, file, plant)
    folder = Path(plan.results_dir(cfgs))
    if out.dry_run:
        points = plan.plan(cfgs, results_folder.read(folder)[0], again=True)
        limits = {case.name: [*map(str, case.reach), *case.invariants] for case in asked.cases}
        if not out.as_json:
            screen.show_plan(points)
        return out.answer(screen.plan_document(points) | limits, lambda: screen.show_facts(limits))
    preflight.check_device(cfgs[0])
    backend: Backend = servers(cfgs, []) if asked.served else ENGINES
    run_id = results_folder.new_run_id()
    with tracked("check", cfgs[0]), at_work("check", folder, out.debug) as shown:
        open_engine, bench = backend.opened(shown, run_id)
        document = stage.run(
            asked, cfgs, open_engine=open_engine, bench=bench, progress=shown, plant=plant, run_id=run_id
        )
    if junit is not None:
        with written(junit) as part:
            part.write_bytes(as_junit(document))
    out.answer(document, lambda: show(document))
    raise typer.Exit(0 if document["outcome"] == GREEN else RUN_FAILED)


def _configs(asked: CheckFile, path: Path, plant: str | None) -> list[RunConfig]:
    """The checked config of each case. Raises ConfigError: a setting, or `plant`, does not go with this file."""
    cfgs = [configs.one([*case.words], None) for case in asked.cases]
    cfgs = as_loads(cfgs) if asked.served else cfgs
    if plant is not None:
        if plant not in stage.PLANTED:
            raise ConfigError(closest(plant, stage.PLANTED, "--plant"))
        if not FAULTS_FOLDER.is_dir():
            raise ConfigError(f"--plant {plant}: the faults come with the repository, not with the package")
        if asked.served:
            raise ConfigError(f"--plant {plant}: faults are planted in engines, and {path} is about servers")
        cfgs = [replace(cfg, results_dir=str(Path(cfg.results_dir) / PLANTS)) for cfg in cfgs]
    found = configs.runnable(cfgs)
    warn(preflight.warnings(found))
    return found


def show(document: dict[str, Any]) -> None:
    """A table for each case, and the verdict in one line."""
    results = [Result(**one) for one in document["results"]]
    for name in dict.fromkeys(result.case for result in results):
        of_case = [result for result in results if result.case == name and result.outcome != ABSENT]
        say(name, "bold")
        screen.table(
            ("asked for", "measured", "outcome"),
            [(one.asked, one.measured, ": ".join(filter(None, (one.outcome, one.note)))) for one in of_case],
            text=(0, 2),
            styles=[STYLES[result.outcome] for result in of_case],
        )
    absent = [result for result in results if result.outcome == ABSENT]
    for note in dict.fromkeys(result.note for result in absent):
        names = dict.fromkeys(result.asked.partition(" ")[0] for result in absent if result.note == note)
        say(f"{ABSENT}, because {note}: {', '.join(names)}", "dim")
    say(f"{document['outcome']}: {in_short(document)}", "bold")
    say(f"{document['seconds']} s, {len(document['points'])} points; {document['file']}")


def in_short(document: dict[str, Any]) -> str:
    """The verdict's reason on one line."""
    of = [f"{one['case']}, {one['asked']}" for one in document["results"] if one["outcome"] == document["outcome"]]
    times = f"after {document['runs']} run{'s' if document['runs'] > 1 else ''}"
    if document["outcome"] == GREEN:
        return f"{len(of)} limits of {document['check']} {times}"
    return f"{'; '.join(of[:4])}{f' and {len(of) - 4} more' if len(of) > 4 else ''} ({times})"


def as_junit(document: dict[str, Any]) -> bytes:
    """The verdict as JUnit XML: red is a failure, not measurable an error, not applicable skipped."""
    results = [Result(**one) for one in document["results"]]
    tags = {RED: "failure", UNSURE: "error", ABSENT: "skipped"}
    suite = ElementTree.Element(
        "testsuite",
        name=document["check"],
        tests=str(len(results)),
        time=str(document["seconds"]),
        timestamp=document["time"],
    )
    for outcome, name in ((RED, "failures"), (UNSURE, "errors"), (ABSENT, "skipped")):
        suite.set(name, str(sum(result.outcome == outcome for result in results)))
    for result in results:
        case = ElementTree.SubElement(suite, "testcase", classname=result.case, name=result.asked)
        if result.outcome in tags:
            message = ": ".join(filter(None, (result.outcome, result.measured, result.note)))
            ElementTree.SubElement(case, tags[result.outcome], message=message)
    return bytes(ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)) + b"\n"
