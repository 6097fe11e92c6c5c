"""`selfspec fit --compare`: fit every head, predict its speedup on this machine, and measure the most promising ones.

Three steps, each on engines of its own:

1. Fit and test (`fit.run`) on one eager engine: agreement on held-out text and on the model's own generations, tokens a
   round for k = 1..8 by laying rounds over those, and the time of each head by itself.
2. Step times on live engines with the lens: a plain step is the baseline's time between tokens; a round takes (tokens
   a round) x (time between tokens) of a drafting engine. Rounds at two exit layers and two k give the rest
   (`cost_model.fit_step_times`). Engines are compiled as they serve, so the times are those of serving.
3. The best few by predicted speedup, each at its best k, through the same `sweep` as any other arm.
"""

import statistics
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from selfspec_cli.config import machine
from selfspec_cli.config.keys import run_key
from selfspec_cli.config.schema import ConfigError, HeadConfig, Method, RunConfig
from selfspec_cli.early_exit.cost_model import Costs, efficiency, fit_step_times
from selfspec_cli.engine.live import OpenEngine
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.record import documents
from selfspec_cli.record.columns import Record
from selfspec_cli.record.head_rows import HeadRow, by_speedup
from selfspec_cli.record.point import OK
from selfspec_cli.stages import bench, fit, sweep
from selfspec_cli.stages.head_plan import HeadPlan

SHORT, LONG = 2, 6  # the k of the rounds that give the step times
REPLAYED = 32  # prompts


@dataclass
class Comparison:
    """What was found. times: None where step times could not be measured. best: by predicted speedup."""

    rows: list[HeadRow]
    times: Costs | None
    files: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    @property
    def best(self) -> HeadRow | None:
        """The head, exit layer, k and draft vocabulary of greatest predicted speedup."""
        ranked = by_speedup(self.rows)
        return ranked[0] if ranked else None

    @property
    def exit_code(self) -> int:
        """1 when an engine that was to measure something failed."""
        return 1 if self.failed else 0

    def document(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "best": self.best and asdict(self.best),
            "step_times": self.times and self.times.to_dict(),
            "rows": [asdict(row) for row in self.rows],
            "files": self.files,
            "failed": self.failed,
        }


def run(
    plan: HeadPlan,
    *,
    open_engine: OpenEngine,
    pairs: int = 50_000,
    top: int = 5,
    corpus: str = "stdlib",
    progress: Progress = ignore,
) -> Comparison:
    """Fit, predict, measure; write heads.csv and heads.json into the config's results_dir.

    Raises:
        ConfigError, SettingsError: as `fit.run`; a workload that samples, for the prediction is of greedy drafts.
    """
    cfg = replace(plan.cfg, head=HeadConfig(), vocab="full", method=Method.layer_skip)
    if cfg.workload.temperature > 0:
        raise ConfigError(
            f"workload.temperature={cfg.workload.temperature}: heads are compared on greedy drafts; use 0"
        )
    wanted: dict[str, Any] = {"pairs": pairs, "corpus": corpus, "replay": REPLAYED, "timed": cfg.workload.batch}
    fitted = fit.run(cfg, **plan.request(), **wanted, open_engine=open_engine, progress=progress)
    rows = [HeadRow.of(cfg.model.name, found) for found in fitted.reports]
    found = Comparison(rows, None)
    lens = [row.head_us for row in rows if row.head == "lens" and row.vocab == "full" and row.head_us is not None]
    head_seconds = statistics.median(lens) / 1e6 if lens else 0.0
    found.times = _step_times(cfg, plan.layers, head_seconds, open_engine, progress, found.failed)
    if found.times is not None:
        predict(rows, found.times)
        _measure(plan, rows, found.times, top, open_engine, progress, found.failed)
    facts = {
        "step_times": found.times and found.times.to_dict(),
        "fit_seconds": fitted.seconds,
        "device": machine.device(cfg),
        "versions": machine.versions(),
        "workload": asdict(cfg.workload),
        "pairs": pairs,
        "corpus": corpus,
    }
    found.files = documents.save_rows("heads", HeadRow, rows, facts, Path(cfg.results_dir))
    return found


