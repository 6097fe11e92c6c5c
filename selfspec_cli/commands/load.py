"""`selfspec load`: put servers under load that it starts, or that run already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from selfspec_cli.commands import configs
from selfspec_cli.commands.measuring import Backend, SweepOptions, measure, tracked
from selfspec_cli.commands.screen import ROWS_KEPT, Output, emit, say, warn
from selfspec_cli.commands.shared import Config, Overrides, command, split_at_dashes
from selfspec_cli.commands.working import at_work
from selfspec_cli.config.keys import baseline_of
from selfspec_cli.config.schema import ConfigError, RunConfig
from selfspec_cli.config.validation import validate
from selfspec_cli.early_exit.errors import on_one_line
from selfspec_cli.engine import clients, server
from selfspec_cli.load_patterns.trace import asked_requests
from selfspec_cli.progress import Progress
from selfspec_cli.record import folder as results_folder
from selfspec_cli.record import tables
from selfspec_cli.record.columns import plain
from selfspec_cli.record.load_words import asked as asked_in_words
from selfspec_cli.record.load_words import searched
from selfspec_cli.report import make as report_stage
from selfspec_cli.report.rows import label
from selfspec_cli.stages import load as stage
from selfspec_cli.stages import load_url, preflight, slo
from selfspec_cli.stages.plan import results_dir

LOGS = "logs"


@dataclass(frozen=True)
class Elsewhere:
    """Servers that run already. baseline: what the one at `url` is compared with. model: one of several that it serves.
    chat: ask for chats. knows_model: the user has said which model it is, so that prompts can be token ids."""

    url: str
    baseline: str | None = None
    model: str | None = None
    chat: bool = False
    knows_model: bool = False

    @property
    def path(self) -> str:
        """Of the API."""
        return clients.CHAT if self.chat else clients.COMPLETIONS


@command(
    epilog="Examples: selfspec load experiment=soak   ·   selfspec load layer=3 k=4 load.clients=1,8,32   ·   "
    "selfspec load load.share=0.3,0.6,0.9 load.tpot_limit=50   ·   "
    "selfspec load --url http://localhost:8000 load.rate=2",
    then=ROWS_KEPT,
)
def load(
    out: Output,
    overrides: Overrides = None,
    config: Config = None,
    url: Annotated[
        str | None, typer.Option("--url", help="Ask the server that runs there, instead of starting servers.")
    ] = None,
    baseline_url: Annotated[
        str | None, typer.Option("--baseline-url", help="With --url: a server to compare it with.")
    ] = None,
    served_model: Annotated[
        str | None, typer.Option("--served-model", help="With --url: which of its models; its first one.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="With --url: ask for chats, not for completions.")] = False,
    limit: Annotated[
        list[str] | None,
        typer.Option("--slo", help="Find the greatest load that keeps a limit in ms: ttft_p99=200; repeatable."),
    ] = None,
) -> None:
    """Load-test servers: closed loop, Poisson or bursty arrivals, a soak; the baseline and each arm, one after the
    other, or one that runs already. With --slo: the most clients and the greatest rate that keep limits of latency.
    What stands behind -- goes to the servers that are started."""
    words, more = split_at_dashes(overrides)
    runs = as_loads(slo.as_searches(configs.several(words, config=config), limit or []))
    if url is None:
        refuse_without_url(baseline_url=baseline_url, served_model=served_model, chat=chat)
        for cfg in runs:
            server.front_end(cfg)
            if not out.dry_run and cfg.load.kind:
                _check_prompts(cfg)
        return measure("load", runs, SweepOptions(again=True), out, servers(runs, more))
    knows = config is not None or any(word.startswith(("model=", "model.")) for word in words)
    where = Elsewhere(url, baseline_url, served_model, chat, knows and not chat)
    elsewhere(of_elsewhere(runs), where, out)


def refuse_without_url(**given: Any) -> None:
    """Refuse options that only a server elsewhere has; raises ConfigError."""
    for name, value in given.items():
        if value:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} is about a server that runs already: say where it is with --url")


def as_loads(cfgs: Sequence[RunConfig]) -> list[RunConfig]:
    """Configs as load tests, checked as such; raises ConfigError."""
    found = [stage.asked(cfg) for cfg in cfgs]
    for cfg in found:
        validate(cfg)
    return found


def servers(runs: Sequence[RunConfig], more: Sequence[str]) -> Backend:
    """Servers in place of engines, for the baseline and for each arm, one after the other. more: options of vLLM's."""
    return Backend(lambda shown, run_id: _servers(runs, more, shown, run_id), _warnings, _searched, _page)


