"""Weights that are replaced in a live engine: drafts on copies follow them, and the output is the new model's own."""

import logging

from harness import Live, greedy, layer_skip, live, ragged_prompts, tokens
from models import LAYERS, VOCAB, save_tiny
from torch import Tensor

from selfspec_cli.vllm_plugin.observe import metrics
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
        scale(own_tensors(engine), -1.0)
        generate()
        generate()
        engine.draft_also_what_does_not_pay()
        engine.set_gate("none", None)
        for table in ("1:2", "1:0"):
            engine.call("early_exit_set_length_table", table)
            generate()
    report(f"drafts by broken copies of {8 * 64} tokens: {drafted}")
    assert outputs == outputs[-1:] * 4
    assert drafted[0] > 0 == drafted[3]
    assert drafted[1] < drafted[2] / 5
    assert [line.split(" tokens of ")[0] for line in named(lines)] == ["only 0"]


def test_each_kind_of_broken_copies_is_named(model_dir, tmp_path, monkeypatch, report):
    """What reports elsewhere tell of: a wrong scale, a layer left out, weights that were not loaded again."""
    other = save_tiny("llama", tmp_path / "other", seed=1)
    lines: list[str] = []
    monkeypatch.setattr(logging.getLogger("vllm.selfspec"), "warning", lambda text, *words: lines.append(text))
    prompts, params = ragged_prompts(8, VOCAB, seed=3), greedy(150)
    copies = layer_skip(LAYERS, 1, draft_weights="int8")
    with live(model_dir("llama"), copies, enable_prefix_caching=False) as engine:
        want = tokens(engine.generate(prompts, params))
        assert not named(lines)
        layers = own_tensors(engine)
        for damaged, factor in ((layers, 8.0), (layers[:1], 0.0)):
            look_again(engine)
            before = [[tensor.clone() for tensor in tensors] for tensors in damaged]
            scale(damaged, factor)
            assert tokens(engine.generate(prompts, params)) == want
            for tensors, old in zip(damaged, before, strict=True):
                for tensor, value in zip(tensors, old, strict=True):
                    tensor.data.copy_(value)
        look_again(engine)
        monkeypatch.setattr(copied, "renew", lambda *_: None)
        monkeypatch.setattr("selfspec_cli.vllm_plugin.v1.proposer.renew", lambda *_: None)
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
        assert tokens(engine.generate(prompts, params)) != want
        counted = engine.metric("selfspec_broken_drafts")
    report(f"wrong scale, first layer left out, old weights: {named(lines)}")
    assert len(named(lines)) == counted == 3


def named(lines: list[str]) -> list[str]:
    """The beginning of each warning of broken copies, which says how many tokens of how many drafts were accepted."""
    return [line.split(" by copies")[0] for line in lines if "seem broken" in line]


def look_again(engine: Live) -> None:
    """Begin to judge copies anew, as at the start of the engine."""
    for logger in engine.llm.llm_engine.logger_manager.stat_loggers:
        if isinstance(logger, metrics.DraftingStatLogger):
            logger._copies[0] = metrics.Copies()


def scale(layers: list[list[Tensor]], factor: float) -> None:
    for tensors in layers:
        for tensor in tensors:
            tensor.data.mul_(factor)


def own_tensors(engine: Live) -> list[list[Tensor]]:
    """Of each layer that drafts, the floats that are not the target's."""
    target = engine.runner.get_model()
    shared = {tensor.data_ptr() for tensor in (*target.parameters(), *target.buffers())}
    return [
        [
            tensor
            for tensor in (*layer.parameters(), *layer.buffers())
            if tensor.is_floating_point() and tensor.data_ptr() not in shared
        ]
        for layer in engine.drafter.model.drafting_layers
    ]
