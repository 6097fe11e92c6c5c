"""Untried releases of vLLM are judged by what they have: made-up ones, from the source of one that is installed."""

import importlib.util
import json

import pytest

from selfspec_cli.vllm_plugin import releases, vllm_names
from selfspec_cli.vllm_plugin.releases import SUPPORTED, admission
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
def test_one_that_changed_nothing_that_is_used_is_taken(release, vllm, old, new):
    """However it is written: what an outline does not show is looked for in whole files."""
    assert admission.moved(MadeUp(vllm, SCHEDULER, old, new), release) == []


def test_an_outline_says_of_all_that_is_used_what_whole_files_say(release, vllm):
    outline = vllm.outline
    for target in admission.signatures(release):
        assert outline.parameters(target) == vllm.parameters(target), target
    for target in vllm_names.SEAMS["fields"]:
        assert outline.fields(target) == vllm.fields(target), target
    for target, names in vllm_names.SEAMS["attributes"].items():
        assert set(names.split()) <= outline.attributes(target) <= vllm.attributes(target), target
    for target in [*vllm_names.SEAMS["fields"], *vllm_names.SEAMS["attributes"]]:
        assert [kind.name for kind in outline.classes(target)] == [kind.name for kind in vllm.classes(target)]


def test_no_whole_file_is_parsed_of_one_that_changed_nothing(release, vllm):
    """Half a second at the start of an engine."""
    fresh = Source(vllm.folder)
    fresh.tree = lambda module: pytest.fail(f"{module} was parsed")
    assert admission.moved(fresh, release) == []


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
def test_one_that_renamed_something_is_refused_with_its_name(release, vllm, module, old, new, lines):
    found = admission.moved(MadeUp(vllm, module, old, new), release)
    assert set(lines) <= set(found)
    assert all(line.partition(" ")[0].startswith("vllm.") for line in found)


@pytest.mark.parametrize("quotes", ['"""', "'''"])
def test_an_example_in_a_string_defines_nothing(release, vllm, quotes):
    old, new = "    def step_with_batch_queue(", "    def step_with_queue("
    example = f"    {quotes}\n{old}self): ...\n    {quotes}\n\n"
    found = admission.moved(MadeUp(vllm, "vllm.v1.engine.core", old, example + new), release)
    assert "vllm.v1.engine.core:EngineCore.step_with_batch_queue is not there" in found


def test_a_comparison_is_made_once_for_a_version(tmp_path, monkeypatch):
    """And anew by another selfspec."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    agrees, missing = admission.compared("0.98.0", SUPPORTED)
    assert (agrees.release, missing) == (releases.known(releases.installed()[1]).release, [])
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
