"""Untried releases of vLLM are judged by what they have: made-up ones, from the source of one that is installed."""

from __future__ import annotations

import ast
import importlib.util
import json

import pytest
from vllm_source import folder_of

from selfspec_cli.vllm_plugin import versions
from selfspec_cli.vllm_plugin.releases import SUPPORTED, admission
from selfspec_cli.vllm_plugin.releases.source import Source

pytestmark = [pytest.mark.contract, pytest.mark.slow]

RUNNER = "vllm.v1.worker.gpu.model_runner"


class MadeUp(Source):
    """A release that differs from another one in some words of one module."""

    def __init__(self, base: Source, module: str, old: str, new: str) -> None:
        super().__init__(base.folder)
        assert old in base.text(module)
        changed = ast.parse(base.text(module).replace(old, new))
        self.tree = lambda name: changed if name == module else base.tree(name)


@pytest.fixture(scope="module", params=[each.release for each in SUPPORTED])
def release(request):
    """A supported release, and its source."""
    folder = folder_of(request.param)
    if folder is None:
        pytest.skip(f"python tests/contract/vllm_source.py {request.param} has not unpacked it")
    return versions.known(request.param), Source(folder)


def test_one_that_changed_nothing_that_is_used_is_taken(release):
    known, source = release
    new = "class Other: ...\n\n\nclass Scheduler("
    assert admission.moved(MadeUp(source, "vllm.v1.core.sched.scheduler", "class Scheduler(", new), known) == []


@pytest.mark.parametrize(
    ("module", "old", "new", "lines"),
    [
        (
            "vllm.v1.worker.gpu.model_runner",
            "num_spec_tokens_to_schedule",
            "num_drafts_to_schedule",
            [f"{RUNNER}:ExecuteModelState has no num_spec_tokens_to_schedule"],
        ),
        (
            "vllm.v1.core.sched.scheduler",
            "def make_spec_decoding_stats(",
            "def make_draft_stats(",
            ["vllm.v1.core.sched.scheduler:Scheduler.make_spec_decoding_stats is not there"],
        ),
        (
            "vllm.v1.engine.core",
            "batch_queue(\n        self,",
            "batch_queue(\n        self, wait,",
            ["vllm.v1.engine.core:EngineCore.step_with_batch_queue takes other parameters: with wait"],
        ),
        (
            "vllm.v1.worker.gpu.spec_decode.rejection_sampler",
            "class RejectionSampler",
            "class DraftVerifier",
            ["vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler is not there"],
        ),
    ],
)
def test_one_that_renamed_something_is_refused_with_its_name(release, module, old, new, lines):
    known, source = release
    found = admission.moved(MadeUp(source, module, old, new), known)
    assert set(lines) <= set(found)
    assert all(line.partition(" ")[0].startswith("vllm.") for line in found)


def test_a_comparison_is_made_once_for_a_version(tmp_path, monkeypatch):
    """And anew by another selfspec."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    agrees, missing = admission.compared("0.98.0", SUPPORTED)
    assert (agrees.release, missing) == (versions.known(versions.installed()[1]).release, [])
    kept = tmp_path / "selfspec" / "vllm" / "0.98.0.json"
    known = json.loads(kept.read_text())
    monkeypatch.setattr(admission, "moved", lambda source, release: ["everything"])
    assert admission.compared("0.98.0", SUPPORTED) == (agrees, [])
    kept.write_text(json.dumps(known | {"asked": "what another selfspec asked"}))
    assert admission.compared("0.98.0", SUPPORTED) == (None, ["everything"])


def test_a_vllm_that_cannot_be_found_or_a_folder_that_cannot_be_written_is_no_crash(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(admission, "moved", lambda source, release: [])
    assert admission.compared("0.98.0", SUPPORTED) == (SUPPORTED[-1], [])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert admission.compared("0.98.0", SUPPORTED)[0] is None
