"""Weights that are replaced in a live engine: drafts on copies follow them, and the output is the new model's own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from harness import (
    Live,
    draft_also_what_does_not_pay,
    greedy,
    layer_skip,
    live,
    ragged_prompts,
    steps_of_fixed_times,
    tokens,
)
from models import LAYERS, VOCAB, save_tiny
from torch import Tensor

from selfspec_cli.vllm_plugin.observe import metrics
from selfspec_cli.vllm_plugin.weights import copied

pytestmark = pytest.mark.engine

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

        steps_of_fixed_times(engine, 0.5)
        engine.llm.collective_rpc(negate_copies)
        generate()
        generate()
        engine.llm.collective_rpc(draft_also_what_does_not_pay)
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
        for damage in (lambda layers: scale(layers, 8.0), lambda layers: scale(layers[:1], 0.0)):
            look_again(engine)
            mend = engine.llm.collective_rpc(damage_copies, args=(damage,))[0]
            assert tokens(engine.generate(prompts, params)) == want
            mend()
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


def damage_copies(worker: Any, damage: Callable[[list[list[Tensor]]], None]) -> Callable[[], None]:
    """Called in the worker: `damage` gets the tensors of each copied layer that are the layer's own. Returns what mends
    them."""
    layers = own_tensors(worker)
    before = [[tensor.clone() for tensor in tensors] for tensors in layers]
    damage(layers)

    def mend() -> None:
        for tensors, old in zip(layers, before, strict=True):
            for tensor, value in zip(tensors, old, strict=True):
                tensor.data.copy_(value)

    return mend


def own_tensors(worker: Any) -> list[list[Tensor]]:
    """Of each layer that drafts, the floats that are not the target's."""
    target = worker.model_runner.get_model()
    shared = {tensor.data_ptr() for tensor in (*target.parameters(), *target.buffers())}
    return [
        [
            tensor
            for tensor in (*layer.parameters(), *layer.buffers())
            if tensor.is_floating_point() and tensor.data_ptr() not in shared
        ]
        for layer in worker.model_runner.drafter.model.drafting_layers
    ]


def negate_copies(worker: Any) -> None:
    """Called in the worker: what drafts has no weight that is not the target's, but with the other sign."""
    scale(own_tensors(worker), -1.0)
