"""The corners of losslessness: what else can happen to a request while another drafts.

Each scenario is a function of a live engine that returns plain data. All of them run once on the plain engine and once
on the drafting one; each must give the same."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness import GATES, Live, greedy, layer_skip, live, ragged_prompts
from models import EOS, LAYERS, MAX_LEN, VOCAB
from vllm.sampling_params import StructuredOutputsParams

K = 5
PROMPTS = ragged_prompts(12, VOCAB, seed=1)
STOPS = list(range(3, 60))  # so many that most requests meet one
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"enum": ["small", "large"]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
LONG = [(prompt * MAX_LEN)[: MAX_LEN - 2 - 3 * number] for number, prompt in enumerate(PROMPTS[:6])]


def ends(outputs: list[Any]) -> list[tuple[list[int], Any, Any]]:
    """Tokens of each request, and why it ended."""
    samples = [output.outputs[0] for output in outputs]
    return [(list(sample.token_ids), sample.finish_reason, sample.stop_reason) for sample in samples]


REQUESTS: dict[str, tuple[list[list[int]], Any]] = {
    # A stop token inside an accepted draft cuts what was accepted after it.
    "stop_tokens": (PROMPTS, greedy(64, stop_token_ids=STOPS[::4])),
    "end_of_text": (ragged_prompts(32, VOCAB, seed=2), greedy(96, ignore_eos=False)),
    "min_tokens": (PROMPTS, greedy(64, stop_token_ids=STOPS, min_tokens=9)),
    # Some requests reach max_model_len while others, short ones, go on beside them.
    "model_is_full": ([*LONG, *PROMPTS[6:]], greedy(40)),
    "penalties": (PROMPTS, greedy(48, repetition_penalty=1.3, frequency_penalty=0.2)),
    "allowed_tokens": (PROMPTS, [greedy(48, allowed_token_ids=list(range(3, VOCAB, 2))), greedy(48)] * 6),
    # The same prompts twice in one batch: the second comes from the prefix cache, or shares its blocks.
    "prefixes": (PROMPTS + PROMPTS, greedy(40)),
}


def stop_token_at_min_tokens(engine: Live) -> Any:
    """Each request meets its stop token at the first place where it may, which for some is behind a whole round."""
    free = [list(output.outputs[0].token_ids) for output in engine.generate(PROMPTS, greedy(16))]
    # A token that comes before would be forbidden there, and another text would follow.
    places = [(row, at) for row, text in enumerate(free) for at in range(2, 16) if text[at] not in text[:at]]
    params = [greedy(24, stop_token_ids=[free[row][at]], min_tokens=at) for row, at in places]
    return places, ends(engine.generate([PROMPTS[row] for row, _ in places], params))


def structured_output(engine: Live) -> Any:
    """A grammar refuses drafted tokens before they are verified; every fourth request is free of one."""
    kinds = [{"json": SCHEMA}, {"choice": ["yes", "perhaps", "no"]}, {"regex": r"[a-f]{3}-[0-9]{4,9}"}]
    given = [StructuredOutputsParams(**kind) for kind in kinds]
    bound = [greedy(60, ignore_eos=False, detokenize=True, structured_outputs=one) for one in given]
    outputs = engine.generate(PROMPTS, [*bound, greedy(60)] * 3)
    assert outputs[1].outputs[0].text in ("yes", "perhaps", "no")
    return ends(outputs)


SCENARIOS: dict[str, Callable[[Live], Any]] = {
    name: lambda engine, asked=asked: ends(engine.generate(*asked)) for name, asked in REQUESTS.items()
}
SCENARIOS |= {"stop_token_at_min_tokens": stop_token_at_min_tokens, "structured_output": structured_output}


@pytest.fixture(scope="module")
def plain(talking) -> dict[str, Any]:
    """What the plain engine gives for every scenario, and log-probabilities."""
    with live(talking, skip_tokenizer_init=False) as engine:
        return {name: run(engine) for name, run in SCENARIOS.items()} | {"logprobs": logprobs(engine)}


@pytest.fixture(scope="module")
def drafting(plain, talking) -> Iterator[Live]:
    with live(talking, layer_skip(LAYERS // 2, K, gate="maxp", tau=GATES["maxp"]), skip_tokenizer_init=False) as engine:
        yield engine


@pytest.mark.parametrize("gate", ["none", "maxp"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(plain, drafting, name, gate):
    drafting.set_gate(gate, GATES[gate])
    before = drafting.counts()
    assert SCENARIOS[name](drafting) == plain[name]
    (drafting.counts() - before).require_both_verdicts()


def test_scenarios_are_what_they_say(plain):
    """Each ends requests the way it is there for."""
    assert {why for _, why, _ in plain["stop_tokens"]} == {"stop", "length"}
    assert {why for _, why, _ in plain["end_of_text"]} == {"stop", "length"}
    assert all(EOS not in got[:-1] for got, _, _ in plain["end_of_text"])
    assert min(len(got) for got, _, _ in plain["min_tokens"]) == 10
    places, stopped = plain["stop_token_at_min_tokens"]
    assert [len(got) for got, _, _ in stopped] == [place + 1 for _, place in places]
    assert len(places) > 60
    assert [len(got) for got, _, _ in plain["model_is_full"]][:6] == [2, 5, 8, 11, 14, 17]
    assert all(token % 2 for got, _, _ in plain["allowed_tokens"][::2] for token in got)


def logprobs(engine: Live) -> Any:
    """(token, its log-probability, the best three, of the prompt) for a batch where every other request asks."""
    asking = greedy(48, logprobs=3, prompt_logprobs=1)
    outputs = engine.generate(PROMPTS, [asking, greedy(48)] * 6)[::2]
    generated = [list(zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True)) for o in outputs]
    chosen = [(token, scores[token].logprob) for pairs in generated for token, scores in pairs]
    best = [
        sorted((s.logprob for s in scores.values()), reverse=True)[:3] for pairs in generated for _, scores in pairs
    ]
    prompt = [s.logprob for o in outputs for scores in o.prompt_logprobs[1:] for s in scores.values()]
    return [token for token, _ in chosen], [score for _, score in chosen], [s for three in best for s in three], prompt


def test_logprobs_are_the_target_models(plain, drafting):
    drafting.set_gate("none", None)
    before = drafting.counts()
    got, want = logprobs(drafting), plain["logprobs"]
    (drafting.counts() - before).require_both_verdicts()
    assert got[0] == want[0]
    for ours, theirs in zip(got[1:], want[1:], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def drafting_cost(engine: Live, gate: str, threshold: float | None) -> tuple[Any, dict[str, Any]]:
    """vLLM's counts, and the worker's own counters, of the same twelve requests under one gate."""
    engine.set_gate(gate, threshold)
    counts, before = engine.counts(), engine.call("early_exit_counters")
    engine.generate(PROMPTS, greedy(48))
    after = engine.call("early_exit_counters")
    own = {name: after[name] - before[name] for name in ("rounds", "steps", "drafted", "gate_ended")}
    lengths = zip(after["length_histogram"], before["length_histogram"], strict=True)
    return engine.counts() - counts, own | {"histogram": [new - old for new, old in lengths]}


def test_a_closed_gate_costs_no_further_draft_work(drafting):
    open_, free = drafting_cost(drafting, "none", None)
    some, gated = drafting_cost(drafting, "maxp", GATES["maxp"])
    shut, closed = drafting_cost(drafting, "maxp", 1.0)
    assert free["gate_ended"] == 0
    assert free["histogram"] == [0] * K + [free["rounds"]]
    assert free["steps"] == free["rounds"] * K
    # The trunk runs one step a round, and only over the requests that take part.
    assert closed["steps"] == closed["rounds"] == closed["gate_ended"] == closed["histogram"][1]
    assert shut.drafted == shut.rounds
    # In between: a round lasts as long as its last open request, but each request drafts only while its gate is open.
    assert sum(count > 0 for count in gated["histogram"]) > 2
    assert gated["steps"] < gated["rounds"] * K
    assert gated["drafted"] < gated["steps"] * 8
    assert some.rounds < some.drafted < some.rounds * K
    for counts, own in ((open_, free), (some, gated), (shut, closed)):
        # What vLLM counted as drafted is what was computed, but for the last round of requests that had ended already.
        assert counts.drafted <= own["drafted"] <= counts.drafted + len(PROMPTS) * K
