"""Copies fitted to what a live engine's layers see: they draft, better than rounded ones, and the output stays."""

import pytest
from harness import greedy, layer_skip, live
from models import LAYERS
from safetensors import safe_open

from selfspec_cli.early_exit.errors import SettingsError

pytestmark = pytest.mark.engine

K, SOME = 3, range(0, 32, 4)


def test_fitted_copies_draft_better_and_the_output_is_the_targets(expected, tmp_path):
    want, counts = expected("llama"), {}
    file = tmp_path / "int4.safetensors"
    with live(want.path) as engine:
        engine.call("early_exit_observe")
        engine.generate(want.prompts[1::2], greedy(48))
        report = engine.call("early_exit_fit_weights", str(file), "int4", {"by": "a test"})
        want.check(engine, [0])  # the hooks are off, and nothing of the model has changed
    assert report["tokens"] > 500 and len(report["layers"]) == 4 * LAYERS + 1
    for name, error in report["layers"].items():
        assert 0 < error["fitted"] < error["nearest"], name
    with safe_open(file, framework="pt") as opened:
        about = opened.metadata()
    assert (about["kind"], about["tokens"]) == ('"int4"', str(report["tokens"]))
    for path in (None, str(file)):
        with live(want.path, layer_skip(LAYERS, K, draft_weights="int4", draft_weights_path=path)) as engine:
            counts[path] = want.check(engine, SOME)
            counts[path].require_both_verdicts()
    share = {path: count.accepted / count.drafted for path, count in counts.items()}
    assert share[str(file)] > share[None], share
    other = expected("qwen3")
    spec = layer_skip(LAYERS, K, draft_weights="int4", draft_weights_path=str(file))
    with pytest.raises(SettingsError, match="was made of another model"), live(other.path, spec):
        pass


def test_nothing_is_fitted_to_nothing(expected, tmp_path):
    with live(expected("llama").path) as engine:
        engine.call("early_exit_observe", [0])
        with pytest.raises(SettingsError, match="no activations were collected"):
            engine.call("early_exit_fit_weights", str(tmp_path / "x.safetensors"), "int4", {})
