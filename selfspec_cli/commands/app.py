"""The command line: words in, exit codes out. Commands of one kind share a module; the work is in stages/.

Exit codes: 0 all went well, 1 a run failed, 2 bad input, 130 interrupted.
"""

import os
from typing import Annotated

import typer

from selfspec_cli import __version__
from selfspec_cli.commands import runs
from selfspec_cli.commands.check import check
from selfspec_cli.commands.doctor import doctor
from selfspec_cli.commands.fit import fit_draft_weights, fit_heads, fit_lsq, roc, tune
from selfspec_cli.commands.gateway import gateway
from selfspec_cli.commands.options import show_options
from selfspec_cli.commands.profile import profile
from selfspec_cli.commands.quality import evaluate, ppl
from selfspec_cli.commands.runs import report
from selfspec_cli.commands.screen import warn
from selfspec_cli.commands.serve import load, serve
from selfspec_cli.commands.shared import NamesCommands
from selfspec_cli.commands.sweep import bench, sweep
from selfspec_cli.commands.verify import verify
from selfspec_cli.early_exit import sprint_aliases

COMMANDS = (
    doctor,
    show_options,
    bench,
    sweep,
    profile,
    fit_lsq,
    fit_heads,
    fit_draft_weights,
    roc,
    tune,
    serve,
    load,
    gateway,
    ppl,
    evaluate,
    verify,
    check,
    report,
)
"""In the order of the help."""

app = typer.Typer(
    name="selfspec",
    cls=NamesCommands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Early-exit self-speculative decoding inside vLLM, measured.",
    epilog="Try: selfspec sweep gate=varH tau_v=4,5,6",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"selfspec {__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")]


@app.callback()
def main(ctx: typer.Context, version: Version = False) -> None:
    """Early-exit self-speculative decoding inside vLLM, measured."""
    answer = sprint_aliases.answer_for_environment(os.environ, ctx.invoked_subcommand or "COMMAND")
    warn([answer] if answer else [])


for one in COMMANDS:
    app.command(**one.typer)(one)
app.add_typer(runs.app, name="runs")