def predict(rows: list[HeadRow], times: Costs) -> None:
    """Fill in best_k and predicted_speedup of every row that knows its tokens a round and its head's time."""
    for row in rows:
        if row.tokens and row.head_us is not None:
            row.best_k, row.predicted_speedup = times.at(row.E, row.head_us / 1e6).best_k(row.tokens)


def _step_times(
    cfg: RunConfig,
    layers: tuple[int, ...],
    head_seconds: float,
    open_engine: OpenEngine,
    progress: Progress,
    failed: list[str],
) -> Costs | None:
    """The plain step from the baseline, the rest from rounds of the lens at the outermost exits.

    None if one of them was not measured, or if they are too noisy; `failed` says so then.
    """
    low, high = min(layers), max(layers)
    if low == high:
        low = max(1, high // 2)
    if low == high:
        low, high = high, high + 1
    points = [
        replace(cfg, layer=layer, k=k, perplexity_tokens=0) for layer, k in ((low, SHORT), (low, LONG), (high, LONG))
    ]
    keys = [run_key(point) for point in points]  # before a model of the Hub is fetched, as the sweep does
    measured = _swept(points, open_engine, progress, failed)
    baseline = next((row for row in measured.values() if row.arm == "baseline"), None)
    if baseline is None or baseline.tpot_ms is None or len(measured) < 4:
        return None
    rounds = []
    for key in keys:
        row = measured[key]
        if row.tpot_ms is None or row.mean_accepted_len is None or row.E is None or row.k is None:
            return None
        rounds.append((row.E, row.k, row.tpot_ms / 1000 * row.mean_accepted_len))
    try:
        return fit_step_times(baseline.tpot_ms / 1000, rounds, head_seconds)
    except ValueError as error:
        failed.append(f"no prediction: {error}")
        return None


def _measure(
    plan: HeadPlan,
    rows: list[HeadRow],
    times: Costs,
    top: int,
    open_engine: OpenEngine,
    progress: Progress,
    failed: list[str],
) -> None:
    """Measure the best rows in the engine, and write what was measured next to what was predicted."""
    chosen = {}
    for row in by_speedup(rows)[:top]:
        cfg = replace(plan.config_of(row), perplexity_tokens=0)
        chosen[run_key(cfg)] = (cfg, row)
    if not chosen:
        return
    measured = _swept([cfg for cfg, _ in chosen.values()], open_engine, progress, failed)
    baseline = next((record for record in measured.values() if record.arm == "baseline"), None)
    for key, (_, row) in chosen.items():
        if baseline is not None and key in measured:
            beside(row, measured[key], baseline, times)


def beside(row: HeadRow, record: Record, baseline: Record, times: Costs) -> None:
    """Fill in what was measured for `row`, and where it differs from the prediction by `times`."""
    if not record.speedup or not baseline.tok_s_median or not row.predicted_speedup or row.best_k is None:
        return
    row.measured_speedup, row.measured_tokens = record.speedup, record.mean_accepted_len
    row.measured_min = None if record.tok_s_min is None else record.tok_s_min / baseline.tok_s_median
    row.measured_max = None if record.tok_s_max is None else record.tok_s_max / baseline.tok_s_median
    row.measured_low, row.measured_high = record.speedup_low, record.speedup_high
    row.efficiency = efficiency(record.speedup, row.predicted_speedup)
    if record.mean_accepted_len is None or not record.tpot_ms or not baseline.tpot_ms:
        return
    predicted_round = times.at(row.E, (row.head_us or 0.0) / 1e6).round(row.best_k)
    row.tokens_ratio = record.mean_accepted_len / row.tokens[row.best_k]
    row.round_ratio = predicted_round / (record.tpot_ms / 1000 * record.mean_accepted_len)
    row.baseline_ratio = baseline.tpot_ms / 1000 / times.plain


def _swept(
    points: list[RunConfig], open_engine: OpenEngine, progress: Progress, failed: list[str]
) -> dict[str, Record]:
    """The rows of `points` and of their baseline that could be measured, by run key."""
    result = sweep.run(points, open_engine=open_engine, bench=bench.run, progress=progress, again=True)
    failed += [f"{row.arm} E={row.E} k={row.k}: {row.status}" for row in result.rows if row.status != OK]
    return {row.key: row for row in result.rows if row.status == OK}
