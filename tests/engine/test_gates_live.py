"""What gates can do on a live engine, without changing a token: be recorded, change their mind. And round by
round the engine does what the method in plain PyTorch does (early_exit/reference.py)."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import GATES, Counts, Live, change_everything, differing, greedy, layer_skip, live, tokens
from models import LAYERS
from safetensors.torch import load_file

from selfspec_cli.early_exit.draft_log import DraftLog
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.reference import Decoder, Round, always, confident, generate
from selfspec_cli.early_exit.replay import Setting, draft_lengths

K = 6
FEW = range(12)
AT_ONCE = range(8)  # of the engine


@pytest.fixture(scope="module")
def want(expected) -> Any:
    return expected("llama")


@pytest.fixture(scope="module")
def drafting(want) -> Iterator[Live]:
    with live(want.path, layer_skip(LAYERS // 2, K)) as engine:
        yield engine


@pytest.fixture(autouse=True)
def ungated(drafting):
    """Every test begins with the same drafting."""
    drafting.call("early_exit_set_draft_length", K)
    drafting.call("early_exit_set_gate", "none", None)


def recorded(engine: Live, want: Any, only: range) -> tuple[Any, DraftLog]:
    engine.call("early_exit_record", True)
    try:
        made = want.check(engine, only)
        made.require_both_verdicts()
        return made, DraftLog.from_plain(engine.call("early_exit_recorded"), K)
    finally:
        engine.call("early_exit_record", False)


@pytest.mark.parametrize("gate", GATES)
def test_recording_changes_nothing_and_agrees_with_vllms_counters(drafting, want, gate):
    drafting.call("early_exit_set_gate", gate, GATES[gate])
    made, log = recorded(drafting, want, FEW)
    assert Counts(len(log.drafted), int(log.drafted.sum()), int(log.accepted.sum())) == made
    assert len(log.request.unique()) == len(FEW)
    assert torch.isfinite(log.statistics[log.was_drafted]).all()
    if gate != "none":
        # The recorded statistics are those on which the gate decided: replayed, it stops where it stopped.
        setting = Setting(gate, GATES[gate], K)
        assert (draft_lengths(log, setting) == log.drafted).float().mean() > 0.99


def rounds_of(log: DraftLog, request: int) -> list[Round]:
    own = log.choose(log.request == request)
    return [Round(*pair) for pair in zip(own.drafted.tolist(), own.accepted.tolist(), strict=True)]


def by_reference(path: Path, layer: int, k: int, threshold: float | None, prompts: Any, lengths: Any) -> list[Any]:
    """Text and rounds of each request by the method in plain PyTorch, from the same weights, one request at a time."""
    model = Decoder(load_file(path / "model.safetensors"), LAYERS, head_dim=32)
    draft, gate = partial(model, layers=layer), always if threshold is None else confident(threshold)
    return [
        generate(model, draft, model.new_cache(len(prompt) + length + 2 * k), prompt, length, k, gate)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]


@pytest.mark.parametrize(
    ("layer", "k", "threshold"), [(LAYERS // 2, K, None), (LAYERS // 2, K, 0.3), (2, 3, 0.2), (LAYERS - 1, 1, None)]
)
def test_every_round_is_the_references(drafting, want, report, layer, k, threshold):
    drafting.call("early_exit_set_view", {"layer_skip": layer})
    drafting.call("early_exit_set_draft_length", k)
    drafting.call("early_exit_set_gate", *(("none", None) if threshold is None else ("maxp", threshold)))
    try:
        _, log = recorded(drafting, want, AT_ONCE)
    finally:
        drafting.call("early_exit_set_view", {"layer_skip": LAYERS // 2})
    expected = by_reference(want.path, layer, k, threshold, want.prompts[:8], want.lengths[:8])
    assert [text for text, _ in expected] == want.outputs[:8]
    rounds = {tuple(made) for _, made in expected}
    assert {tuple(rounds_of(log, number)) for number in AT_ONCE} == rounds
    assert (log.drafted == k).all() == (threshold is None)
    report(f"E={layer} k={k} maxp>={threshold}: {len(log.drafted)} rounds, {int(log.accepted.sum())} accepted")


def test_what_cannot_be_is_refused_and_what_was_before_it_stays(drafting, want):
    """A draft length that the engine has no room for, a gate, and the record that was not begun."""
    with pytest.raises(SettingsError, match="no record"):
        drafting.call("early_exit_recorded")
    for k in (-1, K + 1, 2.5, True):
        with pytest.raises(SettingsError, match=f"allowed: 0 to {K}"):
            drafting.call("early_exit_set_draft_length", k)
    drafting.call("early_exit_set_gate", "maxp", 1.0)  # closes after each step
    for kind, threshold in (("maxp", 1.5), ("varh", 4.0), ("varH", -1.0), ("none", 0.5), ("auto", None)):
        with pytest.raises(SettingsError):
            drafting.call("early_exit_set_gate", kind, threshold)
    before = drafting.call("early_exit_counters")
    made = want.check(drafting, FEW)
    assert made.drafted == made.rounds > 0
    after = drafting.call("early_exit_counters")
    # A closed gate costs no further draft work: each round takes one step.
    rounds, steps, ended = (after[name] - before[name] for name in ("rounds", "steps", "gate_ended"))
    assert rounds == steps == ended > 0


def test_everything_changes_in_the_middle_of_a_generation(drafting, want):
    before, params = drafting.counts(), [greedy(want.lengths[number]) for number in FEW]
    outputs = drafting.step_through(want.prompts[:12], params, change_everything(drafting, K))
    drafting.call("early_exit_set_length_table", None)
    drafting.call("early_exit_record", False)
    assert not differing(tokens(outputs), want.outputs[:12])
    (drafting.counts() - before).require_both_verdicts()
