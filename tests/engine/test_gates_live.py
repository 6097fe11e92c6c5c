"""What gates can do on a live engine, without changing a token: be recorded, change their mind, meet broken logits. And
round by round the engine does what the method in plain PyTorch does (early_exit/reference.py)."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from harness import GATES, Live, change_everything, differing, greedy, layer_skip, live, ragged_prompts, tokens
from models import LAYERS, VOCAB
from safetensors.torch import load_file

from selfspec_cli.early_exit.draft_log import DraftLog
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.reference import Decoder, Round, always, confident, generate
from selfspec_cli.early_exit.replay import Setting, draft_lengths

K = 6
PROMPTS = ragged_prompts(12, VOCAB, seed=3)
AT_ONCE = 8  # of the engine
LENGTH = 48


@pytest.fixture(scope="module")
def plain(model_dir) -> list[list[int]]:
    """What the plain engine generates."""
    with live(model_dir("llama")) as engine:
        return tokens(engine.generate(PROMPTS, greedy(LENGTH)))


@pytest.fixture(scope="module")
def drafting(plain, model_dir) -> Iterator[Live]:
    with live(model_dir("llama"), layer_skip(LAYERS // 2, K)) as engine:
        yield engine


@pytest.fixture(autouse=True)
def ungated(drafting):
    """Every test begins with the same drafting."""
    drafting.call("early_exit_set_draft_length", K)
    drafting.call("early_exit_set_gate", "none", None)


def same(engine: Live, plain: list[list[int]], count: int = len(PROMPTS)) -> Any:
    """Generate, compare, and give vLLM's counts; drafts were made, some accepted and some not. count: of prompts."""
    made = engine.gives(PROMPTS[:count], greedy(LENGTH), plain[:count])
    made.require_both_verdicts()
    return made


def recorded(engine: Live, plain: list[list[int]], count: int = len(PROMPTS)) -> tuple[Any, DraftLog]:
    engine.call("early_exit_record", True)
    try:
        made = same(engine, plain, count)
        return made, DraftLog.from_plain(engine.call("early_exit_recorded"), K)
    finally:
        engine.call("early_exit_record", False)


@pytest.mark.parametrize("gate", GATES)
def test_recording_changes_nothing_and_agrees_with_vllms_counters(drafting, plain, gate):
    drafting.call("early_exit_set_gate", gate, GATES[gate])
    made, log = recorded(drafting, plain)
    assert (len(log.drafted), int(log.drafted.sum()), int(log.accepted.sum())) == (
        made.rounds,
        made.drafted,
        made.accepted,
    )
    assert len(log.request.unique()) == len(PROMPTS)
    assert torch.isfinite(log.statistics[log.was_drafted]).all()
    if gate != "none":
        # The recorded statistics are those on which the gate decided: replayed, it stops where it stopped.
        setting = Setting(gate, GATES[gate], K)
        assert (draft_lengths(log, setting) == log.drafted).float().mean() > 0.99


def rounds_of(log: DraftLog, request: int) -> list[Round]:
    own = log.choose(log.request == request)
    return [Round(*pair) for pair in zip(own.drafted.tolist(), own.accepted.tolist(), strict=True)]


@pytest.mark.parametrize(
    ("layer", "k", "threshold"), [(LAYERS // 2, K, None), (LAYERS // 2, K, 0.3), (2, 3, 0.2), (LAYERS - 1, 1, None)]
)
def test_every_round_is_the_references(drafting, plain, model_dir, report, layer, k, threshold):
    """From the same weights, in a batch of eight beside the reference's one request at a time."""
    model = Decoder(load_file(model_dir("llama") / "model.safetensors"), LAYERS, head_dim=32)
    draft, gate = partial(model, layers=layer), always if threshold is None else confident(threshold)
    drafting.call("early_exit_set_view", {"layer_skip": layer})
    drafting.call("early_exit_set_draft_length", k)
    drafting.call("early_exit_set_gate", *(("none", None) if threshold is None else ("maxp", threshold)))
    try:
        _, log = recorded(drafting, plain, AT_ONCE)
    finally:
        drafting.call("early_exit_set_view", {"layer_skip": LAYERS // 2})
    expected = [
        generate(model, draft, model.new_cache(len(prompt) + LENGTH + 2 * K), prompt, LENGTH, k, gate)
        for prompt in PROMPTS[:AT_ONCE]
    ]
    assert [text for text, _ in expected] == plain[:AT_ONCE]
    rounds = {tuple(made) for _, made in expected}
    assert {tuple(rounds_of(log, number)) for number in range(AT_ONCE)} == rounds
    assert (log.drafted == k).all() == (threshold is None)
    report(f"E={layer} k={k} maxp>={threshold}: {len(log.drafted)} rounds, {int(log.accepted.sum())} accepted")


@pytest.mark.parametrize("k", [-1, K + 1, 2.5, True])
def test_a_draft_length_that_the_engine_has_no_room_for_is_refused(drafting, k):
    with pytest.raises(SettingsError, match=f"allowed: 0 to {K}"):
        drafting.call("early_exit_set_draft_length", k)


def test_a_gate_that_cannot_be_is_refused_and_the_one_before_it_stays(drafting, plain):
    drafting.set_gate("maxp", 1.0)  # closes after each step
    for kind, threshold in (("maxp", 1.5), ("varh", 4.0), ("varH", -1.0), ("none", 0.5), ("auto", None)):
        with pytest.raises(SettingsError):
            drafting.set_gate(kind, threshold)
    made = drafting.gives(PROMPTS, greedy(LENGTH), plain)
    assert made.drafted == made.rounds > 0


def test_everything_changes_in_the_middle_of_a_generation(drafting, plain):
    before = drafting.counts()
    outputs = drafting.step_through(PROMPTS, [greedy(LENGTH)] * len(PROMPTS), change_everything(drafting, K))
    drafting.call("early_exit_set_length_table", None)
    drafting.call("early_exit_record", False)
    assert not differing(tokens(outputs), plain)
    (drafting.counts() - before).require_both_verdicts()


def test_asking_for_a_record_that_was_not_begun(drafting):
    with pytest.raises(SettingsError, match="no record"):
        drafting.call("early_exit_recorded")


class Broken:
    """Stands before a head and spoils the logits of every third step."""

    def __init__(self, head: Any, value: float) -> None:
        self.head, self.value, self.steps, self.spoiled = head, value, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.head, name)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.head.logits(hidden)
        self.steps += 1
        if self.steps % 3 == 0:
            logits = logits.clone()
            logits[0] = (
                self.value if self.value == self.value else torch.where(torch.arange(VOCAB) == 7, self.value, 0.0)
            )
            self.spoiled += 1
        return logits


@pytest.mark.parametrize("gate", ["none", "survival"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")], ids=str)
def test_logits_that_are_no_numbers_close_the_gate_and_are_counted(drafting, plain, gate, value):
    drafter = drafting.drafter
    broken, before = Broken(drafter.head, value), drafter.counters.nan_logits
    drafter.head = broken
    try:
        drafting.call("early_exit_set_gate", gate, GATES[gate])
        made = same(drafting, plain, AT_ONCE)
        assert drafter.counters.nan_logits - before == broken.spoiled > 10
        assert made.drafted < made.rounds * K
        sampled = drafting.generate(PROMPTS[:AT_ONCE], greedy(16, temperature=1.0))
        assert all(0 <= token < VOCAB for output in tokens(sampled) for token in output)
    finally:
        drafter.head = broken.head
