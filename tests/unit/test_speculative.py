"""Method vllm: what `speculative` takes, what it is called, what tells two arms apart, and what is refused."""

import json
from dataclasses import replace

import pytest
from commands import model_folder, one, refused

from selfspec_cli.config import keys, schema, speculative
from selfspec_cli.config.choices import file_choices
from selfspec_cli.config.compose import compose_runs
from selfspec_cli.config.schema import ConfigError, Method, ModelConfig, RunConfig
from selfspec_cli.engine.deployment import deployment, shallow_model, speculative_config
from selfspec_cli.record import tables
from selfspec_cli.report.rows import label
from selfspec_cli.stages import preflight

NGRAM = ["method=vllm", "speculative=ngram"]
SMALL = {"num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 16, "max_position_embeddings": 64}


@pytest.fixture
def draft(tmp_path):
    """A folder that looks like a draft model."""
    return model_folder(tmp_path / "small", **SMALL)


@pytest.mark.parametrize(
    "typed",
    [
        """speculative={"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1}""",
        "speculative={method: ngram, prompt_lookup_max: 4, prompt_lookup_min: 1}",
        "speculative={method:ngram,prompt_lookup_max:4,prompt_lookup_min:1}",
        "speculative=ngram",
    ],
)
def test_json_hydras_own_grammar_and_a_name_say_the_same(typed):
    cfg = one("method=vllm", typed)
    assert cfg.speculative == {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1}
    assert keys.Keys().settings(cfg) == keys.Keys().settings(one(*NGRAM))


def test_keys_below_a_choice_or_a_mapping_change_it_at_any_depth():
    assert one(*NGRAM, "speculative.prompt_lookup_max=7").speculative["prompt_lookup_max"] == 7
    typed = one("method=vllm", 'speculative={"method": "ngram"}', "speculative.prompt_lookup_max=2")
    assert typed.speculative == {"method": "ngram", "prompt_lookup_max": 2}
    deep = one(*NGRAM, "speculative.draft_load_config.load_format=dummy").speculative
    assert deep["draft_load_config"] == {"load_format": "dummy"}


def test_several_mappings_and_names_are_a_grid():
    points = compose_runs(overrides=["method=vllm", 'speculative={"method": "ngram"},{"method": "mtp"}', "k=2,3"])
    found = [(cfg.speculative["method"], cfg.k) for cfg in points]
    assert found == [("ngram", 2), ("ngram", 3), ("mtp", 2), ("mtp", 3)]
    named = compose_runs(overrides=["method=vllm", "speculative=ngram,suffix,mtp"])
    assert [cfg.speculative["method"] for cfg in named] == ["ngram", "suffix", "mtp"]
    both = compose_runs(overrides=["method=layer_skip,vllm", "speculative=ngram,mtp"])
    assert [str(cfg.method) for cfg in both] == ["layer_skip", "vllm", "vllm"], "early exit has no use for it"


def test_every_choice_is_a_speculative_config_that_vllm_knows():
    known = speculative.known_to_vllm()
    assert known is not None
    methods, allowed = known
    for name in set(file_choices("speculative")) - {"none"}:
        spec = one("method=vllm", f"speculative={name}").speculative
        assert spec["method"] == name in methods
        assert set(spec) <= set(allowed)


def test_the_draft_length_is_k_or_what_the_mapping_says(tmp_path):
    words = ["method=vllm", 'speculative={"method": "ngram", "num_speculative_tokens": 7}']
    assert (one(*words).k, one(*NGRAM).k, one(*NGRAM, "k=2").k) == (7, 4, 2)
    assert speculative_config(one(*words), tmp_path) == {"method": "ngram", "num_speculative_tokens": 7}
    typed = one("method=vllm", 'speculative={"method": "ngram"}', "k=7")
    assert keys.Keys().settings(one(*words)) == keys.Keys().settings(typed)
    with pytest.raises(ConfigError, match="k=3: both are the draft length"):
        one(*words, "k=3")


def test_what_vllm_gets_names_the_weights_that_draft(draft, tmp_path, monkeypatch):
    monkeypatch.chdir(draft.parent)
    cfg = one("method=vllm", "speculative=draft_model", "speculative.model=./small", "k=3")
    asked = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    assert deployment(cfg, tmp_path).speculative_config == asked
    assert speculative_config(cfg, tmp_path) == asked | {"model": "small"}
    own = one("method=vllm", "speculative=draft_model", "speculative.model=reference")
    assert speculative_config(own, tmp_path)["model"].endswith("reference_model/model")


def test_a_key_holds_the_mapping_and_the_content_of_the_draft(draft):
    cfg = one("method=vllm", "speculative=draft_model", f"speculative.model={draft}")
    before = keys.run_key(cfg)
    assert "draft" in keys.Keys().digests(cfg)
    (draft / "model.safetensors").write_bytes(b"another")
    assert keys.run_key(cfg) != before, "it was trained anew"
    assert keys.engine_key(one(*NGRAM)) != keys.engine_key(one(*NGRAM, "speculative.prompt_lookup_max=5"))
    early_exit = one("method=layer_skip")
    assert keys.engine_key(early_exit) == keys.engine_key(replace(early_exit, speculative={"method": "ngram"}))


def test_its_baseline_is_that_of_every_other_arm():
    together = keys.Keys()
    assert together.baseline(one(*NGRAM))[0] == together.baseline(one("method=layer_skip"))[0]
    assert keys.baseline_of(one(*NGRAM)).speculative == {}


def test_it_is_a_row_with_a_label_of_its_own(draft):
    cfg = one("method=vllm", "speculative=draft_model", f"speculative.model={draft}", "k=3")
    row = tables.planned(cfg)
    assert (row.arm, row.speculative, row.k, row.E, row.gate) == ("vllm", "draft_model small", 3, None, None)
    assert label(row) == "vLLM draft_model small k=3"
    assert label(tables.planned(one(*NGRAM))) == "vLLM ngram k=4 · prompt_lookup_max=4 · prompt_lookup_min=1"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["method=vllm"], "allowed: dflash, draft_model, eagle3, mtp, ngram, suffix"),
        (["speculative=ngram"], "speculative=ngram is not used by method 'layer_skip'; methods that use speculative"),
        (["method=vllm", 'speculative={"method": "ngran"}'], "speculative.method 'ngran' is not known"),
        ([*NGRAM, "speculative.prompt_lokup_max=3"], "did you mean 'prompt_lookup_max'"),
        (["method=vllm", 'speculative={"method": "ngram"'], """speculative='{"method": "ngram"}'"""),
        (["method=vllm", "speculative=eagle3"], "speculative.model=./FOLDER"),
        (["method=vllm", "speculative=draft_model", "speculative.model=./nowhere"], "speculative.model=./nowhere"),
        (["method=vllm", 'speculative={"method": "ngram_gpu"}'], "vLLM's CPU build cannot do it"),
    ],
)
def test_what_cannot_be_had_is_refused_before_an_engine_starts(words, expected):
    assert expected in refused("bench", *words, "--dry-run")


