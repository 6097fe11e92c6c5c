"""`selfspec verify` without an engine: verdicts and names of faults by the evidence alone, the command, and tests of
distributions: right samples pass, wrong ones do not, and the stated power is what it says."""

import json

import numpy as np
import pytest
from commands import call, document

from selfspec_cli.config.schema import ConfigError, EngineConfig, Method, ModelConfig, RunConfig, resolved
from selfspec_cli.early_exit.counters import VerifyCounts
from selfspec_cli.engine.requests import Answer, Request
from selfspec_cli.record import quality
from selfspec_cli.stages.verify import greedy, run, sampling, verdict
from selfspec_cli.stages.verify.engines import Wanted
from selfspec_cli.stages.verify.greedy import Difference
from selfspec_cli.stages.verify.sampling import ALPHA, Drawn, Sample, compare

CASES = ("mixed", "again", "preempted", "crowd 1", "gate maxp", "changing", "cache")


def evidence(*faulty: str, **changes):
    rows = [{"name": name, "verdict": "fault" if name in faulty else "lossless"} for name in CASES]
    found = {
        "gate": "none",
        "cases": rows,
        "sampling": [{"name": "temperature 1", "verdict": "same"}],
        "head": None,
        "own_drafts": {"verdict": "same"},
        "drafted": 90,
        "accepted": 40,
        "proof": {name: {"caught": True} for name in verdict.PLANTED_FOR_PROOF},
    }
    return found | changes


SAMPLED = [{"name": "temperature 1", "verdict": "differs"}]


def test_an_engine_that_ends_over_a_request_is_a_fault_without_a_kind():
    broken = sampling.judge("top-k 5", Drawn(None, ended="index out of bounds"), [Drawn(None)] * 2, None)
    assert broken == {"name": "top-k 5", "verdict": verdict.ENDED, "note": "index out of bounds"}
    found = evidence(sampling=[*evidence()["sampling"], broken], proof={"biased_sampler": {"caught": False}})
    assert verdict.suspect(found) is None
    assert verdict.decide(found) == (
        "fault",
        "the engine that drafts ended over requests with top-k 5: index out of bounds",
    )


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (evidence("mixed", "again", "preempted", "crowd 1", "gate maxp", "changing", "cache"), "kv_slot"),
        (evidence("cache"), "kv_slot"),
        (evidence("mixed", "again", "preempted", "crowd 1", "gate maxp"), "accept_one_more"),
        (evidence("mixed", sampling=SAMPLED), "accept_one_more"),
        (evidence("gate maxp", "changing"), "gate_changes_output"),
        (evidence("mixed", "crowd 1", "gate maxp", gate="maxp"), "gate_changes_output"),
        (evidence("preempted"), "stale_after_preemption"),
        (evidence(own_drafts={"verdict": "fault"}), "other_request"),
        (evidence(sampling=SAMPLED), "biased_sampler"),
        (evidence(head={"verdict": "fault"}), "foreign_head"),
    ],
)
def test_each_kind_of_fault_is_named_by_what_it_does(found, kind):
    assert verdict.suspect(found) == kind
    judged, why = verdict.decide(found)
    assert judged == "fault"
    assert f"({kind})" in why


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (evidence(drafted=0, accepted=0), "no draft was made"),
        (evidence(accepted=0), "none was accepted"),
        (evidence(proof={"biased_sampler": {"caught": False}}), "biased_sampler"),
        (evidence("mixed", proof={"accept_one_more": {"caught": False}}), "did not catch"),
        (evidence(sampling=[{"name": "top-k 5", "verdict": "not shown"}]), "top-k 5"),
    ],
)
def test_what_shows_nothing_does_not_pass(found, words):
    assert verdict.suspect(evidence()) is None and verdict.decide(evidence())[0] == "lossless"
    judged, why = verdict.decide(found)
    assert judged == "not shown"
    assert words in why
    assert judged not in verdict.PASSING


def test_a_case_is_judged_by_its_differences():
    repeats = {"differ": 0, "near_ties": 0, "compared": 32}
    assert verdict.case_row([], 32, 0, repeats, False)[0] == "lossless"
    assert verdict.case_row(["near-tie"], 32, 0, repeats, False)[0] == "near-ties only"
    assert verdict.case_row(["near-tie"], 32, 0, repeats, True)[0] == "fault"
    assert verdict.case_row(["near-tie", "fault"], 32, 0, repeats, False)[0] == "fault"
    assert verdict.case_row([], 32, 2, repeats, False)[0] == "fault"


