"""What drafting counts, on its way through vLLM's own classes to vLLM's own registry; starts no engine."""

import logging
import pickle
from types import SimpleNamespace

from prometheus_client import REGISTRY
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from selfspec_cli.vllm_plugin.observe.transport import ATTRIBUTE, CARRIER, PREFIX, attach, take_out

K = 3
TOTALS = {"rounds": 5, "steps": 9, "gate_ended": 2, "nan_logits": 0, "off.load": 4, "in_force": 2}
TOTALS |= {"length_histogram.1": 2, "position_histogram.0": 7}


EARLY_EXIT = {"method": "layer_skip", "layer_skip": 1, "num_speculative_tokens": K}


def shown() -> dict[tuple[str, str], float]:
    """What a scrape sees of ours: value by name and by the labels that are not of the engine."""
    found = {}
    for metric in REGISTRY.collect():
        for one in metric.samples:
            more = [value for name, value in one.labels.items() if name not in ("model_name", "engine")]
            if one.name.startswith("vllm:selfspec_") and not one.name.endswith("_created"):
                found[one.name.removeprefix("vllm:selfspec_"), *more] = one.value
                assert (one.labels["model_name"], one.labels["engine"]) == ("tiny", "0")
    return found


def watched(record, seen):
    """A logger's `record` that notes what the numbers came in."""

    def noting(stats, *arguments, **more):
        if stats is not None:
            seen.append(dict(getattr(stats, CARRIER)))
        return record(stats, *arguments, **more)

    return noting


def test_an_engine_with_early_exit_shows_what_it_drafted_and_a_plain_one_has_nothing_of_ours(configured):
    manager = StatLoggerManager(configured(EARLY_EXIT))
    at_first = shown()
    assert at_first["draft_length",] == K
    assert at_first["draft_cost",] == (1 + 1) / 8
    assert {name for name, number in at_first.items() if number} == {("draft_length",), ("draft_cost",)}
    reasons = {name[1] for name in at_first if name[0] == "rounds_without_drafts_total"}
    assert reasons == {"load", "context", "request", "cost"}
    assert [name[1] for name in at_first if name[0] == "draft_rounds_by_length_total"] == ["1", "2", "3"]
    assert [name[1] for name in at_first if name[0] == "draft_tokens_per_pos_total"] == ["0", "1", "2"]

    seen = []
    for logger in manager.stat_loggers[1:]:
        logger.record = watched(logger.record, seen)
    for _ in range(2):
        of_step = SchedulerStats(
            **{CARRIER: {"in_progress": 3} | {PREFIX + name: number for name, number in TOTALS.items()}}
        )
        manager.record(of_step, None)
    manager.record(None, None)
    assert seen and all(one == {"in_progress": 3} for one in seen)
    grown = shown()
    assert grown["draft_rounds_total",] == 10
    assert grown["draft_steps_total",] == 18
    assert grown["rounds_ended_by_gate_total",] == 4
    assert grown["draft_rounds_by_length_total", "1"] == 4
    assert grown["draft_tokens_per_pos_total", "0"] == 14
    assert grown["rounds_without_drafts_total", "load"] == 8
    assert grown["draft_length",] == 2

    again = StatLoggerManager(configured(EARLY_EXIT))  # another engine in the same process begins anew
    assert shown() == at_first
    plain = StatLoggerManager(configured(None))
    assert not shown()
    kinds = [type(one) for one in plain.stat_loggers]
    assert len(again.stat_loggers) == len(kinds) + 1
    assert PrometheusStatLogger in kinds
    assert all(kind.__module__.startswith("vllm.") for kind in kinds)


def test_the_numbers_survive_the_way_between_two_processes():
    sent = SchedulerStats(num_running_reqs=2, **{CARRIER: {PREFIX + name: number for name, number in TOTALS.items()}})
    parts = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=sent))
    arrived = MsgpackDecoder(EngineCoreOutputs).decode(parts).scheduler_stats
    assert take_out(arrived) == TOTALS
    assert getattr(arrived, CARRIER) == {}
    assert arrived.num_running_reqs == 2


