"""Digests of weights and of the other files that a config names: what is written anew is measured anew."""

import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
from exit_heads import lsq_head
from safetensors.torch import save_file

from selfspec_cli.config import keys, model_digest
from selfspec_cli.config.keys import Keys, baseline_of, digests, file_digest, run_key
from selfspec_cli.config.model_digest import head_folder, model_fingerprint
from selfspec_cli.config.schema import (
    ConfigError,
    GateConfig,
    HeadConfig,
    ModelConfig,
    RunConfig,
    WorkloadConfig,
)
from selfspec_cli.early_exit.artifact import HeadMetadata, save_head

HIDDEN, VOCAB = 4, 8


@pytest.fixture
def cfg(tmp_path):
    """A model of eight layers in a folder, and heads in another."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 8}))
    weights(folder, 0)
    model = ModelConfig(name="m", path=str(folder))
    return RunConfig(model=model, head_dir=str(tmp_path / "heads"), layer=4, k=5)


def weights(folder, seed):
    torch.manual_seed(seed)
    save_file({"w": torch.randn(512, 512)}, str(folder / "model.safetensors"))


def lsq(cfg, seed):
    """Fit an lsq head for layer 4: the same file, other numbers."""
    torch.manual_seed(seed)
    metadata = HeadMetadata("lsq", 4, HIDDEN, VOCAB)
    return save_head(head_folder(cfg) / "lsq_E4.safetensors", lsq_head(torch.randn(VOCAB, HIDDEN)), metadata)


def test_a_head_that_is_fitted_again_is_measured_again(cfg):
    wanted = replace(cfg, head=HeadConfig("lsq"))
    lsq(cfg, 1)
    first = run_key(wanted)
    assert run_key(wanted) == first
    assert run_key(replace(wanted, head=HeadConfig())) == run_key(replace(cfg, head=HeadConfig()))
    lsq(cfg, 2)
    second = run_key(wanted)
    assert second != first
    assert run_key(baseline_of(wanted)) == run_key(baseline_of(cfg))  # a baseline has no head
    by_path = replace(cfg, head=HeadConfig("lsq", path=str(lsq(cfg, 3))))
    before = run_key(by_path)
    lsq(cfg, 4)
    assert run_key(by_path) != before
    folder = replace(cfg, head=HeadConfig("lsq", path=str(head_folder(cfg))))
    assert digests(folder)["head"] == digests(by_path)["head"]


def test_weights_and_config_of_a_model_are_part_of_every_key(cfg, tmp_path):
    first, base = run_key(cfg), run_key(baseline_of(cfg))
    weights(tmp_path / "model", 1)
    second = run_key(cfg)
    assert second != first
    assert run_key(baseline_of(cfg)) != base
    (tmp_path / "model" / "config.json").write_text(json.dumps({"num_hidden_layers": 8, "rope_theta": 1}))
    assert run_key(cfg) not in (first, second)


def test_a_draft_vocabulary_and_a_prompts_file_are_read(cfg, tmp_path):
    file = tmp_path / "file"
    file.write_text("1 2 3")
    for wanted in (
        replace(cfg, vocab=str(file)),
        replace(cfg, workload=WorkloadConfig(prompts=str(file))),
    ):
        file.write_text("1 2 3")
        first = run_key(wanted)
        file.write_text("1 2 4 5")
        assert run_key(wanted) != first
        assert run_key(cfg) == run_key(replace(cfg))
    counted = replace(cfg, vocab="4")
    first = run_key(counted)
    head_folder(cfg).mkdir(parents=True)
    (head_folder(cfg) / "token_counts.safetensors").write_text("counts")
    assert run_key(counted) != first


def test_dummy_weights_of_another_seed_are_another_model_whichever_comes_first(cfg):
    """A command uses one Keys object; what that keeps for one seed must not be used for another."""
    dummies = [replace(cfg, model=replace(cfg.model, load_format="dummy"), seed=seed) for seed in (0, 1)]
    alone = [Keys().run(one) for one in dummies]
    together, turned = Keys(), Keys()
    assert [together.run(one) for one in dummies] == alone
    assert [turned.run(one) for one in dummies[::-1]] == alone[::-1]


@pytest.mark.slow
def test_ten_thousand_keys_read_and_hash_what_they_share_once(cfg, monkeypatch):
    seen = []
    read, plain = keys.digests, keys.to_plain
    monkeypatch.setattr(keys, "digests", lambda one: seen.append("digests") or read(one))
    monkeypatch.setattr(keys, "to_plain", lambda one: seen.append("to_plain") or plain(one))
    varied = [
        replace(cfg, model=replace(cfg.model), k=1 + number % 100, gate=GateConfig("maxp"), threshold=number / 10_000)
        for number in range(10_000)
    ]
    of_command = Keys()
    assert len({of_command.run(one) for one in varied}) == 10_000
    assert len({of_command.baseline(one)[0] for one in varied}) == 1
    assert seen.count("digests") == 2  # of the points, and of their baseline
    assert seen.count("to_plain") <= 4  # model, engine, workload, head


def test_a_file_is_read_again_only_when_it_changed(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("one")
    reads = []
    opened = open
    monkeypatch.setattr(keys, "open", lambda *words: reads.append(words[0]) or opened(*words), raising=False)
    first = file_digest(file)
    assert file_digest(file) == first
    assert len(reads) == 1
    os.utime(file, ns=(1, 1))
    assert file_digest(file) == first
    assert len(reads) == 2
    assert file_digest(tmp_path / "gone") is None


# ---- fingerprints of models ----


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
    before = model_fingerprint(dummy)
    (tmp_path / "M" / "model.safetensors").write_bytes(b"others")
    assert model_fingerprint(dummy) == before


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
