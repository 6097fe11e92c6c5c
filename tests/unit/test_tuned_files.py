"""Two models of one name: what was fitted and tuned for one is not used for the other."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import one, refusal
from safetensors.torch import save_file

from selfspec_cli.config import tuned
from selfspec_cli.config.model_files import folder_name, head_folder, model_fingerprint

WORDS = ["layer=6", "k=7", "gate=margin", "threshold=0.2"]


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch):
    """orgA/M and orgB/M, the same but for their weights, and the folder that a user works in."""
    monkeypatch.chdir(tmp_path)
    for value, org in enumerate(("orgA", "orgB")):
        folder = tmp_path / org / "M"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text('{"num_hidden_layers": 12}')
        save_file({"a": torch.full((8,), float(value))}, folder / "model.safetensors")
    return tmp_path


def tune(org, *words):
    cfg = one(f"model={org}/M")
    return tuned.write(Path("conf"), cfg, [f"model={org}/M", *words], "a title")


def test_two_models_of_one_name_share_no_file():
    a, b = one("model=orgA/M"), one("model=orgB/M")
    assert a.model.name == b.model.name == "M"
    assert head_folder(a) != head_folder(b)
    assert tune("orgA", *WORDS) != tune("orgB", *WORDS)
    assert folder_name(a).startswith("M-")


def test_a_file_of_another_model_is_refused_and_both_are_named():
    tune("orgA", *WORDS)
    assert one("tuned=M").k == one("model=orgA/M", "tuned=M").k == 7
    said = refusal("model=orgB/M", "tuned=M")
    for org in ("orgA", "orgB"):
        assert f"{org}/M (weights {model_fingerprint(one(f'model={org}/M'))[:8]})" in said
    assert "selfspec tune model=orgB/M" in said


def test_weights_that_changed_since_are_another_model(models):
    tune("orgA", *WORDS)
    save_file({"a": torch.full((8,), 7.0)}, models / "orgA" / "M" / "model.safetensors")
    assert "was made for orgA/M" in refusal("tuned=M")


def test_of_two_files_the_one_of_the_named_model_is_used():
    tune("orgA", "layer=6", "k=7")
    tune("orgB", "layer=3", "k=2")
    assert [one(f"model={org}/M", "tuned=M").k for org in ("orgA", "orgB")] == [7, 2]
    said = refusal("tuned=M")
    assert "orgA/M" in said and "orgB/M" in said and "name one: model=org" in said


def test_a_model_that_was_never_tuned_says_how_to():
    tune("orgA", *WORDS)
    assert "did you mean 'M'" in refusal("tuned=m")
    assert "selfspec tune model=N" in refusal("tuned=N")


def test_a_misspelt_name_is_answered_with_a_model_that_there_is():
    said = refusal("tuned=refrence")
    assert "'reference'" in said and "selfspec tune model=reference" in said
    file = tune("orgA", *WORDS)
    file.rename(file.with_name(file.name.replace("M-", "reference-")))
    said = refusal("tuned=refrence")
    assert "allowed: reference" in said and "did you mean 'reference'" in said
    assert said.endswith("selfspec tune model=reference")


@pytest.mark.parametrize("text", ["overrides: [k=3]", "- k=3", "{", "title: x\ngrid: 3"])
def test_a_file_of_another_shape_is_named(text):
    file = tune("orgA", *WORDS)
    file.write_text(text)
    assert str(file) in refusal("tuned=M")


def test_a_copy_of_the_model_uses_its_files(models):
    tune("orgA", *WORDS)
    shutil.copytree(models / "orgA", models / "elsewhere")
    cfg = one("model=elsewhere/M", "tuned=M")
    assert (cfg.k, cfg.model.path) == (7, "elsewhere/M")
    assert replace(cfg, model=one("model=orgA/M").model) == one("model=orgA/M", "tuned=M")