def test_where_plain_vllm_does_not_repeat_itself_that_is_said():
    """gpt-oss in batch-invariant mode: 17 of 32 differ from plain to plain, 22 of 32 from the arm to plain."""
    noisy = {"differ": 17, "near_ties": 0, "compared": 32}
    judged, note = verdict.case_row(["fault"] * 22, 32, 0, noisy, True)
    assert judged == "not shown"
    assert "17 of 32" in note
    # Far more than plain from itself, and where plain repeats itself but for near-ties.
    assert verdict.case_row(["fault"] * 32, 32, 0, noisy | {"differ": 4}, True)[0] == "fault"
    assert verdict.case_row(["fault"] * 2, 32, 0, noisy | {"differ": 0}, True)[0] == "fault"
    assert verdict.case_row(["fault"] * 4, 12, 0, {"differ": 5, "near_ties": 5, "compared": 12}, False)[0] == "fault"


def test_kernels_that_are_not_invariant_are_not_our_fault():
    """With a sliding window FlashAttention 3 depends on how many tokens a request has in a step: the plain engine
    repeats its outputs, and does not when tokens come together as a verify pass brings them."""
    never = {"differ": 0, "compared": 12}
    assert verdict.not_invariant(3, 0, 12, never, 4) is None
    assert verdict.not_invariant(9, 0, 12, {"differ": 0, "compared": 0}, 4) is None  # outputs bound by a grammar
    assert "chooses the arm's tokens" in verdict.not_invariant(2, 2, 12, never, 4)
    note = verdict.not_invariant(3, 1, 12, {"differ": 2, "compared": 12}, 4)
    assert "5 at a time (2 of 12 differ)" in note
    assert "1 of the arm's 3" in note
    assert verdict.not_invariant(12, 0, 12, {"differ": 1, "compared": 12}, 4) is None  # surely more
    assert verdict.not_invariant(40, 2, 64, {"differ": 1, "compared": 12}, 4) is None

    rows = [{"name": "mixed", "verdict": "not shown", "plain_differs": True}, {"name": "again", "verdict": "lossless"}]
    judged, why = verdict.decide(evidence() | {"cases": rows})
    assert judged == "not shown"
    assert why.startswith(verdict.PLAIN_DIFFERS)
    assert why.endswith("left open: mixed")


@pytest.mark.parametrize(
    ("gap", "together", "kind", "turned"),
    [
        (0.2, None, "near-tie", False),
        (0.1, 0.2, "near-tie", False),
        (-0.1, None, "near-tie", True),
        (0.6, None, "fault", False),
        (0.6, 0.1, "fault", False),
        (0.6, -0.1, "near-tie", True),
        (3.0, -0.1, "fault", True),
        (None, None, "fault", False),  # an output that only ends elsewhere
    ],
)
def test_a_near_tie_is_level_or_turns_when_tokens_come_together(gap, together, kind, turned):
    found = Difference(0, 3, 7, 9, gap, together)
    found.judge(0.25)
    assert (found.kind, found.turned) == (kind, turned)


def test_first_differences_of_greedy_requests():
    asked = [Request([1, 2], 3), Request([1], 3, {"temperature": 0.7}), Request([4], 3), Request([5], 3)]
    ended = ("length", None)
    ours = [Answer([5, 6, 7], ended), Answer([1, 1, 1], ended), Answer([3, 3], ("stop", 3)), Answer([1], ended)]
    want = [Answer([5, 9, 7], ended), Answer([2, 2, 2], ended), Answer([3, 3, 3], ended), Answer([1], ended)]
    first, second = greedy.differences(asked, ours, want)
    assert (first.request, first.place, first.ours, first.plain, first.prefix) == (0, 1, 6, 9, [1, 2, 5])
    assert (second.request, second.place, second.ours, second.plain) == (2, 2, None, 3)
    assert first.to_dict()["chosen_alone"] is None
    scored = [[Answer(*one)] for one in (([5, 6], ended, [-1.0, -2.0]), ([5, 9], ended, [-1.0, -9.0]))]
    assert greedy.unlike_scores(asked[:1], *scored, 1e-3) == 0
    scored = [[Answer([5], ended, [score])] for score in (-1.0, -1.1)]
    assert greedy.unlike_scores(asked[:1], *scored, 1e-3) == 1