def test_a_model_runner_lays_its_totals_on_what_goes_to_the_scheduler_also_while_the_step_is_under_way():
    def step(answer, totals):
        drafter = SimpleNamespace(counters=SimpleNamespace(landed=lambda: totals))
        return attach(lambda self, grammar: answer)(SimpleNamespace(drafter=drafter), None)

    totals = {"rounds": 3, "off": {"load": 1}, "length_histogram": [0, 2], "active_histogram": [0, 1], "seconds": 0.5}
    wanted = {"rounds": 3, "off.load": 1, "length_histogram.0": 0, "length_histogram.1": 2}
    output = ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})
    assert step(output, totals) is output
    assert getattr(pickle.loads(pickle.dumps(output)), ATTRIBUTE) == wanted  # it may have to leave the process
    late = SimpleNamespace(model_runner_output=ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0}))
    assert getattr(step(late, totals).model_runner_output, ATTRIBUTE) == wanted
    assert not hasattr(step(EMPTY_MODEL_RUNNER_OUTPUT, totals), ATTRIBUTE)  # vLLM shares it between steps
    nothing_new = ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})
    assert not hasattr(step(nothing_new, None), ATTRIBUTE)
    assert step(None, totals) is None
    bare = attach(lambda self, grammar: output)
    assert bare(SimpleNamespace(drafter=object(), speculator=None), None) is output


def test_copies_of_which_hardly_a_token_is_accepted_are_called_broken_once(configured, monkeypatch):
    """What a request's own text brought speaks for no copy, and early layers may be as weak as that."""
    lines: list[str] = []
    monkeypatch.setattr(logging.getLogger("vllm.selfspec"), "warning", lines.append)

    def found(spec, *steps, v2=False):
        """Warnings about copies. steps: of each number of steps, what was accepted in one, copied tokens included."""
        manager = StatLoggerManager(configured({"method": "layer_skip", "num_speculative_tokens": K, **spec}))
        manager.stat_loggers[0]._counts_by_position = v2
        lines.clear()
        for number, accepted in steps:
            for _ in range(number):
                numbers = {"position_histogram.0": 16, "free_accepted": 5}
                verdicts = SpecDecodingStats.new(K)
                verdicts.num_accepted_tokens = 999 if v2 else accepted  # V2's are of other steps than ours
                numbers |= {"stood_at.0": accepted - 2, "stood_at.1": 2} if v2 else {}
                travelling = {PREFIX + name: number for name, number in numbers.items()}
                manager.record(SchedulerStats(spec_decoding_stats=verdicts, **{CARRIER: travelling}), None)
        return [line for line in lines if "seem broken" in line]

    copies = {"layer_skip": 8, "draft_weights": "fp8"}
    assert not found(copies, (3, 5))
    assert shown()["broken_drafts_total",] == 0
    for steps in (4, 1000):
        (warning,) = found(copies, (steps, 5))
        assert warning.startswith("only 0 tokens of 64 drafts")
        assert shown()["broken_drafts_total",] == 1
    assert not found(copies, (1000, 6))
    (warning,) = found(copies, (4 + 64, 6), (63, 5), (1, 6))  # it broke later
    assert warning.startswith("only 1 tokens of 1024 drafts")
    (warning,) = found(copies, (4 + 20, 6), (44, 5))  # a layer is left out, so that a draft stands now and then
    assert warning.startswith("only 20 tokens of 1024 drafts")
    assert len(found(copies, (4, 5), v2=True)) == 1
    assert not found(copies, (1000, 6), v2=True)
    for weak in ({"layer_skip": 1}, {"layer_skip": 7, "draft_weights": "fp8"}):
        assert not found(weak, (1000, 5))
