"""`selfspec load`: put servers under load."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from selfspec_cli.commands import configs
from selfspec_cli.commands.measuring import Backend, SweepOptions, begun, measure
from selfspec_cli.commands.screen import ROWS_KEPT, Output, warn
from selfspec_cli.commands.shared import Config, Overrides, command, split_at_dashes
from selfspec_cli.config.schema import RunConfig
from selfspec_cli.config.validation import validate
from selfspec_cli.early_exit.errors import on_one_line
from selfspec_cli.engine import server
from selfspec_cli.load_patterns.trace import asked_requests
from selfspec_cli.progress import Progress
from selfspec_cli.record import tables
from selfspec_cli.record.tables import asked as asked_in_words
from selfspec_cli.record.tables import searched
from selfspec_cli.report import make as report_stage
from selfspec_cli.report.rows import label
from selfspec_cli.stages import load as stage
from selfspec_cli.stages import preflight
from selfspec_cli.stages.plan import results_dir

LOGS = "logs"


@command(
    epilog="Examples: selfspec load experiment=soak   ·   selfspec load layer=3 k=4 load.clients=1,8,32   ·   "
    "selfspec load load.share=0.3,0.6,0.9 load.tpot_limit=50",
    then=ROWS_KEPT,
)
def load(
    out: Output,
    overrides: Overrides = None,
    config: Config = None,
    limit: Annotated[
        list[str] | None,
        typer.Option("--slo", help="Find the greatest load that keeps a limit in ms: ttft_p99=200; repeatable."),
    ] = None,
) -> None:
    """Load-test servers: closed loop, Poisson or bursty arrivals, a soak; the baseline and each arm, one after the
    other. With --slo: the most clients and the greatest rate that keep limits of latency. What stands behind -- goes to
    the servers."""
    words, more = split_at_dashes(overrides)
    runs = as_loads(stage.as_searches(configs.several(words, config=config), limit or []))
    for cfg in runs:
        if not out.dry_run and cfg.load.kind:
            _check_prompts(cfg)
    measure("load", runs, SweepOptions(again=True), out, servers(runs, more))


def as_loads(cfgs: Sequence[RunConfig]) -> list[RunConfig]:
    """Configs as load tests, checked as such; raises ConfigError."""
    found = [stage.asked(cfg) for cfg in cfgs]
    for cfg in found:
        validate(cfg)
    return found


def servers(runs: Sequence[RunConfig], more: Sequence[str]) -> Backend:
    """Servers in place of engines, for the baseline and for each arm, one after the other. more: options of vLLM's."""
    folder = Path(results_dir(runs))

    def opened(shown: Progress, run_id: str) -> tuple[Any, Any]:
        @contextmanager
        def open_server(cfg: RunConfig) -> Iterator[server.Server]:
            shown.starting(f"{cfg.model.name}, {label(tables.planned(cfg))}, as a server")
            log = folder / LOGS / f"{run_id}-server-{len(list((folder / LOGS).glob(f'{run_id}-server-*'))) + 1}.log"
            with begun(shown, server.open_server(cfg, more, log, folder / "deploy")) as found:
                yield found

        return open_server, stage.Search(stage.Loader(folder / stage.FOLDER / run_id))

    return Backend(opened, _warnings, _searched, _page)


def _searched(points: Sequence[Any]) -> list[str]:
    rows = [(point, tables.row(point)) for point in points]
    return [f"{label(row)}: {words}" for point, row in rows if (words := searched(point, row)) is not None]


def _check_prompts(cfg: RunConfig) -> None:
    """Refuse prompts that cannot be had before a server has started."""
    from selfspec_cli.texts import prompt_files

    preflight.check_prompts(cfg)
    if cfg.load.trace is not None:
        asked_requests(cfg.load)
    elif prompt_files.is_prompt_file(cfg.workload.prompts):
        prompt_files.read(cfg.workload.prompts, cfg.load.column)


def _warnings(points: Sequence[Any]) -> list[str]:
    """What the points of a command say against their own figures."""
    return [
        f"{label(row)}, {asked_in_words(row)}: {warning}"
        for point in points
        for row in [tables.row(point)]
        for warning in stage.warnings(point.engine)
    ]


def _page(folder: Path) -> Path | None:
    """The report page of a folder; None where it could not be made, which is a warning."""
    try:
        return report_stage.run(folder, folder)[1]
    except Exception as error:
        warn([f"the page could not be made: {on_one_line(error)}"])
        return None
