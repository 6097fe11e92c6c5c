"""Which heads a command fits: the points of a grid, gathered by layer, head and draft vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from selfspec_cli.config.model_digest import head_folder
from selfspec_cli.config.schema import ConfigError, RunConfig, head_spec
from selfspec_cli.early_exit.head_spec import HeadSpec
from selfspec_cli.stages import preflight


@dataclass(frozen=True)
class HeadPlan:
    """cfg: a point of the grid, of which model, engine and workload count. heads: short names (`HeadSpec`)."""

    cfg: RunConfig
    layers: tuple[int, ...]
    heads: tuple[str, ...]
    vocabularies: tuple[str, ...]

    def request(self) -> dict[str, Any]:
        """The arguments of `fit.run` that the grid settles."""
        return {"layers": self.layers, "heads": self.heads, "vocabularies": self.vocabularies}

    def facts(self) -> dict[str, Any]:
        """For a dry run."""
        folder = str(head_folder(self.cfg))
        return {"model": self.cfg.model.path, **{name: list(v) for name, v in self.request().items()}, "folder": folder}


def to_fit(points: Sequence[RunConfig]) -> HeadPlan:
    """The plan that a grid's points make, in their order; the lens is always among the heads, to be compared with.

    Raises:
        ConfigError: points of more than one model or engine, a point without a layer, a head given as a file, or
            nothing but heads over the full vocabulary that need no fit.
    """
    for cfg in points:
        preflight.check_model(cfg)
        if cfg.head.path is not None:
            raise ConfigError(f"head.path={cfg.head.path}: heads are fitted here, not read")
        if (cfg.model, cfg.engine, cfg.workload) != (points[0].model, points[0].engine, points[0].workload):
            raise ConfigError("one model, engine and workload at a time here; `selfspec sweep` runs several")
        if cfg.layer is None:
            raise ConfigError("layer=null: name the exit layers, such as layer=4,8,12")
    heads = dict.fromkeys(head_spec(cfg.head).name for cfg in points)
    vocabularies = tuple(dict.fromkeys(cfg.vocab for cfg in points))
    if not any(HeadSpec.from_name(name).target for name in heads) and set(vocabularies) == {"full"}:
        raise ConfigError(
            f"head={','.join(heads)}: is not fitted; name what is, such as head=lsq or head=translator_r15"
        )
    return HeadPlan(
        preflight.for_this_machine(points[:1])[0],
        tuple(dict.fromkeys(cfg.layer for cfg in points if cfg.layer is not None)),
        tuple(dict.fromkeys(["lens", *heads])),
        vocabularies,
    )