def _searched(points: Sequence[Any]) -> list[str]:
    """What each search for the greatest load found."""
    rows = [(point, tables.row(point)) for point in points]
    return [f"{label(row)}: {words}" for point, row in rows if (words := searched(point, row)) is not None]


def _check_prompts(cfg: RunConfig) -> None:
    """Refuse prompts that cannot be had before a server has started; raises ConfigError."""
    from selfspec_cli.texts import prompt_files

    preflight.check_prompts(cfg)
    if cfg.load.trace is not None:
        asked_requests(cfg.load)
    elif prompt_files.is_prompt_file(cfg.workload.prompts):
        prompt_files.read(cfg.workload.prompts, cfg.load.column)


def _servers(runs: Sequence[RunConfig], more: Sequence[str], shown: Progress, run_id: str) -> tuple[Any, Any]:
    """What a sweep opens in place of an engine, and its bench."""
    folder = Path(results_dir(runs))

    @contextmanager
    def open_server(cfg: RunConfig) -> Iterator[server.Server]:
        name = f"{cfg.model.name}, {label(tables.planned(cfg))}"
        shown.starting(f"{name}, as a server")
        log = folder / LOGS / f"{run_id}-server-{len(list((folder / LOGS).glob(f'{run_id}-server-*'))) + 1}.log"
        with ExitStack() as stack:
            try:
                found = stack.enter_context(server.open_server(cfg, more, log, folder / "deploy"))
            finally:
                shown.started()
            yield found

    opened: Any = open_server
    return opened, slo.Search(stage.Loader(folder / stage.FOLDER / run_id))


def elsewhere(runs: list[RunConfig], where: Elsewhere, out: Output) -> None:
    """Ask servers that run already; the exit code says how it went."""
    folder = Path(results_dir(runs))
    preflight.check_folder(str(folder))
    if any(cfg.load.frontend == "rust" for cfg in runs):
        raise ConfigError("load.frontend is about servers that selfspec starts; the one at --url has its own")
    urls = [url for url in (where.baseline, where.url) if url is not None]
    load_url.check(runs, urls)
    for cfg in runs:
        _check_prompts(cfg)
    loads = list(dict.fromkeys(asked_in_words(tables.planned(cfg)) for cfg in runs))
    if out.dry_run:
        return out.plan({"servers": urls, "path": where.path, "loads": loads, "repeats": runs[0].load.repeats})
    asked = [server.connect(url, where.model) for url in urls]
    run_id = results_folder.new_run_id()
    loader = stage.Loader(folder / stage.FOLDER / run_id, where.path, where.knows_model)
    loader.ignores_eos = all(_takes_ignore_eos(one, where.path) for one in asked)
    warn([] if loader.ignores_eos else ["the server does not know ignore_eos: requests may end before their length"])
    with tracked("load", runs[0]), at_work("load", folder, out.debug) as shown:
        result = load_url.run(runs, asked, slo.Search(loader), loader.path, run_id=run_id, progress=shown)
    warn([*result.warnings, *_warnings(result.points)])
    page, searches = _page(folder), _searched(result.points)
    if out.as_json:
        rows = [plain(row) for row in result.rows]
        document = {"run_id": run_id, "rows": rows, "page": page, "warnings": result.warnings}
        emit(document | ({"found": searches} if searches else {}))
    else:
        from selfspec_cli.report import table

        table.show(result.rows, Console())
        for line in searches:
            say(line)
        say(f"rows in {folder / results_folder.SUMMARY}; page: {page}")
    raise typer.Exit(result.exit_code)


def _takes_ignore_eos(server_: server.Server, path: str) -> bool:
    """Whether a server answers a request that asks it to go on behind the end of the text; asks it for two tokens.

    Raises:
        ConfigError: it answers neither that nor a request without it.
    """
    prompt: dict[str, Any] = {"prompt": "1 2 3"}
    if path == clients.CHAT:
        prompt = {"messages": [{"role": "user", "content": "1 2 3"}]}
    body = {"model": server_.model, "max_tokens": 2, "temperature": 0} | prompt
    for more in ({"ignore_eos": True}, {}):
        try:
            server.ask(f"{server_.url}{path}", body | more)
            return bool(more)
        except OSError as error:
            problem = error
    read = getattr(problem, "read", None)
    answer = " ".join(read().decode(errors="replace").split())[:200] if read is not None else ""
    raise ConfigError(
        f"--url {server_.url}: {path} answers {problem} {answer}".rstrip()
        + ("" if path == clients.CHAT else "; --chat asks for chats")
    ) from problem


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


def of_elsewhere(runs: Sequence[RunConfig]) -> list[RunConfig]:
    """Each load once, without what would say how a server drafts: of one that runs already nobody here knows it."""
    return list({repr((cfg.workload, cfg.load)): baseline_of(cfg) for cfg in runs}.values())
