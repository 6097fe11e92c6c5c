"""Which heads a command fits or compares: the points of a grid, gathered by layer, head and draft vocabulary."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from selfspec_cli.config.facts import model_facts
from selfspec_cli.config.model_digest import head_folder
from selfspec_cli.config.schema import ConfigError, HeadConfig, Method, RunConfig, head_spec
from selfspec_cli.early_exit.head_spec import HeadSpec, examples
from selfspec_cli.record.head_rows import HeadRow, by_speedup
from selfspec_cli.stages import preflight


@dataclass(frozen=True)
class HeadPlan:
    """cfg: a point of the grid, of which model, engine and workload count. points: head -> its config."""

    cfg: RunConfig
    layers: tuple[int, ...]
    heads: dict[str, HeadConfig]
    vocabularies: tuple[str, ...]

    def request(self) -> dict[str, Any]:
        """The arguments of `fit.run` that the grid settles."""
        return {"layers": self.layers, "heads": tuple(self.heads), "vocabularies": self.vocabularies}

    def config_of(self, row: HeadRow) -> RunConfig:
        """The config that drafts with the head of `row` at its best k."""
        head = self.heads.get(row.head, HeadConfig())
        return replace(self.cfg, method=Method.layer_skip, layer=row.E, k=row.best_k, vocab=row.vocab, head=head)

    def to_deploy(self, rows: Sequence[HeadRow]) -> tuple[RunConfig, float] | None:
        """The head to serve and its speedup: the fastest that was measured, else the best prediction; None without
        either."""
        measured = [row for row in rows if row.measured_speedup is not None]
        best = max(measured, key=lambda row: row.measured_speedup or 0.0, default=None) or next(
            iter(by_speedup(list(rows))), None
        )
        return None if best is None else (self.config_of(best), best.measured_speedup or best.predicted_speedup or 0.0)

    def facts(self) -> dict[str, Any]:
        """For a dry run."""
        folder = str(head_folder(self.cfg))
        return {"model": self.cfg.model.path, **{name: list(v) for name, v in self.request().items()}, "folder": folder}


def to_fit(points: Sequence[RunConfig]) -> HeadPlan:
    """The plan of `selfspec fit`; the lens is always among the heads, to be compared with.

    Raises:
        ConfigError: as `gather`; nothing but heads over the full vocabulary that need no fit is asked for.
    """
    plan = gather(points)
    if not any(HeadSpec.from_name(name).target for name in plan.heads) and set(plan.vocabularies) == {"full"}:
        names = ",".join(plan.heads)
        raise ConfigError(f"head={names}: is not fitted; name what is, such as head=lsq or head=translator_r15")
    return replace(plan, heads={"lens": HeadConfig(), **plan.heads})


def to_compare(overrides: Sequence[str], compose: Callable[[list[str]], list[RunConfig]]) -> HeadPlan:
    """The plan of `selfspec fit --compare`: what the overrides say, and for what they leave open every head, exits at a
    twelfth, a sixth, a third and half of the depth, and draft vocabularies of all and of a quarter of the tokens.
    """
    given = {override.partition("=")[0] for override in overrides}
    more = [] if "head" in given else [f"head={','.join(examples())}"]
    if not {"layer", "vocab"} <= given:
        model = compose([override for override in overrides if override.startswith("model")])[0]
        facts = model_facts(model)
        layers, tokens = facts.layers, facts.vocab_size
        if layers is None or tokens is None:
            raise ConfigError("layer= and vocab= must be given for a model that is not a folder")
        exits = sorted({max(1, layers * part // 12) for part in (1, 2, 4, 6)})
        more += [] if "layer" in given else [f"layer={','.join(map(str, exits))}"]
        more += [] if "vocab" in given else [f"vocab=full,{max(1, tokens // 4)}"]
    return gather(compose([*more, *overrides]))


def gather(points: Sequence[RunConfig]) -> HeadPlan:
    """The plan that a grid's points make, in their order.

    Raises:
        ConfigError: points of more than one model or engine, a point without a layer, or a head given as a file.
    """
    for cfg in points:
        preflight.check_model(cfg)
        if cfg.head.path is not None:
            raise ConfigError(f"head.path={cfg.head.path}: heads are fitted here, not read")
        if (cfg.model, cfg.engine, cfg.workload) != (points[0].model, points[0].engine, points[0].workload):
            raise ConfigError("one model, engine and workload at a time here; `selfspec sweep` runs several")
        if cfg.layer is None:
            raise ConfigError("layer=null: name the exit layers, such as layer=4,8,12")
    return HeadPlan(
        preflight.for_this_machine(points[:1])[0],
        tuple(dict.fromkeys(cfg.layer for cfg in points if cfg.layer is not None)),
        {head_spec(cfg.head).name: cfg.head for cfg in points},
        tuple(dict.fromkeys(cfg.vocab for cfg in points)),
    )
