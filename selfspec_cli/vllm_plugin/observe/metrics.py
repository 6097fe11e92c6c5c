"""What drafting did, among vLLM's own metrics. Runs in the process that answers /metrics."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from selfspec_cli.early_exit.counters import JUDGED, REASONS, STOOD
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.vllm_plugin import vllm_names as vllm
from selfspec_cli.vllm_plugin.observe.transport import take_out
from selfspec_cli.vllm_plugin.spec_config import LOGGER, settings_of
from selfspec_cli.vllm_plugin.vllm_names import (
    AggregateStatLoggerBase,
    PrometheusStatLogger,
    StatLoggerManager,
    create_metric_per_engine,
)

NAME = "vllm:selfspec_"
"""Begins as vLLM's names do, so that vLLM takes the metrics of a dead engine out of the registry with its own."""
PLAIN = (
    ("rounds", "draft_rounds", "Rounds in which any request was drafted for."),
    ("steps", "draft_steps", "Forward passes of the layers that draft."),
    ("gate_ended", "rounds_ended_by_gate", "Rounds that the gate, or free drafts, ended before the draft length."),
    ("free_drafted", "free_tokens_drafted", "Tokens drafted from what a request had before."),
    ("free_accepted", "free_tokens_accepted", "Of these, tokens that were accepted."),
    ("nan_logits", "nan_logits", "Drafted tokens whose logits were no numbers."),
    ("broken", "broken_drafts", "1 once copies of the model seem broken: hardly a token of theirs was accepted."),
)
"""Name as it travels, name of the counter, what it counts. The last one does not travel: it is found here."""
LABELLED = (
    ("length_histogram", "draft_rounds_by_length", "length", "Rounds by the number of draft steps that they took."),
    ("position_histogram", "draft_tokens_per_pos", "position", "Tokens drafted at each position of a draft."),
    ("off", "rounds_without_drafts", "reason", "Steps after which a request was not drafted for, by what forbade it."),
    ("steps_of_width", "steps_by_draft_slots", "slots", "Steps planned, by draft slots of a request (0: plain)."),
    (JUDGED, "draft_tokens_judged_per_pos", "position", "Drafts that were verified when all before them stood."),
    (STOOD, "draft_tokens_stood_per_pos", "position", "Of these, drafts that stood."),
)
"""The same of counters with one more label: its name stands before what is counted."""
GAUGES = (
    ("in_force", "draft_length", 1.0, "Most tokens that a running request may draft."),
    ("expected_us", "expected_step_seconds", 1e-6, "Time that the next decode step should take."),
    ("real_us", "step_seconds", 1e-6, "Time that the last decode step took."),
    ("step_cost_milli", "draft_cost", 1e-3, "Cost of one draft step, in plain decoding steps."),
)
"""Name as it travels, name of the gauge, the unit of what travels, what it shows."""
LOOKS = ((64, 0.01), (1024, 0.05))
"""Drafts by copies of all layers after which the copies are judged, first and then again, and the mean number of
accepted tokens a draft below which they are called broken. Right copies of tiny random models have 0.3 and more. Of
94 first tokens of SmolLM2-135M its layers drafted 93 right over its own keys, without the first layer 3, with all
weights doubled or their rows scaled at random none (the doubled first layer alone: 25, which is no fault to be sure
of). If a draft's first token stands with a chance of 0.1, as with requests that are sampled very hot, one engine in 800
is warned of falsely at the first look, and none later."""
WARNING = (
    "only %d tokens of %d drafts by copies of the model's layers were accepted: the copies seem broken (a wrong scale, "
    "a layer left out, old weights). The output stays the model's own. Under gate auto such drafts end by themselves, "
    "for they do not pay; a fixed draft length goes on"
)


@dataclass
class Copies:
    """What became of drafts by copies of all layers since the last look."""

    drafts: int = 0  # that have a token of the copies
    accepted: int = 0  # tokens of the copies
    look: tuple[int, float] = LOOKS[0]

    def judge(self, drafts: int, accepted: int) -> str | None:
        """Take in what is new; the warning if it is clear now that the copies are broken."""
        self.drafts, self.accepted = self.drafts + drafts, self.accepted + accepted
        enough, least = self.look
        if self.drafts < enough:
            return None
        warning = WARNING % (self.accepted, self.drafts) if self.accepted < least * self.drafts else None
        self.drafts, self.accepted, self.look = 0, 0, LOOKS[1]
        return warning


