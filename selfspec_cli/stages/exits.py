"""What `roc` and `tune` look at first: the exits that are asked for, what is drafted there and what its steps cost.

An exit is a layer with its head, its draft vocabulary and whatever else decides what is drafted, without gate and draft
length: a log of long ungated drafts tells what every gate and every shorter draft would do.
"""

import hashlib
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from selfspec_cli import interrupts
from selfspec_cli.config.facts import model_facts
from selfspec_cli.config.keys import KEY_LENGTH, digests, engine_key
from selfspec_cli.config.schema import ConfigError, GateConfig, Method, RunConfig, Runner, head_spec, own_drafts
from selfspec_cli.early_exit.contexts import Context
from selfspec_cli.early_exit.cost_model import Costs
from selfspec_cli.early_exit.draft_log import DraftLog
from selfspec_cli.early_exit.replay import Outcome, Setting
from selfspec_cli.early_exit.view import DraftView
from selfspec_cli.engine.live import Engine, OpenEngine
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.stages import measure
from selfspec_cli.texts.prompts import workload_prompts
from selfspec_cli.whole import written

TIMED_PROMPTS, TIMED_REPEATS = 4, 2


@dataclass(frozen=True)
class Exit:
    """One exit, the log of what it drafts, and the costs of its steps. cfg: without a gate, k the longest draft of the
    log. outcomes: what settings are worth here; empty until somebody has asked."""

    cfg: RunConfig
    log: DraftLog
    costs: Costs
    outcomes: tuple[Outcome, ...] = ()

    @property
    def best(self) -> Outcome:
        """The outcome of greatest expected speedup."""
        return max(self.outcomes, key=lambda outcome: outcome.speedup)


def name_of(cfg: RunConfig) -> str:
    """What an exit is called, for people and in files: its layer and what drafts there."""
    return f"E{cfg.layer}-{exit_name(cfg)}"


def exit_name(cfg: RunConfig) -> str:
    """Head and draft options other than the defaults, for a file's name; digests of paths and of vocabulary lists."""
    parts = [head_spec(cfg.head, cfg.layer).name]
    if cfg.head.path is not None:
        parts.append(_digest_of_path(cfg.head.path))
    if cfg.vocab.isdigit():
        parts.append(cfg.vocab)
    elif cfg.vocab != "full":
        file = Path(cfg.vocab)
        parts += [file.stem, _digest(file.read_bytes())]
    view = DraftView.of(cfg)
    options = {name: str(value) for name, value in replace(view, context=Context()).options().items()}
    parts += [options.pop("draft_weights")] if "draft_weights" in options else []
    parts += [cfg.draft_sample_method] if cfg.draft_sample_method != RunConfig.draft_sample_method else []
    for name, value in options.items():
        spelt = {"draft_weights_path": _digest_of_path, "skip_layers": "skip{}".format}.get(name, str)
        parts.append(spelt(value))
    parts += [] if view.context.is_full else [str(view.context).replace(":", "")]
    parts += [cfg.runner.value] if cfg.runner is not Runner.auto else []
    parts += [f"accept{cfg.acceptance_length:g}"] if cfg.acceptance_length is not None else []
    return "-".join(parts)


def _digest_of_path(path: str) -> str:
    return _digest(bytes(Path(path).expanduser().resolve()))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]


def distinct(cfgs: Iterable[RunConfig], longest: int) -> list[RunConfig]:
    """The exits that `cfgs` name, each once, whatever their gates and lengths. longest: tokens a draft, at most."""
    exits: dict[str, RunConfig] = {}
    for cfg in cfgs:
        bare = replace(cfg, k=longest, gate=GateConfig(), threshold=None, method=Method.layer_skip)
        exits.setdefault(engine_key(bare), bare)
    return list(exits.values())


