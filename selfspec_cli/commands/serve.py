"""`selfspec serve`: become vLLM's server."""

import argparse
import errno
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from selfspec_cli.commands import configs
from selfspec_cli.commands.screen import Output, note, say, warn
from selfspec_cli.commands.shared import Config, Overrides, command, split_at_dashes
from selfspec_cli.config.schema import ConfigError, Method
from selfspec_cli.early_exit.settings import OPTIONS
from selfspec_cli.engine import deployment
from selfspec_cli.engine.server import listening_error
from selfspec_cli.stages import preflight, replicas


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
        return replicas.serve(servers, front, Path(cfg.results_dir) / "logs", note)
    line = " ".join([made.line(), *map(shlex.quote, more)])
    if out.dry_run:
        return out.answer(plan | {"command": line}, lambda: say(line))
    preflight.check_device(cfg)
    check_port(more)
    note(f"starting: {line}")
    sys.stdout.flush()
    with suppress(OSError):  # a stdout that a test captures is no file
        os.dup2(sys.stdout.fileno(), 1)
    command = [*made.command(), *more]
    os.execvpe(command[0], command, {**os.environ, **made.environment})  # vLLM keeps this id, and gets its signals


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
