"""Plain decoding and an early-exit arm generate what the golden file holds, and what it says when they do not."""

from dataclasses import asdict

import golden
import pytest
from golden import Golden
from harness import layer_skip, live

from selfspec_cli.config.paths import reference_model_dir

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def kept() -> Golden:
    return golden.read()


def problems(kept: Golden, engine) -> str | None:
    ids = golden.prompts()
    return kept.problems(*golden.here(), ids, golden.generate(engine, ids))


def test_plain_decoding_is_what_it_was(kept):
    assert len(kept.outputs) == 8 and {len(output) for output in kept.outputs} == {golden.LENGTH}
    with live(reference_model_dir()) as engine:
        found = problems(kept, engine)
    assert found is None, found


def test_early_exit_is_what_plain_decoding_was(kept):
    with live(reference_model_dir(), layer_skip(3, 4, gate="margin", tau=0.1)) as engine:
        found = problems(kept, engine)
        engine.counts().require_both_verdicts()
    assert found is None, found


def test_every_difference_is_told_apart(kept):
    """New weights, new prompts, a new vLLM, and a fault are four findings; only the last is one of ours."""
    fields = asdict(kept)
    assert kept.problems(**fields) is None
    assert kept.problems(**fields | {"vllm": "vllm 9.9"}) is None  # another vLLM with the same tokens is no problem
    wrong = [list(output) for output in kept.outputs]
    wrong[2][5] += 1
    place = "prompt 2 from token 5 on: not what golden.json holds"
    for change, words in (
        ({"model": "0" * 16}, "was made with the weights"),
        ({"prompts": kept.prompts[::-1]}, "the prompts"),
        ({"vllm": "vllm 9.9", "outputs": wrong}, f"{place}. The weights are the same and vLLM is not ({kept.vllm}"),
        ({"outputs": wrong}, f"{place}, with the same weights and the same {kept.vllm}"),
    ):
        assert words in kept.problems(**fields | change)
    for change in ({"model": "0" * 16}, {"prompts": []}, {"vllm": "vllm 9.9", "outputs": wrong}):
        assert golden.COMMAND in kept.problems(**fields | change)