def test_suffix_decoding_needs_its_package(monkeypatch):
    cfg = one("method=vllm", "speculative=suffix")
    monkeypatch.setattr(speculative, "SUFFIX_PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match="pip install no-such-package"):
        preflight.check(cfg)
    monkeypatch.setattr(speculative, "SUFFIX_PACKAGE", "json")
    preflight.check(cfg)


def test_suffix_decoding_that_remembers_answers_is_warned_of():
    assert preflight.warnings([one("method=vllm", "speculative=suffix"), one(*NGRAM)]) == []
    (warning,) = preflight.warnings([one("method=vllm", 'speculative={"method": "suffix"}')])
    assert "remembers the answers" in warning


# ---- keys and drafts of other methods --------------------------------------------------------------------------------


GPU = RunConfig(engine=schema.EngineConfig(device="cuda"), layer=3, k=4, gate=schema.GateConfig("varH"), threshold=5.0)


@pytest.mark.parametrize("method", [Method.layer_skip, Method.draft_model])
@pytest.mark.parametrize(("taken", "asked"), [("greedy", None), ("probabilistic", "probabilistic")])
def test_how_drafts_are_taken_is_vllms_own_key(method, taken, asked, tmp_path):
    spec = speculative_config(replace(GPU, method=method, draft_sample_method=taken), tmp_path)
    assert spec.get("draft_sample_method") == asked


def separate(folder, path, layer=None, **model):
    """The config.json of a separate draft of the first layers of the model at `path`."""
    cfg = RunConfig(method=Method.draft_model, layer=layer, model=ModelConfig(name="m", path=str(path), **model))
    return json.loads((shallow_model(cfg, folder) / "config.json").read_text())


@pytest.mark.parametrize(
    ("layer", "overrides", "expected"), [(None, {}, 16), (None, {"num_hidden_layers": 6}, 3), (5, {}, 5)]
)
def test_a_separate_draft_has_half_of_the_layers_where_none_are_named(layer, overrides, expected, tmp_path):
    made = separate(tmp_path, "shape:llama3_8b", layer, hf_overrides=overrides)
    assert made["num_hidden_layers"] == expected


def test_the_layers_of_a_model_of_more_than_text_are_set_where_they_are_counted(tmp_path):
    text = {"num_hidden_layers": 4, "layer_types": ["sliding", "sliding", "full", "full"]}
    model = model_folder(tmp_path / "model", model_type="pictures", text_config=text)
    cut = {"num_hidden_layers": 2, "layer_types": ["sliding", "sliding"]}
    assert separate(tmp_path, model, 2) == {"model_type": "pictures", "text_config": cut}


def test_a_separate_draft_of_a_model_on_the_hub_is_made_of_the_cached_config(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="hf download org/tiny"):
        separate(tmp_path, "org/tiny", 2)
    cached = tmp_path / "models--org--tiny"
    for file, text in (("refs/main", "abc"), ("snapshots/abc/config.json", '{"num_hidden_layers": 9}')):
        (cached / file).parent.mkdir(parents=True)
        (cached / file).write_text(text)
    assert separate(tmp_path, "org/tiny", 2) == {"num_hidden_layers": 2}