def candidate_layers(cfg: RunConfig, parts: Sequence[int]) -> list[int]:
    """Exit layers where the user names none: the model's own, the default, and the layers divided by `parts`. All
    layers come first for copies, alone with layers to skip. Raises ConfigError: their number is not known."""
    layers, wanted = model_facts(cfg).layers, {own_drafts(cfg.model)[0]}
    if layers:
        wanted |= {DraftView().default_layer(layers), *(max(layers // part, 1) for part in parts)}
    if layers and cfg.skip_layers:
        return [layers]
    found = sorted(layer for layer in wanted if layer and (layers is None or layer < layers))
    if layers and DraftView.of(cfg).is_cheaper:
        return [layers, *found]
    if not found:
        raise ConfigError(
            f"model={cfg.model.name}: how many layers it has is not known, because {cfg.model.path} is not on this "
            f"machine; download it (hf download {cfg.model.path}), or name some: layer=4,8"
        )
    return found


@contextmanager
def one_at_a_time(open_engine: OpenEngine) -> Iterator[OpenEngine]:
    """An `open_engine` whose engine stays until another is asked for: one that is there takes no time to start."""
    there: dict[str, Engine] = {}
    with ExitStack() as stack:

        @contextmanager
        def kept(cfg: RunConfig) -> Iterator[Engine]:
            key = draft_key(cfg)
            if key not in there:
                there.clear()
                stack.close()
                there[key] = stack.enter_context(open_engine(cfg))
            yield there[key]

        yield kept


def survey(
    cfg: RunConfig,
    open_engine: OpenEngine,
    prompts: int,
    progress: Progress = ignore,
    enough: Callable[[], bool] = lambda: False,
) -> Exit:
    """Log and time one exit on an engine of its own. cfg: from `distinct`. prompts: to log, until `enough`."""
    with open_engine(cfg) as engine:
        cfg = replace(cfg, layer=engine.layer)
        # Other prompts than the workload's own, which stay unseen. Where the batch is larger than `prompts`, as many as
        # fill it, for steps are timed at that size.
        more = replace(cfg.workload, num_prompts=max(prompts, cfg.workload.batch))
        logged = replace(cfg, seed=cfg.seed + 1, workload=more)
        timed = replace(cfg, workload=replace(more, num_prompts=max(TIMED_PROMPTS, cfg.workload.batch)))
        return Exit(cfg, record(engine, logged, progress, enough), time_steps(engine, timed))


def record(engine: Engine, cfg: RunConfig, progress: Progress, enough: Callable[[], bool]) -> DraftLog:
    """Draft without a gate and log it, batch by batch until it is `enough`. Raises ConfigError: nothing was drafted."""
    work, prompts = cfg.workload, workload_prompts(cfg, engine)
    measure.apply(engine, Setting("none", None, int(cfg.k or 0)))
    with engine.recording() as read:
        for start in range(0, len(prompts), work.batch):
            interrupts.check()
            some = prompts[start : start + work.batch]
            engine.generate(some, work.output_len, batch=work.batch, temperature=work.temperature, seed=cfg.seed)
            progress(f"requests logged at {name_of(cfg)}", start + len(some), len(prompts))
            if start + len(some) < len(prompts) and enough():
                break
        log = read()
    if not len(log.drafted):
        raise ConfigError(f"workload.output_len={work.output_len}: nothing was drafted; generate more tokens")
    return log


def time_steps(engine: Engine, cfg: RunConfig) -> Costs:
    """What plain, draft and verify steps cost on this engine, at the workload's batch size and for drafts up to k."""
    longest = int(cfg.k or 0)
    lengths = sorted({1, (longest + 1) // 2, longest})
    settings = [measure.PLAIN, *(Setting("none", None, k) for k in lengths)]
    plain, *drafting = measure.run(engine, cfg, workload_prompts(cfg, engine), settings, repeats=TIMED_REPEATS)
    return measure.costs(plain, drafting)


def level(exits: Sequence[Exit]) -> list[Exit]:
    """The exits as if plain decoding had taken the same time on every engine, the median. Plain decoding knows nothing
    of exits; where the machine stalled under it, that exit would look fast."""
    plain = statistics.median(found.costs.plain for found in exits)
    return [
        replace(
            found,
            costs=replace(found.costs, plain=plain),
            outcomes=tuple(replace(one, speedup=one.speedup * plain / found.costs.plain) for one in found.outcomes),
        )
        for found in exits
    ]


def draft_key(cfg: RunConfig) -> str:
    """Names what an exit drafts: another for every setting, head file or vocabulary file that matters."""
    held = digests(cfg)
    text = f"{engine_key(cfg)} {held.get('head')} {held.get('vocab')}"
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_LENGTH]


def save(found: Exit, file: Path) -> None:
    """Write the log and the costs of an exit, whole or not at all; `load` reads them back."""
    import torch

    log = {name: getattr(found.log, name) for name in DraftLog.__annotations__}
    with written(file) as part:
        torch.save({"log": log, "costs": found.costs.to_dict()}, part)


def load(cfg: RunConfig, file: Path) -> Exit:
    """The exit `cfg` with the log and the costs that `save` wrote."""
    import torch

    saved: dict[str, Any] = torch.load(file, weights_only=True)
    return Exit(cfg, DraftLog(**saved["log"]), Costs(**saved["costs"]))
