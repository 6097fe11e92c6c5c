"""`selfspec serve` and `selfspec load`: become vLLM's server, and put servers under load."""

import argparse
import errno
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from selfspec_cli.commands import configs
from selfspec_cli.commands.measuring import Backend, SweepOptions, begun, measure
from selfspec_cli.commands.screen import ROWS_KEPT, Output, note, say, warn
from selfspec_cli.commands.shared import Config, Overrides, command, split_at_dashes
from selfspec_cli.commands.working import LOGS
from selfspec_cli.config.schema import ConfigError, Method, RunConfig
from selfspec_cli.config.validation import validate
from selfspec_cli.early_exit.errors import on_one_line
from selfspec_cli.early_exit.settings import OPTIONS
from selfspec_cli.engine import deployment, server
from selfspec_cli.engine.server import listening_error
from selfspec_cli.load_patterns.trace import asked_requests
from selfspec_cli.progress import Progress
from selfspec_cli.record import tables
from selfspec_cli.record.tables import asked as asked_in_words
from selfspec_cli.record.tables import searched
from selfspec_cli.report import make as report_stage
from selfspec_cli.report.rows import label
from selfspec_cli.stages import load as stage
from selfspec_cli.stages import preflight, replicas
from selfspec_cli.stages.plan import results_dir


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
        typer.Option(
            "--slo",
            help="Find the greatest load that keeps a limit in ms: ttft_p99=200; repeatable. Two SLOs: 200,500.",
        ),
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


@command(
    epilog="Examples: selfspec serve tuned=llama3_8b engine=gpu   ·   selfspec serve layer=3 k=4 gate=margin -- "
    "--port 8001 --api-key KEY   ·   selfspec serve tuned=llama3_8b engine=gpu replicas=2"
)
def serve(out: Output, overrides: Overrides = None, config: Config = None) -> None:
    """Start vLLM's OpenAI-compatible server with draft settings; what you type after -- is handed to vLLM unchanged.
    replicas=N starts N servers, each on GPUs of its own, behind one address."""
    words, more = split_at_dashes(overrides)
    count, router, own = replicas.asked(words)
    cfg = configs.one(own, config)
    warn(_without_effect(own))
    one_line = config is None and not any(map(_says_how_to_draft, own))
    preflight.check(cfg, served=True)
    cfg = preflight.for_this_machine([cfg])[0]
    # Where the engine chooses what drafts it warns of that itself; the config has other drafts.
    warn(preflight.warnings([replace(cfg, method=Method.baseline) if one_line else cfg]))
    made = deployment.deployment(cfg, Path(cfg.results_dir) / deployment.FOLDER)
    if one_line:
        made = replace(made, speculative_config={"method": "selfspec"})
    plan = {"dry_run": True, "speculative_config": made.speculative_config}
    if count > 1:
        servers, front = replicas.plan(made, cfg, more, count, router)
        lines = [deployment.shell_line(one.command, one.environment) for one in (*servers, front)]
        if out.dry_run:
            return out.answer(plan | {"commands": lines}, lambda: say("\n".join(lines)))
        preflight.check_device(cfg)
        check_port(more)
        return replicas.serve(servers, front, Path(cfg.results_dir) / LOGS, note)
    line = " ".join([made.line(), *map(shlex.quote, more)])
    if out.dry_run:
        return out.answer(plan | {"command": line}, lambda: say(line))
    preflight.check_device(cfg)
    check_port(more)
    note(f"starting: {line}")
    sys.stdout.flush()
    with suppress(OSError):  # a stdout that a test captures is no file
        os.dup2(sys.stdout.fileno(), 1)
    program = [*made.command(), *more]
    os.execvpe(program[0], program, {**os.environ, **made.environment})  # vLLM keeps this id, and gets its signals


def _says_how_to_draft(word: str) -> bool:
    """Whether an override is one of drafting; tuned settings and experiments are too."""
    key = word.partition("=")[0]
    return key in ("tuned", "experiment", "method", "speculative") or key in OPTIONS or key.partition(".")[0] in OPTIONS


OF_MEASURING = ("workload", "load", "tracker", "launcher", "repeats", "warmup", "perplexity_tokens")
"""Settings of a measurement, by their first part: a server has its requests from clients."""


def _without_effect(words: Sequence[str]) -> list[str]:
    idle = [word for word in words if word.partition("=")[0].partition(".")[0] in OF_MEASURING]
    hint = "each request says its own, such as temperature, max_tokens and seed"
    return [f"{' '.join(idle)}: without effect on a server; {hint}"] if idle else []


def check_port(options: Sequence[str]) -> None:
    """See that the address of vLLM's server is free, which looks only after it has loaded the model; raises
    ConfigError. options: of vLLM's server; without --host and --port it answers at port 8000 of every address."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--host", default="")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--uds")
    try:
        found = parser.parse_known_args(list(options))[0]
    except argparse.ArgumentError:
        return  # what vLLM does not understand it says itself
    if found.uds is not None:
        return
    if not 0 <= found.port <= 65535:
        raise ConfigError(f"-- --port {found.port}: allowed: from 0 to 65535")
    error = listening_error(found.host, found.port)
    if error is not None and error.errno == errno.EADDRINUSE:
        raise ConfigError(
            f"port {found.port} is in use by another program; name a free one: -- --port {found.port + 1}"
        ) from error
