"""`selfspec fit-weights`: copies of the weights made for what the model does, instead of rounded at load.

One eager engine generates answers to prompts of the workload's kind, other ones than those that are measured; what each
linear layer sees meanwhile decides how its weight is rounded (GPTQ's method). The file is for this model and no other.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from selfspec_cli.config import machine
from selfspec_cli.config.model_files import head_folder
from selfspec_cli.config.schema import ConfigError, Method, RunConfig
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.engine.live import OpenEngine
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.texts.prompts import workload_prompts


@dataclass
class Fitted:
    """path: of the file. tokens: looked at. errors: by layer, the share of the product's mean square that is lost by
    rounding to nearest and by rounding with the data. seconds: until it was written."""

    path: str
    kind: str
    tokens: int
    errors: dict[str, dict[str, float]]
    seconds: float

    @property
    def medians(self) -> dict[str, float]:
        """The median over the layers of each error."""
        names = ("nearest", "fitted")
        found = {name: [error[name] for error in self.errors.values() if name in error] for name in names}
        return {name: statistics.median(values) for name, values in found.items() if values}


def check(cfgs: Sequence[RunConfig], out: Path | None = None) -> None:
    """Refuse what cannot be fitted, before an engine starts; raises ConfigError."""
    for cfg in cfgs:
        if not DRAFT_WEIGHTS[cfg.draft_weights].copies:
            kinds = ", ".join(name for name, kind in DRAFT_WEIGHTS.items() if kind.copies)
            raise ConfigError(f"draft_weights={cfg.draft_weights}: name the kind of copies to make; allowed: {kinds}")
        if cfg.draft_weights_path is not None:
            raise ConfigError("draft_weights_path names a file to draft with; name the one to write by --out")
        if (cfg.model, cfg.engine, cfg.workload) != (cfgs[0].model, cfgs[0].engine, cfgs[0].workload):
            raise ConfigError("copies are fitted on one engine: name one model, one engine and one workload")
    if out is not None and len(cfgs) > 1:
        raise ConfigError(f"--out {out}: it names one file, and {len(cfgs)} are made; leave it out, or name one kind")


def path_for(cfg: RunConfig) -> Path:
    """Where the file goes that nobody named: beside the model's heads."""
    return head_folder(cfg) / f"weights-{cfg.draft_weights}.safetensors"


def run(
    cfgs: Sequence[RunConfig],
    *,
    open_engine: OpenEngine,
    prompts: int,
    out: Path | None = None,
    progress: Progress = ignore,
) -> list[Fitted]:
    """Fit copies of the kind of each of `cfgs` on `prompts` answers of the model; one engine and one look at what its
    layers see. out: the file, where one is made. Raises ConfigError, SettingsError: there can be no such copies, or the
    prompts cannot be had."""
    check(cfgs, out)
    cfg, start = cfgs[0], time.perf_counter()
    work = cfg.workload
    plain = replace(
        cfg,
        method=Method.baseline,
        draft_weights="shared",
        seed=cfg.seed + 1,
        engine=replace(cfg.engine, enforce_eager=True),
        workload=replace(work, num_prompts=prompts),
    )
    about = {"prompts": work.prompts, "temperature": work.temperature, "versions": machine.versions()}
    made: list[Fitted] = []
    with open_engine(plain) as engine:
        engine.call("early_exit_observe")
        asked = workload_prompts(plain, engine)
        batch = min(prompts, cfg.engine.max_num_seqs)
        progress("answers, then files", 0, 1 + len(cfgs))
        engine.generate(asked, work.output_len, batch=batch, temperature=work.temperature, seed=plain.seed)
        progress("answers, then files", 1, 1 + len(cfgs))
        for number, one in enumerate(cfgs, start=2):
            kind, path = one.draft_weights, path_for(one) if out is None else out
            report = engine.call("early_exit_fit_weights", str(path), kind, about)
            seconds = time.perf_counter() - start
            made.append(Fitted(str(path), kind, report["tokens"], report["layers"], seconds))
            progress("answers, then files", number, 1 + len(cfgs))
    return made
