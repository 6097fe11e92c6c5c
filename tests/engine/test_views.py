"""Drafting with a subset of the layers, inside a live engine: the right layers run, and the output is the target's."""

from typing import Any

import pytest
from harness import Live, greedy, layer_skip, live, tokens
from models import LAYERS
from test_draft_weights import COMPILED, made
from transformers import AutoTokenizer

from selfspec_cli.config.paths import plain_model_dir
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.view import skipped_layers
from selfspec_cli.texts import library

__all__ = ["made"]  # the fixture
K, SOME = 3, range(0, 32, 4)


@pytest.mark.parametrize(
    ("name", "skipped", "more"),
    [("qwen3", "0,2", {"draft_weights": "int8"}), ("mixtral", "1", {}), ("gemma2", "1", {})],
)
def test_a_thinned_view_drafts_and_the_output_is_the_targets(expected, made, name, skipped, more):
    want = expected(name)
    with live(want.path, layer_skip(LAYERS, K, skip_layers=skipped, **more)) as engine:
        want.check(engine, SOME).require_both_verdicts()
        check_layers(engine, made, skipped)


def check_layers(engine: Live, made: dict[str, Any], skipped: str) -> None:
    """The draft has the layers that were chosen, over the target's own KV cache, in order."""
    step = engine.call("early_exit_step_bytes")
    draft, target = made["trunk"], made["target"]
    left = [i for i in range(LAYERS) if i not in skipped_layers(skipped)]
    assert len(target.layers) == LAYERS and draft.end_layer == len(left)
    for place, own in zip(list(draft.layers), left, strict=True):
        theirs = {id(part) for part in target.layers[own].modules()}
        assert any(id(part) in theirs for part in place.modules() if "Attention" in type(part).__name__)
    if step is not None:  # experts: bytes do not tell
        assert step["draft_kv_token"] == pytest.approx(step["full_kv_token"] * len(left) / LAYERS)


def test_compiled_views_of_equal_depth_run_their_own_layers(expected, made):
    """Two in one process: what each drafts is what the same view drafts on an eager engine. Each keeps the view that it
    was started with, and changes its gate."""
    want, views, compiled, eager = expected("llama"), ("1-2", "2-3"), [], []
    for skipped in views:
        with live(want.path, layer_skip(LAYERS, K, skip_layers=skipped), **COMPILED) as engine:
            compiled.append(want.check(engine, SOME))
            check_layers(engine, made, skipped)
            engine.call("early_exit_set_gate", "maxp", 0.3)
            gated = want.check(engine, SOME)
            gated.require_both_verdicts()
            assert gated.drafted < K * gated.rounds, gated
            with pytest.raises(SettingsError, match="on an eager engine only"):
                engine.call("early_exit_set_view", {"layer_skip": 2})
    with live(want.path, layer_skip(LAYERS // 2, K), enable_prefix_caching=False) as engine:
        for skipped in views:
            engine.call("early_exit_set_view", {"layer_skip": LAYERS, "skip_layers": skipped})
            eager.append(want.check(engine, SOME))
    assert compiled == eager and compiled[0] != compiled[1], (compiled, eager)


def test_a_view_changes_on_a_live_engine(expected):
    """One engine, view after view: each drafts what an engine of its own would, and the output stays the target's."""
    want = expected("llama")
    views: list[dict[str, Any]] = [
        {"layer_skip": LAYERS // 2},
        {"layer_skip": LAYERS, "skip_layers": "1"},
        {"layer_skip": LAYERS, "draft_weights": "int4"},
        {"layer_skip": 1},
        {"layer_skip": LAYERS, "draft_weights": "int8", "skip_layers": [0]},
    ]
    found = []
    with live(want.path, layer_skip(LAYERS // 2, K), enable_prefix_caching=False) as engine:
        for view in views:
            engine.call("early_exit_set_view", view)
            found.append(want.check(engine, SOME))
        for wrong, message in (
            ({"layer_skip": 99}, "layer_skip = 99 is out of range"),
            ({"layer_skip": LAYERS, "skip_layers": [LAYERS]}, f"allowed: 0 to {LAYERS - 1}"),
        ):
            with pytest.raises(SettingsError, match=message):
                engine.call("early_exit_set_view", wrong)
    assert len({(count.drafted, count.accepted) for count in found}) == len(views), found
    with live(want.path, {**layer_skip(1, K), **views[4]}, enable_prefix_caching=False) as engine:
        assert want.check(engine, SOME) == found[4]


@pytest.mark.parametrize("context", [{"draft_window": 32}, {"draft_context": "blocks:64"}], ids=str)
def test_drafts_over_a_part_of_the_context_are_others_and_the_output_is_the_targets(expected, context):
    """Prompts of up to 170 tokens in blocks of 32: under both, most contexts have blocks that are left out. The same
    engine drafts others over the whole context, and over this part of it again the same."""
    want, counts = expected("llama"), []
    with live(want.path, layer_skip(LAYERS - 1, K, **context)) as engine:
        want.check(engine)
        for more in (context, {}, context):
            engine.call("early_exit_set_view", {"layer_skip": LAYERS - 1, **more})
            counts.append(want.check(engine, SOME))
            counts[-1].require_both_verdicts()
    assert counts[0] == counts[2] != counts[1], counts


def test_a_part_of_the_context_is_refused_for_layers_that_have_a_window_and_the_view_before_it_drafts(expected):
    want, counts = expected("gemma2"), []
    with live(want.path, layer_skip(LAYERS // 2, K), enable_prefix_caching=False) as engine:
        for key, value in (("draft_window", 32), ("draft_context", "blocks:64")):
            counts.append(want.check(engine, SOME))
            with pytest.raises(SettingsError, match=f"{key} = {value} is not supported for this model"):
                engine.call("early_exit_set_view", {"layer_skip": 1, key: value})
        counts.append(want.check(engine, SOME))
    assert counts[0] == counts[1] == counts[2], counts


def test_an_ordinary_models_copies_are_accepted_and_its_first_layers_are_not():
    """The same size and text as the embedded model, plainly trained."""
    tokenizer, found = AutoTokenizer.from_pretrained(plain_model_dir()), {}
    texts = [text[:200] for _, text in library.held_out_text()[:8]]
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    with live(plain_model_dir()) as engine:
        want = tokens(engine.generate(ids, greedy(32)))
    with live(plain_model_dir(), layer_skip(24, K, draft_weights="int8")) as engine:
        for name, view in (
            ("copies", {"layer_skip": 24, "draft_weights": "int8"}),
            ("first layers", {"layer_skip": 6}),
        ):
            engine.call("early_exit_set_view", view)
            before = engine.counts()
            assert tokens(engine.generate(ids, greedy(32))) == want, name
            found[name] = engine.counts() - before
            found[name].require_both_verdicts()
    share = {name: counts.accepted / counts.drafted for name, counts in found.items()}
    assert share["copies"] > 0.85 and share["first layers"] < 0.3, share
