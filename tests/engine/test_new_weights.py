"""Weights that are replaced in a live engine: drafts on copies follow them, and the output is the new model's own."""

import logging

from harness import greedy, layer_skip, live, ragged_prompts, tokens
from models import LAYERS, VOCAB, save_tiny
from test_draft_weights import copies_of, spoil
from torch import Tensor

from selfspec_cli.vllm_plugin.weights import copied

EXIT, K = LAYERS // 2, 5


def test_copies_follow_weights_that_are_replaced(model_dir, tmp_path, monkeypatch, report):
    """Before, copies stayed those of the old weights: two drafts of a thousand were accepted, without a word."""
    other = save_tiny("llama", tmp_path / "other", seed=1)
    prompts, params = ragged_prompts(8, VOCAB, seed=3), greedy(48)
    with live(other) as engine:
        want = tokens(engine.generate(prompts, params))
    with live(model_dir("llama"), layer_skip(EXIT, K, draft_weights="int8"), enable_prefix_caching=False) as engine:

        def accepted() -> float:
            before = engine.counts()
            outputs.append(tokens(engine.generate(prompts, params)))
            made = engine.counts() - before
            made.require_both_verdicts()
            return made.accepted / made.drafted

        outputs: list[list[list[int]]] = []
        old = accepted()
        with monkeypatch.context() as without:  # what would happen without renewal: the test sees a difference
            without.setattr(copied, "renew", lambda *_: None)
            without.setattr("selfspec_cli.vllm_plugin.v1.proposer.renew", lambda *_: None)
            engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
            stale = accepted()
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
        new = accepted()
    report(f"accepted of drafted: {old:.3f} before, {stale:.3f} on stale copies, {new:.3f} on new ones")
    assert outputs[0] != outputs[1] == outputs[2] == want
    assert new > 0.5 * old > 2 * stale


def test_copies_that_are_broken_are_named_once_and_hardly_draft_any_more(model_dir, monkeypatch, report):
    """The output stays right, so that nothing else shows it. The rule ends such drafts before a warning is certain."""
    lines: list[str] = []
    monkeypatch.setattr(logging.getLogger("vllm.selfspec"), "warning", lambda text, *words: lines.append(text))
    prompts, params = ragged_prompts(8, VOCAB, seed=3), greedy(64)
    with live(model_dir("llama"), {"method": "selfspec"}) as engine:
        drafted, outputs = [], []

        def generate():
            before = engine.call("early_exit_counters")["drafted"]
            outputs.append(tokens(engine.generate(prompts, params)))
            drafted.append(engine.call("early_exit_counters")["drafted"] - before)

        engine.fix_times(0.5)
        spoil(copies_of(engine.drafter.model.drafting_layers), Tensor.neg_)
        generate()
        generate()
        assert engine.drafter.counters.off["cost"] > 0  # rounds without drafts
        engine.draft_also_what_does_not_pay()
        engine.set_gate("none", None)
        for table in ("1:2", "1:0"):
            engine.call("early_exit_set_length_table", table)
            generate()
    report(f"drafts by broken copies of {8 * 64} tokens: {drafted}")
    assert outputs == outputs[-1:] * 4
    assert drafted[0] > 0 == drafted[3]
    assert drafted[1] < drafted[2] / 5
    assert [line.split(" tokens of ")[0] for line in lines if "seem broken" in line] == ["only 0"]
