import json
import os
from dataclasses import replace

import pytest
import torch
from exit_heads import lsq_head
from safetensors.torch import save_file

from selfspec_cli.config import digests as files
from selfspec_cli.config.digests import digests
from selfspec_cli.config.keys import Keys, baseline_of, run_key
from selfspec_cli.config.model_digest import head_folder, model_fingerprint
from selfspec_cli.config.schema import (
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
    dummy = replace(cfg, model=replace(cfg.model, load_format="dummy"))
    before = model_fingerprint(dummy)
    weights(tmp_path / "model", 2)
    assert model_fingerprint(dummy) == before  # its weights come from the seed


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


def test_a_model_of_the_hub_is_its_commit_where_the_cache_has_it(cfg, monkeypatch, tmp_path):
    hub = replace(cfg, model=replace(cfg.model, path="org/model"))
    cached = tmp_path / "snapshots" / "abc123" / "config.json"
    found = {}
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file, revision: found.get(revision))
    unknown = model_fingerprint(hub)
    found[None] = str(cached)
    assert model_fingerprint(hub) not in (unknown, None)
    assert model_fingerprint(hub) != model_fingerprint(replace(hub, model=replace(hub.model, revision="v2")))


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
    read, plain = files.digests, __import__("selfspec_cli.config.keys", fromlist=["x"]).to_plain
    monkeypatch.setattr(files, "digests", lambda one: seen.append("digests") or read(one))
    monkeypatch.setattr("selfspec_cli.config.keys.to_plain", lambda one: seen.append("to_plain") or plain(one))
    varied = [
        replace(cfg, model=replace(cfg.model), k=1 + number % 100, gate=GateConfig("maxp"), threshold=number / 10_000)
        for number in range(10_000)
    ]
    keys = Keys()
    assert len({keys.run(one) for one in varied}) == 10_000
    assert len({keys.baseline(one)[0] for one in varied}) == 1
    assert seen.count("digests") == 2  # of the points, and of their baseline
    assert seen.count("to_plain") <= 4  # model, engine, workload, head


def test_a_file_is_read_again_only_when_it_changed(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("one")
    reads = []
    opened = open
    monkeypatch.setattr(files, "open", lambda *words: reads.append(words[0]) or opened(*words), raising=False)
    first = files.file_digest(file)
    assert files.file_digest(file) == first
    assert len(reads) == 1
    os.utime(file, ns=(1, 1))
    assert files.file_digest(file) == first
    assert len(reads) == 2
    assert files.file_digest(tmp_path / "gone") is None
