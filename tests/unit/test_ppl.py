"""`selfspec ppl` on engines without vLLM: what is scored, under which model, and what is compared with what."""

import itertools
import math
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import bigrams
import pytest
from bigrams import nats

from selfspec_cli.config.schema import ConfigError, GateConfig, Method, RunConfig
from selfspec_cli.engine import requests
from selfspec_cli.engine.requests import Passage
from selfspec_cli.record import archive, folder, quality
from selfspec_cli.stages import ppl
from selfspec_cli.stages.ppl import Request

DOCUMENTS = [f"Document {number}.\n" + "Some words to be scored.\n" * (number + 1) for number in range(4)]
SMALL = Request("text.jsonl", document_tokens=50, window=16, stride=8, prompts=5, prompt_tokens=6, length=4)


@pytest.fixture(autouse=True)
def vllm(monkeypatch, tmp_path):
    bigrams.without_vllm(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "selfspec_cli.texts.corpora.documents",
        lambda source, most, held_out: list(zip("abcd", DOCUMENTS, strict=True))[:most],
    )
    monkeypatch.setattr("selfspec_cli.texts.corpora.check", lambda source: None)


@pytest.fixture
def opened():
    """Opens engines without vLLM; a list of those that were."""
    engines = []

    @contextmanager
    def open_engine(cfg):
        engines.append(bigrams.Engine(cfg))
        yield engines[-1]

    open_engine.engines = engines
    return open_engine


SKIP = RunConfig(method=Method.skip, layer=3)
GATED = RunConfig(layer=3, k=4, gate=GateConfig(kind="varH"), threshold=4.0)


def arms_of(found, kind):
    return {one.arm["arm"]: one for one in found.findings if one.kind == kind}


def test_a_passage_is_scored_after_its_context(opened):
    with opened(RunConfig(method=Method.baseline)) as engine:
        short, long = requests.score(engine, [Passage([3, 5], 1), Passage([3, 5, 7, 9], 2)])
    assert short.log_likelihood == pytest.approx(-nats(3, 5))
    assert long.log_likelihood == pytest.approx(-nats(5, 7) - nats(7, 9))
    assert (short.tokens, long.tokens, long.greedy) == (1, 2, True)
    for passage in (Passage([3], 1), Passage([3, 5], 0), Passage([3, 5], 2), Passage([3] * 64, 1)):
        with pytest.raises(ValueError, match="at most 63 together"):
            requests.score(engine, [passage])


def test_a_text_is_scored_under_the_predictions_of_whoever_has_some(opened):
    found = ppl.run([SKIP, GATED], SMALL, open_engine=opened)
    assert found.failed == []
    text = arms_of(found, quality.TEXT)
    assert set(text) == {"baseline", "skip"}  # an arm that verifies has no predictions of its own
    ids = [bigrams.Tokenizer().encode(body)[:50] for body in DOCUMENTS]
    expected = [sum(nats(*pair) for pair in itertools.pairwise(one)) for one in ids]
    assert text["baseline"].scores().nats == pytest.approx(expected)
    assert text["baseline"].scores().tokens == [len(one) - 1 for one in ids]
    assert text["skip"].scores().nats == pytest.approx([1.5 * value for value in expected])
    assert text["skip"].scores(baseline=True) == text["baseline"].scores()
    columns = quality.read("results").columns(text["skip"].arm_key, "")
    mean = sum(expected) / sum(len(one) - 1 for one in ids)
    assert columns["delta_ppl"] == pytest.approx(math.exp(1.5 * mean) - math.exp(mean))
    assert columns["ppl_protocol"] == "corpus=text.jsonl documents=4 document_tokens=50 window=16 stride=8"


def test_what_arms_generate_is_scored_by_the_plain_model(opened):
    found = ppl.run([SKIP, GATED], SMALL, open_engine=opened)
    assert found.failed == []
    assert [engine.cfg.method for engine in opened.engines] == ["baseline", "skip", "layer_skip", "baseline"]
    by_arm = arms_of(found, quality.GENERATED)
    greedy, sampled = (by_arm["skip"].found[name] for name in ("greedy", "sampled"))
    assert (greedy["identical"], greedy["outputs"]) == (0, 5)
    last = opened.engines[-1].llm.asked
    assert last and all(len(ids) == 10 for ids, _ in last)  # prompt and continuation
    # The skip arm's greedy continuations are asked for first, and none of them is the baseline's.
    expected = [sum(nats(*pair) for pair in itertools.pairwise(ids[5:])) for ids, _ in last[:5]]
    assert greedy["scores"]["nats"] == pytest.approx(expected)
    assert greedy["scores"]["tokens"] == [4] * 5
    assert sampled["scores"] != sampled["baseline"]


