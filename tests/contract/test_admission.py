"""Untried releases of vLLM are judged by what they have: made-up ones, from the source of one that is installed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from vllm_source import folder_of

from selfspec_cli.vllm_plugin import versions
from selfspec_cli.vllm_plugin.releases import SUPPORTED, admission
from selfspec_cli.vllm_plugin.releases.source import Source

pytestmark = [pytest.mark.contract, pytest.mark.slow]

RUNNER = "vllm.v1.worker.gpu.model_runner"


class MadeUp(Source):
    """A release that differs from the installed one in some words of some modules."""

    def __init__(self, folder: Path, **changes: tuple[str, str]) -> None:
        super().__init__(folder)
        self.changes = {module.replace("__", "."): change for module, change in changes.items()}

    def text(self, module: str) -> str:
        old, new = self.changes.get(module, ("", ""))
        text = super().text(module)
        assert old in text
        return text.replace(old, new) if old else text


@pytest.fixture(scope="module", params=[each.release for each in SUPPORTED])
def release(request):
    found = versions.known(request.param)
    if folder_of(found.release) is None:
        pytest.skip(f"python tests/contract/vllm_source.py {found.release} has not unpacked it")
    return found


def made_up(release, **changes: tuple[str, str]) -> list[str]:
    return admission.moved(MadeUp(folder_of(release.release), **changes), release)


def test_one_that_changed_nothing_that_is_used_is_taken(release):
    more = ("class Scheduler(", "class Other: ...\n\n\nclass Scheduler(")
    assert made_up(release, vllm__v1__core__sched__scheduler=more) == []


@pytest.mark.parametrize(
    ("module", "old", "new", "lines"),
    [
        ("vllm__v1__worker__gpu__model_runner", "num_spec_tokens_to_schedule", "num_drafts_to_schedule",
         [f"{RUNNER}:ExecuteModelState has no num_spec_tokens_to_schedule"]),
        ("vllm__v1__core__sched__scheduler", "def make_spec_decoding_stats(", "def make_draft_stats(",
         ["vllm.v1.core.sched.scheduler:Scheduler.make_spec_decoding_stats is not there"]),
        ("vllm__v1__engine__core", "batch_queue(\n        self,", "batch_queue(\n        self, wait,",
         ["vllm.v1.engine.core:EngineCore.step_with_batch_queue takes other parameters: with wait"]),
        ("vllm__v1__worker__gpu__spec_decode__rejection_sampler", "class RejectionSampler", "class DraftVerifier",
         ["vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler is not there",
          f"{RUNNER}:RejectionSampler is not there"]),
    ],
)  # fmt: skip
def test_one_that_renamed_something_is_refused_with_its_name(release, module, old, new, lines):
    found = made_up(release, **{module: (old, new)})
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
