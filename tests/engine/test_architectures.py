"""One architecture of each family, by what `architectures.py` asks of all of them (`make nightly`)."""

import subprocess
import sys
from pathlib import Path

import pytest
from architectures import EXIT, PROMPTS, TOKENS, VOCAB, K, asked, line, prepare, save
from harness import greedy, layer_skip, live, ragged_prompts

FILE = Path(__file__).with_name("architectures.jsonl")

FAMILIES = {
    "OPTForCausalLM": "a decoder inside the part that is compiled; learned positions",
    "FalconForCausalLM": "layers under another name; attention and MLP side by side",
    "Olmo2ForCausalLM": "the Transformers backend",
    "MiMoForCausalLM": "MTP layers of its own; the last norm is inside compute_logits",
    "MiniCPMForCausalLM": "a scale between decoder and logits",
}


@pytest.fixture(scope="module", autouse=True)
def prepared():
    with pytest.MonkeyPatch.context() as patches:  # they end with this module
        prepare(patches.setattr)
        yield


@pytest.mark.parametrize("name", FAMILIES)
def test_one_of_each_family(name):
    found = line(name)
    assert found["verdict"] == "works", found
    assert found["accepted"] <= found["drafted"]


def test_a_scale_between_decoder_and_logits_is_taken_over(tmp_path):
    """With logits eight times too large, fewer than half of the drafts that are drawn were accepted; without a scale
    all of these random models' are."""
    assert accepted_of_drawn("MiniCPMForCausalLM", tmp_path / "a") > 0.9 * accepted_of_drawn(
        "LlamaForCausalLM", tmp_path
    )


def accepted_of_drawn(name: str, folder: Path) -> float:
    """Share of drafts that are drawn at temperature 1 which are accepted."""
    save(name, folder)
    with live(folder, layer_skip(EXIT, K, draft_sample_method="probabilistic")) as engine:
        engine.generate(ragged_prompts(PROMPTS, VOCAB), greedy(TOKENS, temperature=1.0))
        made = engine.counts()
    assert made.drafted > 100
    return made.accepted / made.drafted


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["OPTForCausalLM", "Olmo2ForCausalLM", "FlexOlmoForCausalLM"])
@pytest.mark.parametrize(
    "changes", [{"enforce_eager": False}, {"draft_weights": "int8"}, {"draft_weights": "int4"}], ids=str
)
def test_compiled_and_on_copies(name, changes):
    found = line(name, **changes)
    assert found["verdict"] == "works", found


@pytest.mark.nightly
def test_every_architecture_is_as_the_page_says(tmp_path):
    out = tmp_path / "found.jsonl"
    subprocess.run([sys.executable, str(Path(__file__).with_name("architectures.py")), "--out", str(out)], check=True)
    said, found = asked(FILE), asked(out)
    assert {name: found[name]["verdict"] for name in said} == {name: one["verdict"] for name, one in said.items()}
