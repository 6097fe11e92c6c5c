import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from selfspec_cli.config import model_digest
from selfspec_cli.config.model_digest import model_fingerprint
from selfspec_cli.config.schema import ConfigError, ModelConfig, RunConfig


def model(folder, value=1.0, config=None):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config or {"num_hidden_layers": 4}))
    save_file({"a": torch.full((100_000,), value), "b": torch.zeros(3)}, folder / "model.safetensors")
    return RunConfig(model=ModelConfig(name="M", path=str(folder)))


def test_equal_content_is_one_model_wherever_it_is_and_other_weights_are_another(tmp_path):
    first = model(tmp_path / "orgA" / "M")
    shutil.copytree(tmp_path / "orgA" / "M", tmp_path / "copy")
    copied = replace(first, model=ModelConfig(name="copy", path=str(tmp_path / "copy")))
    other = model(tmp_path / "orgB" / "M", value=1.5)
    deeper = model(tmp_path / "orgC" / "M", config={"num_hidden_layers": 5})
    assert model_fingerprint(copied) == model_fingerprint(first)
    assert len({model_fingerprint(cfg) for cfg in (first, other, deeper)}) == 3


def test_a_model_that_is_written_anew_is_read_anew(tmp_path, monkeypatch):
    cfg = model(tmp_path / "M")
    before = model_fingerprint(cfg)
    with monkeypatch.context() as patched:
        patched.setattr(model_digest, "_pieces", None)  # unchanged: no byte of the weights is read a second time
        assert model_fingerprint(cfg) == before
    file = tmp_path / "M" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # the last byte of the last tensor
    file.write_bytes(content)
    os.utime(file, ns=(1, 1))
    assert model_fingerprint(cfg) != before


def test_dummy_weights_are_their_config_and_their_seed(tmp_path):
    cfg = model(tmp_path / "M")
    dummy = replace(cfg, model=replace(cfg.model, load_format="dummy"))
    shorter = replace(dummy, model=replace(dummy.model, hf_overrides={"num_hidden_layers": 2}))
    assert len({model_fingerprint(one) for one in (cfg, dummy, replace(dummy, seed=1), shorter)}) == 4
    assert model_fingerprint(replace(cfg, seed=1)) == model_fingerprint(cfg)


def test_a_model_of_the_hub_is_its_commit(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    cfg = RunConfig(model=ModelConfig(name="M", path="org-of-nobody/M"))
    cached = tmp_path / "snapshots" / ("a" * 40) / "config.json"
    unknown = model_fingerprint(cfg)
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_, **__: str(cached))
    known = model_fingerprint(cfg)
    pinned = model_fingerprint(replace(cfg, model=replace(cfg.model, path="org-of-nobody/N")))
    assert len({unknown, known, pinned}) == 3


@pytest.mark.parametrize(
    "content", [b"\xff" * 100, b"version https://git-lfs.github.com/spec/v1", b"\x02" + b"\0" * 7 + b"[]"]
)
def test_what_is_no_safetensors_file_still_has_a_name(tmp_path, content):
    cfg = model(tmp_path / "M")
    (tmp_path / "M" / "model.safetensors").write_bytes(content)
    (tmp_path / "M" / "config.json").write_text("{")
    before = model_fingerprint(cfg)
    (tmp_path / "M" / "model.safetensors").write_bytes(content + b"1")
    assert model_fingerprint(cfg) != before


def test_a_model_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="no folder /not/there"):
        model_fingerprint(RunConfig(model=ModelConfig(name="M", path="/not/there")))
