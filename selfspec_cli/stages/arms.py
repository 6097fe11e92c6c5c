"""Arms as `ppl` and `eval` look at them: a method with its settings on one model and engine, whatever the workload."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from selfspec_cli import interrupts
from selfspec_cli.config import machine
from selfspec_cli.config.keys import engine_key, layer_in_force
from selfspec_cli.config.schema import ConfigError, RunConfig, gate_threshold, to_plain
from selfspec_cli.early_exit.errors import on_one_line
from selfspec_cli.progress import Progress
from selfspec_cli.record import folder as results
from selfspec_cli.record import quality, tables
from selfspec_cli.record.quality import Finding
from selfspec_cli.stages import plan as planning
from selfspec_cli.stages.plan import Planned


@dataclass(frozen=True)
class Failure:
    """An arm of which something could not be found, and why. bad_input: what was asked for cannot be had."""

    arm: str
    reason: str
    bad_input: bool


@dataclass
class Found:
    """What was found, in the order in which it was, and what could not be."""

    findings: list[Finding] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0: nothing failed; 2: all that failed was bad input; 1: a run failed."""
        if not self.failed:
            return 0
        return 2 if all(one.bad_input for one in self.failed) else 1


def families(cfgs: Sequence[RunConfig]) -> list[list[Planned]]:
    """The arms of configs, each once, after the baseline of their model and engine; neighbours can share an engine."""
    found = []
    for family in planning.plan(cfgs, again=True).families:
        known: dict[str, Planned] = {}
        for planned in [*family.baselines[:1], *(one for group in family.groups for one in group)]:
            known.setdefault(planned.arm, planned)
        found.append(list(known.values()))
    return found


def each(
    arms: Sequence[Planned],
    open_engine: Callable[[RunConfig], AbstractContextManager[Any]],
    do: Callable[[Any, Planned], None],
    progress: Progress,
) -> list[Failure]:
    """Call `do(engine, arm)` for each arm, on engines that neighbours share; what fails is returned at the end."""
    failed: list[Failure] = []
    waiting = list(arms)
    while waiting:
        group = list(next(members for _, members in groupby(waiting, key=lambda one: engine_key(one.cfg))))
        try:
            with open_engine(group[0].cfg) as engine:
                while group:
                    interrupts.check()
                    planned = group.pop(0)
                    waiting.pop(0)
                    try:
                        cfg = planned.cfg
                        if cfg.method == "layer_skip":
                            engine.set_gate(str(cfg.gate.kind), gate_threshold(cfg))
                        do(engine, planned)
                    except results.RecordError:
                        raise
                    except Exception as error:
                        failed.append(failure(planned, error))
                        if not isinstance(error, ConfigError):
                            break
                    finally:
                        progress("arms", len(arms) - len(waiting), len(arms))
        except results.RecordError:  # nothing that comes could be written either
            raise
        except Exception as error:  # it did not start, or did not end: none of those that wait for it can do better
            failed += [failure(planned, error) for planned in group]
            del waiting[: len(group)]
    return failed


def failure(planned: Planned, error: Exception) -> Failure:
    """The failure of an arm as it is reported; raises KeyboardInterrupt if the user interrupted the run."""
    interrupts.check()
    return Failure(label(planned), on_one_line(error), isinstance(error, ConfigError))


def label(planned: Planned) -> str:
    """An arm in a few words, with its settings."""
    return quality.arm_in_words(named(planned.cfg))


def keep(
    found: Found,
    planned: Planned,
    base: Planned,
    kind: str,
    run_id: str,
    protocol: dict[str, Any],
    document: dict[str, Any],
) -> None:
    """Write a finding about an arm, with what it takes to believe it, and add it to what was found."""
    finding = Finding(
        kind=kind,
        arm_key=planned.arm,
        run_id=run_id,
        time=results.now(),
        device=planned.device,
        arm=named(planned.cfg),
        baseline=None if planned is base else base.arm,
        protocol=protocol,
        found=document,
        config=to_plain(planned.cfg),
        digests=planned.digests,
        **machine.provenance(),
    )
    results.save_finding(planned.cfg.results_dir, finding)
    found.findings.append(finding)


def named(cfg: RunConfig) -> dict[str, Any]:
    """The columns of a row that name its arm."""
    columns = tables.identity(cfg, layer_in_force(cfg))
    return {name: value for name, value in columns.items() if name not in quality.NO_NAMES}
