"""The corners of losslessness: what else can happen to a request while another drafts. What requests may ask for is in
test_request_faults.py.

Each scenario is a function of a live engine that returns plain data. All of them run once on the plain engine and once
on the drafting one; each must give the same."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness import GATES, Live, greedy, layer_skip, live, ragged_prompts
from models import EOS, LAYERS, MAX_LEN, VOCAB

K = 5
PROMPTS = ragged_prompts(12, VOCAB, seed=1)
STOPS = list(range(3, 60))  # so many that most requests meet one
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


SCENARIOS: dict[str, Callable[[Live], Any]] = {
    name: lambda engine, asked=asked: ends(engine.generate(*asked)) for name, asked in REQUESTS.items()
}
SCENARIOS["stop_token_at_min_tokens"] = stop_token_at_min_tokens


@pytest.fixture(scope="module")
def plain(model_dir) -> dict[str, Any]:
    """What the plain engine gives for every scenario."""
    with live(model_dir("llama")) as engine:
        return {name: run(engine) for name, run in SCENARIOS.items()}


@pytest.fixture(scope="module")
def drafting(plain, model_dir) -> Iterator[Live]:
    with live(model_dir("llama"), layer_skip(LAYERS // 2, K, gate="maxp", tau=GATES["maxp"])) as engine:
        yield engine


@pytest.mark.parametrize("gate", ["none", "maxp"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(plain, drafting, name, gate):
    drafting.call("early_exit_set_gate", gate, GATES[gate])
    before = drafting.counts()
    assert SCENARIOS[name](drafting) == plain[name]
    (drafting.counts() - before).require_both_verdicts()


def test_scenarios_are_what_they_say(plain):
    assert {why for _, why, _ in plain["stop_tokens"]} == {"stop", "length"}
    assert {why for _, why, _ in plain["end_of_text"]} == {"stop", "length"}
    assert all(EOS not in got[:-1] for got, _, _ in plain["end_of_text"])
    assert min(len(got) for got, _, _ in plain["min_tokens"]) == 10
    places, stopped = plain["stop_token_at_min_tokens"]
    assert [len(got) for got, _, _ in stopped] == [place + 1 for _, place in places]
    assert len(places) > 60
    assert [len(got) for got, _, _ in plain["model_is_full"]][:6] == [2, 5, 8, 11, 14, 17]