def add_to(manager: StatLoggerManager, vllm_config: vllm.VllmConfig) -> None:
    """Show what drafting did beside vLLM's own metrics, where an engine drafts with its own layers.
    The logger comes first, so that it takes its numbers out before vLLM's look at what they came in."""
    settings = settings_of(vllm_config)
    own = next((one for one in manager.stat_loggers if isinstance(one, PrometheusStatLogger)), None)
    if settings is not None and settings.verify and own is not None:
        manager.stat_loggers.insert(0, DraftingStatLogger(vllm_config, manager.engine_indexes, own))


class DraftingStatLogger(AggregateStatLoggerBase):
    """Counters of drafting, one for each engine. own: vLLM's logger, whose kinds of metrics and labels these share."""

    def __init__(self, vllm_config: vllm.VllmConfig, engine_indexes: list[int], own: PrometheusStatLogger) -> None:
        settings = settings_of(vllm_config)
        assert settings is not None
        # Prometheus's own, or Ray's.
        self._counter_kind = type(own.counter_generation_tokens[engine_indexes[0]])
        self._gauge_kind: Any = type(own.gauge_scheduler_running[engine_indexes[0]])
        self._engines = {index: own.per_engine_labelvalues[index] for index in engine_indexes}
        self._counters: dict[str, dict[int, Any]] = {}
        layers = int(vllm_config.model_config.hf_text_config.num_hidden_layers)
        whole = DRAFT_WEIGHTS[settings.draft_weights].copies and settings.layer == layers and not settings.skipped
        self._counts_by_position = vllm_config.use_v2_model_runner and settings.measures
        self._copies = {index: Copies() for index in engine_indexes} if whole else {}
        for travelling, name, what in PLAIN:
            self._counters[travelling] = create_metric_per_engine(self._counter(name, what), self._engines)
        values: dict[str, Iterable[object]] = {
            "length_histogram": range(1, settings.k + 1),
            "position_histogram": range(settings.k),
            "off": REASONS,
            "steps_of_width": range(settings.width + 1),
            JUDGED: range(settings.width),
            STOOD: range(settings.width),
        }
        for travelling, name, label, what in LABELLED:
            counter = self._counter(name, what, label)
            for value in values[travelling]:
                labels = {index: [*given, str(value)] for index, given in self._engines.items()}
                self._counters[f"{travelling}.{value}"] = create_metric_per_engine(counter, labels)
        self._gauges = {travelling: (self._gauge(name, what), unit) for travelling, name, unit, what in GAUGES}
        for index in engine_indexes:
            self._gauges["in_force"][0][index].set(settings.k)
            self._gauges["step_cost_milli"][0][index].set(settings.assumed_draft_step(layers))

    def _counter(self, name: str, what: str, *labels: str) -> Any:
        names = ["model_name", "engine", *labels]
        return self._counter_kind(name=NAME + name, documentation=what, labelnames=names)

    def _gauge(self, name: str, what: str) -> Any:
        names = ["model_name", "engine"]
        gauge = self._gauge_kind(name=NAME + name, documentation=what, labelnames=names, multiprocess_mode="mostrecent")
        return create_metric_per_engine(gauge, self._engines)

    def record(
        self,
        scheduler_stats: vllm.SchedulerStats | None,
        iteration_stats: vllm.IterationStats | None,
        mm_cache_stats: vllm.MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is None:
            return
        numbers, copies = take_out(scheduler_stats), self._copies.get(engine_idx)
        for name, number in numbers.items():
            if name in self._gauges:
                gauge, unit = self._gauges[name]
                gauge[engine_idx].set(number * unit)
            elif name in self._counters:
                self._counters[name][engine_idx].inc(number)
        warning = None if copies is None else copies.judge(*self._by_copies(numbers, scheduler_stats))
        if warning is not None:
            self._copies.pop(engine_idx)  # said once
            self._counters["broken"][engine_idx].inc()
            logging.getLogger(LOGGER).warning(warning)

    def _by_copies(self, numbers: Mapping[str, int], stats: vllm.SchedulerStats) -> tuple[int, int]:
        """New drafts with a token of the model's own, and such tokens that were accepted. vLLM's count is of the step;
        ours come a moment later from a device, so the two are not mixed there."""
        verdicts = stats.spec_decoding_stats
        accepted = 0 if verdicts is None else verdicts.num_accepted_tokens
        if self._counts_by_position:
            accepted = sum(number for name, number in numbers.items() if name.startswith(STOOD))
        return numbers.get("position_histogram.0", 0), accepted - numbers.get("free_accepted", 0)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
