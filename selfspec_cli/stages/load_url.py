"""Load tests of servers that somebody else has started: one, or one beside another that is its baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from selfspec_cli import interrupts
from selfspec_cli.config import machine
from selfspec_cli.config.digests import file_digest
from selfspec_cli.config.keys import digest
from selfspec_cli.config.schema import PROMPTS, ConfigError, Method, RunConfig, to_plain
from selfspec_cli.early_exit.errors import on_one_line
from selfspec_cli.engine.server import Server
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.record import folder as results
from selfspec_cli.record import tables
from selfspec_cli.record.point import FAILED, OK, Measurement, Point, compare, point_id
from selfspec_cli.report.rows import ELSEWHERE
from selfspec_cli.stages.sweep import Bench, SweepResult


def check(cfgs: Sequence[RunConfig], urls: Sequence[str]) -> None:
    """Refuse, before anything is asked, what a server that runs already cannot be asked; raises ConfigError."""
    for cfg in cfgs:
        if cfg.load.share is not None and cfg.load.clients is None:
            raise ConfigError(
                f"load.share={cfg.load.share:g} with --url {urls[-1]}: nobody here knows how many "
                "requests it runs at once; say with how many clients it is saturated, such as "
                "load.clients=64"
            )


def run(
    cfgs: Sequence[RunConfig],
    servers: Sequence[Server],
    bench: Bench,
    path: str,
    *,
    run_id: str,
    progress: Progress = ignore,
) -> SweepResult:
    """Measure every load on each server, and write a point of each.

    Args:
        servers: one, or the baseline's and then the one that is compared with it.
        bench: measures a config on a server. path: of the API.

    Raises:
        ConfigError: the results folder is in use or cannot be written, or the prompts cannot be had.
        RecordError: a point could not be written.
    """
    folder = Path(cfgs[0].results_dir)
    result = SweepResult(run_id)
    with interrupts.deferred(), results.writing(folder):
        baselines: dict[int, Point] = {}
        for place, server in enumerate(servers):
            for number, cfg in enumerate(cfgs):
                interrupts.check()
                is_baseline = place == 0 and len(servers) > 1
                point = measured(cfg, server, bench, path, progress, result, baselines.get(number), is_baseline)
                results.save(folder, point)
                result.points.append(point)
                progress.measured(point)
                if is_baseline and point.ok:
                    baselines[number] = point
    return result


def measured(
    cfg: RunConfig,
    server: Server,
    bench: Bench,
    path: str,
    progress: Progress,
    result: SweepResult,
    baseline: Point | None,
    is_baseline: bool,
) -> Point:
    reason, found = None, Measurement(())
    try:
        found = bench(cfg, server, progress)
    except ConfigError:
        raise
    except Exception as error:
        interrupts.check()
        reason = on_one_line(error)[:300]
    arm = tables.identity(replace(cfg, method=Method.baseline))
    arm |= {"arm": str(Method.baseline) if is_baseline else ELSEWHERE, "model": server.model}
    prompts = None if cfg.workload.prompts in PROMPTS else file_digest(Path(cfg.workload.prompts))
    asked = {name: to_plain(cfg)[name] for name in ("workload", "load", "seed", "warmup")}
    key = digest([server.url, server.model, path, asked, prompts])
    compared = None
    if baseline is not None and reason is None:
        compared = compare(found, baseline, reused=False, real_text=True)
    return Point(
        id=point_id(key, result.run_id),
        key=key,
        run_id=result.run_id,
        number=len(result.points),
        time=results.now(),
        status=OK if reason is None else FAILED,
        reason=reason,
        seconds=found.seconds,
        start_seconds=None,
        device=f"server {urlsplit(server.url).netloc}",
        arm=arm,
        config=asked | {"url": server.url},
        digests={} if prompts is None else {"prompts": prompts},
        **machine.provenance(),
        compared_with=compared,
        engine=found.engine,
        outputs=found.outputs,
        repeats=found.repeats,
    )
