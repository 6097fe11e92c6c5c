"""`selfspec fit-weights`: copies of the weights made for what the model does, instead of rounded at load.

One eager engine generates answers to prompts of the workload's kind, other ones than those that are measured; what each
linear layer sees meanwhile decides how its weight is rounded (GPTQ's method) and, with a rank, what correction of low
rank is added to the product. The file is for this model and no other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from selfspec_cli.config import machine
from selfspec_cli.config.model_digest import head_folder
from selfspec_cli.config.schema import ConfigError, Method, RunConfig
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.engine.live import Engine
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.texts.prompts import workload_prompts

PROMPTS = 32  # answered while looking on
OpenEngine = Callable[[RunConfig], AbstractContextManager[Engine]]


@dataclass
class Fitted:
    """path: of the file. tokens: looked at. errors: by layer, the share of the product's mean square that is lost by
    rounding to nearest, by rounding with the data, and with the correction too. seconds: in all."""

    path: str
    kind: str
    rank: int
    tokens: int
    errors: dict[str, dict[str, float]]
    seconds: float

    @property
    def medians(self) -> dict[str, float]:
        """The median over the layers of each error."""
        names = ("nearest", "fitted", "corrected")
        found = {name: [error[name] for error in self.errors.values() if name in error] for name in names}
        return {name: statistics.median(values) for name, values in found.items() if values}


def check(cfg: RunConfig, rank: int) -> None:
    """Refuse what cannot be fitted, before an engine starts; raises ConfigError."""
    if not DRAFT_WEIGHTS[cfg.draft_weights].copies:
        kinds = ", ".join(name for name, kind in DRAFT_WEIGHTS.items() if kind.copies)
        raise ConfigError(f"draft_weights={cfg.draft_weights}: name the kind of copies to make; allowed: {kinds}")
    if cfg.draft_weights_path is not None:
        raise ConfigError("draft_weights_path names a file to draft with; name the one to write by --out")
    if rank < 0:
        raise ConfigError(f"--rank {rank}: must be 0 (no correction) or more")


def path_for(cfg: RunConfig, rank: int) -> Path:
    """Where the file goes that nobody named: beside the model's heads."""
    correction = f"-r{rank}" if rank else ""
    return head_folder(cfg) / f"weights-{cfg.draft_weights}{correction}.safetensors"


def run(
    cfg: RunConfig,
    *,
    open_engine: OpenEngine,
    rank: int = 0,
    prompts: int = PROMPTS,
    out: Path | None = None,
    progress: Progress = ignore,
) -> Fitted:
    """Fit copies of kind `cfg.draft_weights` on `prompts` answers of the model, and write them to `out`.

    Raises:
        ConfigError, SettingsError: there can be no such copies, or the prompts cannot be had.
    """
    check(cfg, rank)
    start, work = time.perf_counter(), cfg.workload
    kind, path = cfg.draft_weights, path_for(cfg, rank) if out is None else out
    plain = replace(
        cfg, method=Method.baseline, draft_weights="shared", seed=cfg.seed + 1,
        engine=replace(cfg.engine, enforce_eager=True), workload=replace(work, num_prompts=prompts),
    )  # fmt: skip
    about = {"prompts": work.prompts, "temperature": work.temperature, "versions": machine.versions()}
    with open_engine(plain) as engine:
        engine.call("early_exit_observe")
        asked = workload_prompts(plain, engine)
        batch = min(prompts, cfg.engine.max_num_seqs)
        progress("answers, then rounding", 0, 2)
        engine.generate(asked, work.output_len, batch=batch, temperature=work.temperature, seed=plain.seed)
        progress("answers, then rounding", 1, 2)
        report = engine.call("early_exit_fit_weights", str(path), kind, rank, about)
        progress("answers, then rounding", 2, 2)
    return Fitted(str(path), kind, rank, report["tokens"], report["layers"], time.perf_counter() - start)