def test_drafts_of_a_request_are_its_own():
    def counts(accepted):
        return VerifyCounts(100, 400, accepted, [accepted * part // 10 for part in (4, 3, 2, 1)])

    assert verdict.own_drafts(counts(200), counts(200), exact=True)["verdict"] == "same"
    assert verdict.own_drafts(counts(200), counts(150), exact=True)["verdict"] == "fault"
    assert verdict.own_drafts(counts(200), counts(160), exact=False)["verdict"] == "same"
    assert verdict.own_drafts(counts(200), counts(90), exact=False)["verdict"] == "fault"
    assert verdict.head(0.9, counts(200))["verdict"] == "same"
    assert verdict.head(0.9, VerifyCounts(100, 400, 5, [4, 1, 0, 0]))["verdict"] == "fault"
    assert verdict.head(None, counts(200)) is None


def test_several_runs_have_the_verdict_of_the_worst():
    def one(kinds, judged):
        found = [Difference(0, 3, 7, 9, kind=kind) for kind in kinds]
        row = {"name": "mixed", "verdict": judged, "note": None, "differences": found}
        return evidence() | {"cases": [row]}

    found = run.finished([one([], "lossless"), one(["near-tie"], "fault")], batch_invariant=False)
    assert (found["verdict"], found["runs"]) == ("near-ties only", 2)  # judged again when tokens came together
    assert found["verdicts"] == {"lossless": 1, "near-ties only": 1}
    each = [(one["verdict"], one["drafted"], one["accepted"]) for one in found["each"]]
    assert each == [("lossless", 90, 40), ("near-ties only", 90, 40)]
    assert run.finished([one(["near-tie"], "fault")], batch_invariant=True)["verdict"] == "fault"
    assert run.finished([one(["fault"], "fault"), one([], "lossless")], False)["suspect"] == "accept_one_more"


def test_what_cannot_be_verified_is_refused():
    wanted = Wanted()
    for changes, words in (
        ({"method": Method.baseline}, "drafts nothing"),
        ({"method": Method.skip}, "does not verify"),
        ({"acceptance_length": 3.0}, "synthetic"),
        ({"model": ModelConfig(load_format="dummy")}, "equally likely"),
    ):
        cfg = resolved(RunConfig(**changes))
        with pytest.raises(ConfigError, match=words):
            run.check(cfg, wanted)
    with pytest.raises(ConfigError, match="CUDA only"):
        run.check(resolved(RunConfig()), Wanted(batch_invariant=True))


DETERMINISTIC = {"inductor_compile_config": {"deterministic": True}}
TUNED = {"inductor_compile_config": {"max_autotune": False}}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, DETERMINISTIC),
        (3, {"mode": 3} | DETERMINISTIC),
        ({"mode": 0} | TUNED, {"mode": 0, "inductor_compile_config": {"deterministic": True, "max_autotune": False}}),
        ({"inductor_compile_config": {"deterministic": False}},) * 2,
    ],
)
def test_batch_invariant_engines_choose_no_kernel_by_timing(given, wanted):
    extra = {} if given is None else {run.COMPILATION: given}
    cfg = resolved(RunConfig(engine=EngineConfig(extra=extra)))
    assert run.engine_config(cfg, Wanted(batch_invariant=True)).engine.extra[run.COMPILATION] == wanted
    assert run.engine_config(cfg, Wanted()).engine.extra.get(run.COMPILATION) == given


@pytest.fixture
def given(monkeypatch, tmp_path):
    """Runs end with this verdict; what was asked of them is kept."""
    monkeypatch.chdir(tmp_path)
    found = {"verdict": "lossless", "asked": None}

    def stand_in(cfg, wanted, *, open_engine, progress):
        found["asked"] = (cfg, wanted)
        row = {"name": "mixed", "verdict": found["verdict"], "differ": 2, "compared": 12, "drafted": 90, "accepted": 30}
        drawn = {"name": "temperature 1", "verdict": "same", "texts": 384, "detectable_share": 0.08}
        drawn |= {"p": 0.4, "distance": 0.1, "distance_plain": 0.11, "p_exact": 0.2}
        made = evidence(cases=[row], sampling=[drawn], planted=wanted.plant, plain_repeats=None, arm_key="def")
        made |= {"verdict": found["verdict"], "reason": "because", "runs": 2, "seconds": 1.0}
        return run.save(made | {"verdicts": {found["verdict"]: 2}}, tmp_path)

    monkeypatch.setattr(run, "run", stand_in)
    return found


