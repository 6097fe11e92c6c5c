"""`selfspec load`: put servers under load."""

from __future__ import annotations

from typing import Annotated

import typer

from selfspec_cli.commands import configs
from selfspec_cli.commands.screen import ROWS_KEPT, guard
from selfspec_cli.commands.shared import Config, Debug, DryRun, Json, Overrides, command


@command(
    epilog="Examples: selfspec load experiment=soak   ·   selfspec load layer=3 k=4 load.clients=1,8,32   ·   "
    "selfspec load load.share=0.3,0.6,0.9 --tpot-limit 50   ·   selfspec load --url http://localhost:8000 load.rate=2"
)
def load(
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
    ttft_limit: Annotated[float | None, typer.Option("--ttft-limit", help="As load.ttft_limit, ms.")] = None,
    tpot_limit: Annotated[float | None, typer.Option("--tpot-limit", help="As load.tpot_limit, ms.")] = None,
    e2e_limit: Annotated[float | None, typer.Option("--e2e-limit", help="As load.e2e_limit, ms.")] = None,
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Load-test servers: closed loop, Poisson or bursty arrivals, a soak; the baseline and each arm, one after the
    other, or one that runs already. What stands behind -- goes to the servers that are started."""
    with guard(as_json, debug, ROWS_KEPT):
        from selfspec_cli.commands import loading

        words = list(overrides or [])
        split = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
        more = words[split:]
        words = [*words[:split], *loading.limits(ttft_limit, tpot_limit, e2e_limit)]
        runs = loading.as_loads(configs.several(words, config=config))
        how = {"as_json": as_json, "dry_run": dry_run, "debug": debug}
        if url is None:
            loading.refuse_without_url(baseline_url=baseline_url, served_model=served_model, chat=chat)
            return loading.own_servers(runs, more, **how)
        knows = config is not None or any(word.startswith(("model=", "model.")) for word in words)
        where = loading.Elsewhere(url, baseline_url, served_model, chat, knows and not chat)
        loading.elsewhere(loading.of_elsewhere(runs), where, **how)
