"""The command `selfspec verify`: what it refuses, what it shows, and its exit codes; no engine is started."""

import json

import pytest
from commands import call, document

from selfspec_cli.config.schema import Method, RunConfig
from selfspec_cli.record import quality
from selfspec_cli.stages.verify import run
from selfspec_cli.stages.verify.arm import Wanted


@pytest.fixture
def given(monkeypatch, tmp_path):
    """Runs end with this verdict; what was asked of them is kept."""
    monkeypatch.chdir(tmp_path)
    found = {"verdict": "lossless", "asked": None}

    def stand_in(cfg, wanted, *, open_engine, progress):
        found["asked"] = (cfg, wanted)
        row = {"name": "mixed", "verdict": found["verdict"], "differ": 2, "compared": 12, "drafted": 90, "accepted": 30}
        drawn = {
            "name": "temperature 1",
            "verdict": "same",
            "p": 0.4,
            "distance": 0.1,
            "distance_plain": 0.11,
            "detectable_share": 0.08,
            "texts": 384,
            "p_exact": 0.2,
        }
        made = {
            "verdict": found["verdict"],
            "reason": "because",
            "suspect": None,
            "cases": [row],
            "sampling": [drawn],
            "proof": {"accept_one_more": {"caught": True}},
            "own_drafts": {"verdict": "same"},
            "head": None,
            "plain_repeats": None,
            "runs": 2,
            "verdicts": {found["verdict"]: 2},
            "seconds": 1.0,
            "key": "abc",
            "arm_key": "def",
            "planted": wanted.plant,
        }
        return run.save(made, tmp_path)

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


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--plant", "kv_slott"), "did you mean 'kv_slot'"),
        (("--cases", "mixt"), "did you mean 'mixed'"),
        (("method=skip",), "does not verify its drafts"),
        (
            ("method=vllm", "speculative=ngram", "--plant", "kv_slot"),
            "method=layer_skip; allowed here: accept_one_more, biased_sampler, all",
        ),
        (("layer=99",), "1..23"),
        (("--repeat", "0"), "--repeat"),
    ],
)
def test_bad_input(given, words, expected):
    result = call("verify", *words)
    assert result.exit_code == 2
    assert expected in result.stderr
    assert given["asked"] is None


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