@pytest.mark.parametrize(("verdict", "code"), [("lossless", 0), ("near-ties only", 0), ("fault", 1), ("not shown", 1)])
def test_the_exit_code_is_the_verdict(given, verdict, code, tmp_path):
    given["verdict"] = verdict
    result = call("verify", "--json")
    assert result.exit_code == code
    found = document(result)
    assert found["verdict"] == verdict
    assert quality.read(tmp_path).verdicts["def"]["verdict"] == verdict


def test_what_is_shown(given):
    shown = call("verify", "--near-tie", "0.5", "--repeat", "2", "--cases", "again,gate").stdout
    for words in (
        "caught",
        "2 of 12 differ",
        "30 of 90 drafted tokens accepted",
        "p = 0.4",
        "finds 8% of 384 texts",
        "2 of 2 runs: lossless",
        "lossless: because",
    ):
        assert words in shown
    asked = given["asked"][1]
    assert (asked.tolerance, asked.repeat, asked.only) == (0.5, 2, ("again", "gate"))


def test_a_planted_run_says_nothing_of_the_arm(given, tmp_path):
    given["verdict"] = "fault"
    assert call("verify", "--plant", "kv_slot").exit_code == 1
    assert not quality.read(tmp_path).verdicts
    (file,) = (tmp_path / "verify").iterdir()
    assert json.loads(file.read_text())["planted"] == "kv_slot"


def test_a_dry_run_starts_nothing(given):
    found = document(call("verify", "--dry-run", "--json", "--thorough"))
    assert found["dry_run"] is True
    assert (found["context"], len(found["sampling"])) == (1024, 8)
    assert given["asked"] is None


@pytest.mark.parametrize("plant", ["accept_one_more", "biased_sampler", "all"])
def test_faults_of_the_verify_pass_can_be_planted_whatever_drafts(plant):
    cfg = RunConfig(method=Method.vllm, speculative={"method": "ngram"})
    run.check(cfg, Wanted(plant=plant))
    planted = [asked.plant for _, asked in run._jobs(cfg, Wanted(plant=plant))]
    assert planted == ([None, "accept_one_more", "biased_sampler"] if plant == "all" else [plant])


# ---- tests of distributions ------------------------------------------------------------------------------------------


VOCAB, LENGTH = 24, 5
CHAIN = np.random.default_rng(7).normal(size=(VOCAB, VOCAB)) * 2.0


def probabilities(sharpness: float = 1.0) -> np.ndarray:
    logits = CHAIN * sharpness
    found = np.exp(logits - logits.max(1, keepdims=True))
    return found / found.sum(1, keepdims=True)


def sample(count: int, seed: int, sharpness: float = 1.0) -> Sample:
    """Texts of a Markov chain that begins with token 0; scores are those of the chain of sharpness 1."""
    draw, chain, true = np.random.default_rng(seed), probabilities(sharpness), probabilities()
    last, tokens, scores = np.zeros(count, dtype=int), [], np.zeros(count)
    for _ in range(LENGTH):
        following = (chain[last].cumsum(1) > draw.random((count, 1))).argmax(1)
        scores += np.log(true[last, following]) / LENGTH
        tokens.append(following)
        last = following
    return Sample(np.stack(tokens, 1), scores)


def test_right_samples_are_not_told_apart():
    ps = [compare(sample(200, 2 * seed), sample(200, 2 * seed + 1), seed)["p"] for seed in range(20)]
    assert min(ps) > ALPHA
    assert 0.2 < np.mean(ps) < 0.8


@pytest.mark.slow
@pytest.mark.parametrize("sharpness", [1.4, 0.7])
def test_a_sampler_that_is_too_sharp_or_too_flat_is(sharpness):
    found = compare(sample(256, 1, sharpness), sample(256, 2))
    assert found["p"] < ALPHA
    assert (found["shift"] > 0) == (sharpness > 1)


@pytest.mark.slow
def test_another_distribution_of_the_same_likelihood_is():
    """Swapped tokens change no score that is computed by the wrong sampler itself; the table sees them."""
    wrong, right = sample(512, 1), sample(512, 2)
    swapped = Sample((wrong.tokens + 1) % VOCAB, wrong.scores)
    found = compare(swapped, right)
    assert found["p_scores"] > 0.01
    assert found["p_table"] < ALPHA


@pytest.mark.slow
def test_the_power_is_what_it_says():
    first, second = sample(256, 11), sample(256, 12)
    share = sampling.detectable(first, second)
    assert share is not None and share < 0.5
    best = first.tokens[first.scores.argmax()], first.scores.max()
    caught = 0
    for seed in range(4):
        ours = sample(256, 100 + seed)
        hit = np.random.default_rng(seed).random(256) < share * 1.5
        ours.tokens[hit], ours.scores[hit] = best
        caught += compare(ours, sample(256, 200 + seed))["p"] < ALPHA
    assert caught >= 3
    assert sampling.detectable(sample(6, 1), sample(6, 2)) is None