def test_a_verified_arm_that_generates_the_baselines_text_differs_by_nothing(opened):
    found = ppl.run([GATED], SMALL, open_engine=opened)
    arm = arms_of(found, quality.GENERATED)["layer_skip"]
    assert arm.found["greedy"]["identical"] == 5
    columns = quality.read("results").columns(arm.arm_key, "")
    assert (columns["delta_ppl_of_greedy"], columns["delta_ppl_of_greedy_low"]) == (0.0, 0.0)
    low, value, high = (columns[f"delta_ppl_of_sampled{end}"] for end in ("_low", "", "_high"))
    assert low <= value <= high and value != 0
    assert "ppl" not in columns
    assert arm.found["greedy"]["accepted"] == 3
    assert found.warnings == []


def test_arms_that_differ_in_their_gate_share_an_engine(opened):
    other = replace(GATED, threshold=5.0)
    ppl.run([GATED, other, replace(GATED, seed=0)], SMALL, open_engine=opened)
    assert [engine.cfg.method for engine in opened.engines] == ["baseline", "layer_skip", "baseline"]
    assert opened.engines[1].gates == [("varH", 4.0), ("varH", 5.0)]


def test_drafts_that_are_never_accepted_prove_nothing(opened, monkeypatch):
    monkeypatch.setattr(bigrams, "Engine", partial(bigrams.Engine, accepted=0))
    found = ppl.run([GATED], SMALL, open_engine=opened)
    assert any("no draft was accepted" in warning for warning in found.warnings)


def test_an_arm_that_fails_does_not_end_the_others(opened):
    def open_engine(cfg):
        if cfg.method is Method.skip:
            raise RuntimeError("out of\nmemory")
        return opened(cfg)

    found = ppl.run([SKIP, GATED], SMALL, open_engine=open_engine)
    assert [(one.arm, one.reason) for one in found.failed] == [("skip E=3 head=lens", "out of memory")]
    assert found.exit_code == 1
    assert set(arms_of(found, quality.GENERATED)) == {"baseline", "layer_skip"}


def test_a_probability_of_zero_is_told_and_makes_no_column(opened, monkeypatch):
    """Under `skip` a draft vocabulary leaves no probability for the other tokens."""

    def score(engine, passages, progress):
        worst = -math.inf if engine.cfg.method is Method.skip else -1.0
        return [requests.Score(worst, 1, False) for _ in passages]

    monkeypatch.setattr(requests, "score", score)
    found = ppl.run([SKIP], SMALL, open_engine=opened)
    assert any("its perplexity is infinite" in warning for warning in found.warnings)
    assert "ppl" not in quality.read("results").columns(arms_of(found, quality.GENERATED)["skip"].arm_key, "")


def test_a_folder_that_cannot_be_written_ends_the_command(opened, monkeypatch):
    def save(file, finding):
        if finding.arm["arm"] == "skip":
            raise OSError(28, "No space left on device", "results/quality/x.json")
        return kept(file, finding)

    kept = archive.save_document
    monkeypatch.setattr(archive, "save_document", save)
    with pytest.raises(folder.RecordError, match="free some space"):
        ppl.run([SKIP], SMALL, open_engine=opened)


def test_without_prompts_only_the_text_is_scored(opened):
    found = ppl.run([SKIP], replace(SMALL, prompts=0), open_engine=opened)
    assert {one.kind for one in found.findings} == {quality.TEXT}
    assert len(opened.engines) == 2


def test_samples_at_temperature_0_are_refused_before_an_engine_starts(opened):
    with pytest.raises(ConfigError, match="--temperature 0"):
        ppl.run([SKIP], replace(SMALL, temperature=0.0), open_engine=opened)
    assert opened.engines == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"window": 64}, "--window 64: it must be less than the model's 64 tokens"),
        ({"prompt_tokens": 60}, "--prompt-tokens 60 and --length 4"),
        ({"prompts": 5000}, "fewer or shorter --prompts"),
    ],
)
def test_what_only_an_engine_knows_is_bad_input_too(opened, change, words):
    found = ppl.run([SKIP], replace(SMALL, **change), open_engine=opened)
    assert [words in one.reason for one in found.failed] == [True, True]
    assert found.exit_code == 2
