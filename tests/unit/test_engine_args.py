import json
from dataclasses import replace

import pytest

from selfspec_cli.config.schema import (
    ConfigError,
    EngineConfig,
    GateConfig,
    Method,
    ModelConfig,
    RunConfig,
)
from selfspec_cli.engine.arguments import shallow_model, speculative_config

GPU = RunConfig(engine=EngineConfig(device="cuda"), layer=3, k=4, gate=GateConfig("varH"), threshold=5.0)


@pytest.mark.parametrize("method", [Method.layer_skip, Method.draft_model])
@pytest.mark.parametrize(("taken", "asked"), [("greedy", None), ("probabilistic", "probabilistic")])
def test_how_drafts_are_taken_is_vllms_own_key(method, taken, asked, tmp_path):
    spec = speculative_config(replace(GPU, method=method, draft_sample_method=taken), tmp_path)
    assert spec.get("draft_sample_method") == asked


def separate(path, layer=None, **model):
    """A separate draft of the first layers of the model at `path`."""
    return RunConfig(method=Method.draft_model, layer=layer, model=ModelConfig(name="m", path=str(path), **model))


def written(cfg, folder):
    return json.loads((shallow_model(cfg, folder) / "config.json").read_text())


@pytest.mark.parametrize(
    ("layer", "overrides", "expected"), [(None, {}, 16), (None, {"num_hidden_layers": 6}, 3), (5, {}, 5)]
)
def test_a_separate_draft_has_half_of_the_layers_where_none_are_named(layer, overrides, expected, tmp_path):
    cfg = separate("shape:llama3_8b", layer, hf_overrides=overrides)
    assert written(cfg, tmp_path)["num_hidden_layers"] == expected


def test_the_layers_of_a_model_of_more_than_text_are_set_where_they_are_counted(tmp_path):
    model, draft = tmp_path / "model", tmp_path / "draft"
    text = {"num_hidden_layers": 4, "layer_types": ["sliding", "sliding", "full", "full"]}
    for folder in (model, draft):
        folder.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "pictures", "text_config": text}))
    cut = {"num_hidden_layers": 2, "layer_types": ["sliding", "sliding"]}
    assert written(separate(model, 2), draft) == {"model_type": "pictures", "text_config": cut}


def test_a_separate_draft_of_a_model_on_the_hub_is_made_of_the_cached_config(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="hf download org/tiny"):
        shallow_model(separate("org/tiny", 2), tmp_path)
    cached = tmp_path / "models--org--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "snapshots" / "abc" / "config.json").write_text('{"num_hidden_layers": 9}')
    assert written(separate("org/tiny", 2), tmp_path) == {"num_hidden_layers": 2}
