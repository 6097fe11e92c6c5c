"""`selfspec views`: how well cheaper views of a model draft for it, one engine for all of them.

A view is a depth, layers left out of it, the weights that it runs on and the context that it attends to. An eager
engine changes from one to the next while it lives (`Engine.set_view`), so that nothing is loaded twice. What an engine
cannot change, such as whether drafts are drawn or the likeliest tokens, takes an engine for each value. What is
measured is acceptance, per position, by vLLM's own counters; it is the same on every device but for rounding. Speed is
not measured here: the prediction is of bytes read, and says what memory traffic would allow at batch 1 on a device
whose kernels read copies at its full rate.

Which layers a draft can do without is searched by drafts of one token (k = 1), over the full model's own keys and
values, on its own answers. Greedy, and lazy: leaving out one more layer hardly ever helps, so what a candidate reached
in a smaller set bounds what it reaches in a larger one, and only those that lead by their bounds are asked again
(Minoux's accelerated greedy algorithm). Agreement is not exactly submodular, so a bound may be wrong, and another set a
little better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from selfspec_cli import interrupts
from selfspec_cli.config import machine
from selfspec_cli.config.facts import device_of, needed
from selfspec_cli.config.keys import engine_key
from selfspec_cli.config.schema import ConfigError, GateConfig, Method, RunConfig
from selfspec_cli.early_exit.cost_model import Costs
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.early_exit.layers import as_text, drafting_layers, skipped_layers
from selfspec_cli.early_exit.view import DraftView, own_settings
from selfspec_cli.engine.live import Engine, OpenEngine
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.record import documents
from selfspec_cli.record.tables import identity
from selfspec_cli.record.view_rows import ViewRow, row
from selfspec_cli.texts.prompts import workload_prompts

PROXY_PROMPTS, PROXY_TOKENS = 8, 24  # of the search, at most: candidates are many, and each drafts for all of these
ITEM_BITS = 16  # of the weights that a copy is compared with: a model is served in 16 bits, whatever it runs in here


Agreement = Callable[[tuple[int, ...]], float]
"""Layers to skip -> share of first drafts that were accepted."""


@dataclass(frozen=True)
class Step:
    """One more layer left out: all that are, how often the first draft was accepted, and candidates asked so far."""

    skipped: tuple[int, ...]
    agreement: float
    asked: int


@dataclass
class Views:
    """What was found. steps: of the search for layers; empty where none was asked for."""

    rows: list[ViewRow]
    steps: list[Step] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)

    @property
    def best(self) -> ViewRow | None:
        """The row of greatest predicted speedup."""
        return max((one for one in self.rows if one.predicted), key=lambda one: one.predicted or 0.0, default=None)

    def document(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "rows": [asdict(one) for one in self.rows],
            "search": [asdict(step) for step in self.steps],
            "best": None if self.best is None else asdict(self.best),
            "files": self.files,
        }


def plan(cfgs: Sequence[RunConfig]) -> list[RunConfig]:
    """The distinct views and workloads that `cfgs` name, with E filled in, gates left out, on an eager engine.

    Raises:
        ConfigError: they are not of one model and engine, or do not draft with the model's own layers.
    """
    layers = needed(cfgs[0], "layers")
    found: dict[str, RunConfig] = {}
    for cfg in cfgs:
        if cfg.method is not Method.layer_skip:
            raise ConfigError(f"method={cfg.method}: views are of method=layer_skip")
        if (cfg.model, cfg.engine, cfg.head, cfg.vocab) != (cfgs[0].model, cfgs[0].engine, cfgs[0].head, cfgs[0].vocab):
            raise ConfigError("views are compared on one engine: name one model, one engine, one head, one vocabulary")
        layer = DraftView.of(cfg).layer_of(layers)
        engine = replace(cfg.engine, enforce_eager=True, enable_prefix_caching=True)
        bare = replace(cfg, layer=layer, engine=engine, gate=GateConfig(), threshold=None)
        found.setdefault(f"{engine_key(bare)} {asdict(cfg.workload)} {cfg.seed}", bare)
    return list(found.values())


def run(cfgs: Sequence[RunConfig], *, open_engine: OpenEngine, drop: int = 0, progress: Progress = ignore) -> Views:
    """Measure every view of `cfgs` on every workload of theirs; write views.csv and views.json into results_dir.

    drop: also look for up to so many layers that the draft can do without, for the weights of the first view, from all
    layers on, and measure the set of each size with them.

    Raises:
        ConfigError: as `plan`.
    """
    views = plan(cfgs)
    first, works = views[0], list({repr(cfg.workload): cfg.workload for cfg in views}.values())
    found = Views([])
    plain: dict[str, list[list[int]]] = {}
    for number, group in enumerate(by_engine(views)):
        with open_engine(group[0]) as engine:
            if drop and not number:
                whole = _whole(first, engine.num_layers)
                for step in thinned(engine, whole, drop, progress):
                    found.steps.append(step)
                    found.files = _save(first, found)
                others = [replace(whole, skip_layers=as_text(step.skipped)) for step in found.steps]
                more = [replace(cfg, workload=work) for cfg in others for work in works]
                group, views = [*group, *more], [*views, *more]
            for cfg in group:
                interrupts.check()
                found.rows.append(measured(engine, cfg, plain))
                progress("views", len(found.rows), len(views))
                found.files = _save(first, found)
    return found


def by_engine(views: Sequence[RunConfig]) -> list[list[RunConfig]]:
    """Views that one live engine can take after each other, in the order in which their engines start."""
    found: dict[str, list[RunConfig]] = {}
    for cfg in views:
        bare = replace(cfg, layer=1, **{name: getattr(RunConfig, name) for name in own_settings()})
        found.setdefault(engine_key(bare), []).append(cfg)
    return list(found.values())


def search(
    layers: Sequence[int], most: int, agreement: Agreement, start: Sequence[int] = (), progress: Progress = ignore
) -> Iterator[Step]:
    """Sets of 1 to `most` layers to skip, each the one before and one layer more, as they are found.

    layers: those that draft now. start: those that are skipped already, and stay so. An interrupt ends it between two
    candidates. Fewer steps come where no layer would be left.
    """
    skipped, asked, size = tuple(start), 0, 0
    bounds = dict.fromkeys(layers, 1.0)
    while size < most and len(bounds) > 1:
        size += 1
        fresh: set[int] = set()
        while True:
            leading = max(bounds, key=lambda layer: (bounds[layer], layer))
            if leading in fresh:
                break
            interrupts.check()
            bounds[leading] = agreement(tuple(sorted((*skipped, leading))))
            fresh.add(leading)
            asked += 1
            progress(f"candidates of step {size}", len(fresh), len(bounds))
        progress.ended(f"candidates of step {size}", len(fresh), len(bounds))
        skipped = tuple(sorted((*skipped, leading)))
        yield Step(skipped, bounds.pop(leading), asked)


def thinned(engine: Engine, cfg: RunConfig, most: int, progress: Progress = ignore) -> Iterator[Step]:
    """Layers that the draft of `cfg` can do without, by `search`, on other prompts than the workload's.

    It goes on from the layers that `cfg` skips already.
    """
    work = cfg.workload
    requests, length = min(PROXY_PROMPTS, work.num_prompts), min(PROXY_TOKENS, work.output_len)
    work = replace(work, num_prompts=requests, output_len=length, temperature=0.0)
    other = replace(cfg, seed=cfg.seed + 1, workload=work)
    prompts = workload_prompts(other, engine)
    start = skipped_layers(cfg.skip_layers)
    engine.set_draft_length(1)

    def agreement(skipped: tuple[int, ...]) -> float:
        engine.set_view(replace(cfg, skip_layers=as_text(skipped)))
        counts = engine.generate(prompts, length, batch=requests).verified
        return counts.accepted / counts.rounds if counts is not None and counts.rounds else 0.0

    try:
        yield from search(drafting_layers(int(cfg.layer or 0), start), most, agreement, start, progress)
    finally:
        engine.set_draft_length(int(cfg.k or 0))


def measured(engine: Engine, cfg: RunConfig, plain: dict[str, list[list[int]]]) -> ViewRow:
    """One view on one workload. plain: greedy outputs without drafts by workload, kept for the views to come."""
    work = cfg.workload
    prompts = workload_prompts(cfg, engine)

    batch = min(work.num_prompts, cfg.engine.max_num_seqs)  # what is accepted does not depend on it; the time does

    def generated() -> Any:
        return engine.generate(prompts, work.output_len, batch=batch, temperature=work.temperature, seed=cfg.seed)

    greedy = work.temperature == 0  # sampled output has the same distribution, not the same tokens
    if greedy and repr(work) not in plain:
        engine.set_draft_length(0)
        plain[repr(work)] = generated().outputs
    engine.set_view(cfg)
    engine.set_draft_length(int(cfg.k or 0))
    result = generated()
    assert result.verified is not None  # an engine that drafts
    view = DraftView.of(cfg)
    columns = view.columns()
    found = row(
        result.verified,
        model=cfg.model.name,
        E=int(cfg.layer or 0),
        draft_weights=columns["draft_weights"],
        skip_layers=columns["skip_layers"],
        fitted=columns["draft_weights_file"],
        draft_context=None if view.context.is_full else str(view.context),
        workload=work.name,
        temperature=work.temperature,
        k=int(cfg.k or 0),
        draft_sample_method=identity(cfg)["draft_sample_method"],
    )
    if greedy:
        pairs = list(zip(result.outputs, plain[repr(work)], strict=True))
        found.outputs, found.identical = len(pairs), sum(ours == theirs for ours, theirs in pairs)
    predict(found, cfg, engine.call("early_exit_step_bytes"))
    return found


def predict(found: ViewRow, cfg: RunConfig, read: dict[str, float] | None) -> None:
    """Fill in what the bytes of a step tell. read: `early_exit_step_bytes`; None where bytes do not tell.

    On the CPU copies are dequantised, so what they would take is worked out from the bits of their kind, beside
    originals of 16 bits. Keys and values are those of one request in the middle of its answer.
    """
    if read is None or not found.tokens:
        return
    kind, work = DRAFT_WEIGHTS[cfg.draft_weights], cfg.workload
    if device_of(cfg) == "cpu" and kind.bits is not None:
        read = {**read, "draft": read["draft"] * kind.bits / ITEM_BITS}
    tokens = work.input_len + work.output_len / 2
    costs = Costs.from_bytes(read, tokens, DraftView.of(cfg).context.attended(tokens))
    found.cost = costs.step / costs.plain
    found.best_k, found.predicted = costs.best_k({0: 1.0, **found.tokens})


def facts(cfgs: Sequence[RunConfig], drop: int) -> dict[str, Any]:
    """What a run would do."""
    views = plan(cfgs)
    return {
        "model": views[0].model.path,
        "views": [_in_words(cfg) for cfg in views],
        "workloads": list(dict.fromkeys(f"{cfg.workload.name}, T={cfg.workload.temperature:g}" for cfg in views)),
        "k": views[0].k,
        "drop": drop,
    }


def _in_words(cfg: RunConfig) -> str:
    drawn = f" draft_sample_method={method}" if (method := identity(cfg)["draft_sample_method"]) else ""
    context = DraftView.of(cfg).context
    attends = "" if context.is_full else f" draft_context={context}"
    return f"E={cfg.layer} {cfg.draft_weights} skip_layers={cfg.skip_layers or ''}".strip() + attends + drawn


def _whole(cfg: RunConfig, layers: int) -> RunConfig:
    """`cfg` through all layers, where its own depth was only the default."""
    return replace(cfg, layer=cfg.layer if skipped_layers(cfg.skip_layers) else layers)


def _save(cfg: RunConfig, found: Views) -> dict[str, str]:
    """Write views.csv and views.json; name -> path."""
    facts = {
        "device": machine.device(cfg),
        "versions": machine.versions(),
        "workload": asdict(cfg.workload),
        "seed": cfg.seed,
        "search": [asdict(step) for step in found.steps],
        "predicted": "bytes that a step reads at batch 1, copies beside originals of 16 bits; not measured",
    }
    return documents.save_rows("views", ViewRow, found.rows, facts, Path(cfg.results_dir))
