"""Untried releases of vLLM are judged by what they have: made-up ones, from the source of one that is installed."""

from __future__ import annotations

import importlib.util
import json

import pytest
from vllm_source import folder_of

from selfspec_cli.vllm_plugin import versions
from selfspec_cli.vllm_plugin.releases import SUPPORTED, admission, seams
from selfspec_cli.vllm_plugin.releases.source import Source

pytestmark = [pytest.mark.contract, pytest.mark.slow]

RUNNER = "vllm.v1.worker.gpu.model_runner"
SCHEDULER = "vllm.v1.core.sched.scheduler"


class MadeUp(Source):
    """A release that differs from another one in some words of one module."""

    def __init__(self, base: Source, module: str, old: str, new: str) -> None:
        super().__init__(base.folder)
        assert old in base.text(module)
        self.module, self.old, self.new = module, old, new

    def text(self, module: str) -> str:
        text = super().text(module)
        return text.replace(self.old, self.new) if module == self.module else text


@pytest.fixture(scope="module", params=[each.release for each in SUPPORTED])
def release(request):
    """A supported release, and its source."""
    folder = folder_of(request.param)
    if folder is None:
        pytest.skip(f"python tests/contract/vllm_source.py {request.param} has not unpacked it")
    return versions.known(request.param), Source(folder)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("class Scheduler(", "class Other: ...\n\n\nclass Scheduler("),
        ("self.max_num_running_reqs = ", "(self.other, self.max_num_running_reqs) = "),
        ("class Scheduler(", '# a """ too many\nclass Scheduler('),
        ("class Scheduler(", "OTHER = '''\nclass Scheduler:\n'''\n\n\nclass Scheduler("),
        ("class Scheduler(", "OTHER = [\nNone,\n]\n\n\nclass Scheduler("),
    ],
)
def test_one_that_changed_nothing_that_is_used_is_taken(release, old, new):
    """However it is written: what an outline does not show is looked for in whole files."""
    known, source = release
    assert admission.moved(MadeUp(source, SCHEDULER, old, new), known) == []


def test_an_outline_says_of_all_that_is_used_what_whole_files_say(release):
    known, source = release
    outline = source.outline
    for target in seams.signatures(known):
        assert outline.parameters(target) == source.parameters(target), target
    for target in seams.FIELDS:
        assert outline.fields(target) == source.fields(target), target
    for target, names in seams.ATTRIBUTES.items():
        assert set(names.split()) <= outline.attributes(target) <= source.attributes(target), target
    for target in [*seams.FIELDS, *seams.ATTRIBUTES]:
        assert [kind.name for kind in outline.classes(target)] == [kind.name for kind in source.classes(target)]


def test_no_whole_file_is_parsed_of_one_that_changed_nothing(release):
    """Half a second at the start of an engine."""
    known, source = release
    fresh = Source(source.folder)
    fresh.tree = lambda module: pytest.fail(f"{module} was parsed")
    assert admission.moved(fresh, known) == []


@pytest.mark.parametrize(
    ("module", "old", "new", "lines"),
    [
        (
            RUNNER,
            "num_spec_tokens_to_schedule",
            "num_drafts_to_schedule",
            [f"{RUNNER}:ExecuteModelState has no num_spec_tokens_to_schedule"],
        ),
        (
            SCHEDULER,
            "def make_spec_decoding_stats(",
            "def make_draft_stats(",
            [f"{SCHEDULER}:Scheduler.make_spec_decoding_stats is not there"],
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


@pytest.mark.parametrize("quotes", ['"""', "'''"])
def test_an_example_in_a_string_defines_nothing(release, quotes):
    known, source = release
    old, new = "    def step_with_batch_queue(", "    def step_with_queue("
    example = f"    {quotes}\n{old}self): ...\n    {quotes}\n\n"
    found = admission.moved(MadeUp(source, "vllm.v1.engine.core", old, example + new), known)
    assert "vllm.v1.engine.core:EngineCore.step_with_batch_queue is not there" in found


def test_a_comparison_is_made_once_for_a_version(tmp_path, monkeypatch):
    """And anew by another selfspec."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    agrees, missing = admission.compared("0.98.0", SUPPORTED)
    assert (agrees.release, missing) == (versions.known(versions.installed()[1]).release, [])
    kept = tmp_path / "selfspec" / "vllm" / "0.98.0.json"
    known = json.loads(kept.read_text())
    monkeypatch.setattr(admission, "_questions", lambda release: [lambda source: ["everything"]])
    assert admission.compared("0.98.0", SUPPORTED) == (agrees, [])
    kept.write_text(json.dumps(known | {"asked": "what another selfspec asked"}))
    assert admission.compared("0.98.0", SUPPORTED) == (None, ["everything"])


def test_a_vllm_that_cannot_be_found_or_a_folder_that_cannot_be_written_is_no_crash(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(admission, "_questions", lambda release: [])
    assert admission.compared("0.98.0", SUPPORTED) == (SUPPORTED[-1], [])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert admission.compared("0.98.0", SUPPORTED)[0] is None
