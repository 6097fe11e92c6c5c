"""What a command ends with: the settings to deploy, in a file, and the commands that start a server with them."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from selfspec_cli.commands.screen import say, warn
from selfspec_cli.config.keys import baseline_of
from selfspec_cli.config.schema import ConfigError, Method, RunConfig
from selfspec_cli.engine import deployment
from selfspec_cli.record import archive, folder, tables
from selfspec_cli.record.point import Point
from selfspec_cli.record.tables import asked
from selfspec_cli.report.rows import label, latest

MODELS = 3  # for which a report says what to deploy
OF_A_SERVER = ("model=", "model.", "engine=", "engine.")
"""Words of a command that a server needs too, besides what was chosen."""


def chosen(command: str, cfg: RunConfig, speedup: float | None, words: Sequence[str] = ()) -> dict[str, Any]:
    """What to deploy once `command` has chosen `cfg`, as JSON; writes the files that it names. speedup: over plain
    decoding; without one the model alone is served. words: arguments of `selfspec serve` that start the same server;
    without them it reads the file of the config. A head that is gone is said under "error"."""
    try:
        pays = speedup is None or speedup > 1
        if not pays:
            cfg = baseline_of(cfg)
        made = deployment.deployment(cfg, Path(cfg.results_dir) / deployment.FOLDER)
        spec, config = deployment.save(cfg, made, command)
    except (ConfigError, OSError) as error:
        return {"error": f"what to deploy cannot be said: {error}"}
    return {
        "pays": pays,
        "speculative_config": made.speculative_config,
        "file": str(spec) if pays else None,
        "command": made.line(),
        "selfspec": shlex.join(["selfspec", "serve", *(words if words and pays else ["--config", str(config)])]),
    }


def show(found: dict[str, Any]) -> None:
    """`chosen`, for people: each command on one line, to be copied."""
    if "error" in found:
        return warn([found["error"]])
    if found["pays"]:
        say(f"\nTo deploy it (the speculative_config, also in {found['file']}):", "bold")
        say(json.dumps(found["speculative_config"]))
    else:
        say("\nNothing here is faster than plain decoding. To serve the model without drafting:", "bold")
    say("Start a server with either of:", "bold")
    for line in (found["selfspec"], found["command"]):
        say(line)


DEPLOYABLE = (Method.layer_skip, Method.vllm, Method.baseline)
"""Methods of which a server can be started that answers as the model does."""


def best_points(points: Sequence[Point]) -> list[Point]:
    """Of each model the measured lossless arm of greatest speedup with real weights and real acceptance, or its
    baseline where no arm is faster; the models measured last, at most `MODELS` of them."""
    newest = {row.point for row in latest(tables.row(point) for point in points)}
    best: dict[str, Point] = {}
    for point in points:
        config = point.config or {}
        real = config.get("model", {}).get("load_format") != "dummy" and config.get("acceptance_length") is None
        kind = config.get("method")
        if point.id not in newest or not point.ok or not real or kind not in DEPLOYABLE:
            continue
        model = point.digests.get("model") or str(config["model"].get("path"))
        if model not in best or _speedup(point) > _speedup(best[model]):
            best[model] = point
    return list(best.values())[-MODELS:]


def _speedup(point: Point) -> float:
    return (point.compared_with.speedup if point.compared_with else None) or 1.0


def of_report(results: Path, out: Path) -> list[dict[str, Any]]:
    """What to deploy by the points of a folder: `chosen` for each model, with "what" it is. out: for its files."""
    if archive.inside(results) is not None:
        return []  # what is published was measured elsewhere
    found = []
    for point in best_points(folder.read(results)[0]):
        from selfspec_cli.config.compose import load_config

        file = results / folder.RUNS / f"{point.id}.json"
        try:
            cfg = load_config(file)
        except ConfigError as error:  # of another version of this package
            found.append({"error": f"what to deploy cannot be said: {error}"})
            continue
        cfg.results_dir = str(out)
        speedup = _speedup(point)
        words = [] if speedup <= 1 else ["--config", str(file)]
        row = tables.row(point)
        what = {"what": f"{cfg.model.name}: {label(row)}, {speedup:.2f}x at {asked(row)}"}
        found.append(what | chosen("report", cfg, speedup, words))
    return found