def test_the_exact_distribution():
    chain = probabilities()
    pairs = chain[0][:, None] * chain
    known = pairs[:, :, None] * chain
    assert known.sum() == pytest.approx(1)
    assert sampling.exact_p(sample(4096, 5).tokens, known) > 0.001
    assert sampling.exact_p(sample(4096, 5, 1.3).tokens, known) < 1e-6
    assert sampling.exact_p(sample(4096, 5).tokens, pairs) > 0.001
    assert sampling.exact_p(sample(8, 5).tokens, known) is None
    impossible = known.copy()
    impossible[tuple(sample(1, 3).tokens[0, :3])] = 0
    assert sampling.exact_p(sample(1, 3).tokens, impossible) == 0.0


def test_temperature_min_p_top_k_and_top_p():
    logs = np.log([0.5, 0.25, 0.15, 0.1])
    assert sampling.processed(logs, {"temperature": 1.0}) == pytest.approx([0.5, 0.25, 0.15, 0.1])
    assert sampling.processed(logs, {"top_k": 2}) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert sampling.processed(logs, {"top_p": 0.8}) == pytest.approx([5 / 9, 2.5 / 9, 1.5 / 9, 0])
    assert sampling.processed(logs, {"top_p": 0.4}) == pytest.approx([1, 0, 0, 0])
    assert sampling.processed(logs, {"min_p": 0.25}) == pytest.approx([5 / 9, 2.5 / 9, 1.5 / 9, 0])
    assert sampling.processed(logs, {"min_p": 0.25, "temperature": 0.5}) == pytest.approx([0.8, 0.2, 0, 0])
    squared = np.array([0.25, 0.0625, 0.0225, 0.01])
    assert sampling.processed(logs, {"temperature": 0.5}) == pytest.approx(squared / squared.sum())


def test_equal_tokens_at_the_cut_count_together():
    """Which of them top-p keeps is up to the sort, so a text with another one is no fault."""
    logs = np.log([0.4, 0.3, 0.1, 0.1, 0.1])

    def cut(top_p):
        first = sampling.processed(logs, {"top_p": top_p})
        return first, sampling.at_the_cut(logs, first)

    first, tied = cut(0.85)
    assert tied.tolist() == [False, False, True, True, True]
    assert not cut(0.95)[1].any()  # all of them are kept
    assert not cut(0.5)[1].any()
    other = [0, 1, 2, 3, 4]
    other[int(np.flatnonzero(tied & (first > 0))[0])] = int(np.flatnonzero(tied & (first <= 0))[0])
    known = first[:, None] * np.full((5, 5), 0.2)
    draw = np.random.default_rng(0)
    texts = np.stack([draw.choice(5, 2048, p=first), draw.integers(0, 5, 2048)], 1)
    swapped = np.stack([np.array(other)[texts[:, 0]], texts[:, 1]], 1)
    among = np.broadcast_to(tied[:, None], known.shape)
    assert sampling.exact_p(texts, known, among) == sampling.exact_p(swapped, known, among) > 0.001
    assert sampling.exact_p(swapped, known) == 0.0
    texts[:200, 0] = texts[200:400, 0] = 2  # too many of them are one all the same
    assert sampling.exact_p(texts, known, among) < 1e-6


def test_distance_is_the_share_of_texts_that_would_have_to_change():
    ours = np.array([[1], [1], [2], [2]])
    assert sampling.distance(ours, np.array([[1], [2], [2], [2]])) == pytest.approx(0.25)
    assert sampling.distance(ours, ours[::-1]) == 0


def test_where_plain_decoding_draws_one_text_the_arm_must_draw_it_too():
    """Random weights of a Gemma 3 were so sure of themselves, and their verdict was that nothing was shown."""
    one = Drawn(Sample(np.ones((384, 8), dtype=int), np.full(384, -0.1)))
    row = sampling.judge("temperature 0.8", one, [one, one], None)
    assert row["verdict"] == "same"
    assert "one text every time" in row["note"]

    tokens, scores = one.sample.tokens.copy(), one.sample.scores.copy()
    tokens[:40, 3], scores[:40] = 7, -2.0
    row = sampling.judge("temperature 0.8", Drawn(Sample(tokens, scores)), [one, one], None)
    assert row["verdict"] == "differs"
