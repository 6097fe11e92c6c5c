"""`selfspec load` at the command line: what it plans, and what it says of bad input."""

import json

import pytest
from commands import call as command

LOADS = [
    (["load.rate=2", "load.clients=4"], "load.rate=2 and load.clients=4: give one of them"),
    (["load.rate=2", "load.share=0.5"], "load.rate=2 and load.share=0.5: give one of them"),
    (["load.clients=4", "load.burst=8"], "bursts arrive at a rate; give load.rate or load.share"),
    (["load.clients=8", "load.requests=4"], "fewer requests than clients; use load.requests=8 or more"),
    (["load.rate=0"], "load.rate=0.0: out of range; allowed: more than 0"),
    (["load.client=4"], "did you mean 'load.clients'?"),
    (["load.column=question"], "only the rows of a .json, .jsonl, .parquet file have columns"),
    (["workload.prompts=nowhere.jsonl"], "workload.prompts=nowhere.jsonl: must be"),
    (["load.tpot_limit=-1"], "load.tpot_limit=-1.0: out of range"),
    (["--slo", "ttft_p98=200"], "did you mean 'ttft_p9"),
    (["--slo", "ttft_p99=soon"], "the limit is a number of milliseconds above 0, such as ttft_p99=200"),
    (["--slo", "ttft_p99=200", "load.rate=2"], "--slo with load.rate: it finds the load itself"),
]


@pytest.mark.parametrize(("words", "said"), LOADS)
def test_bad_input_is_named_and_ends_with_2(words, said, tmp_path):
    result = command("load", f"results_dir={tmp_path}/r", *words)
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize("name", ["bench", "sweep"])
def test_other_commands_refuse_settings_of_a_load_test(name, tmp_path):
    result = command(name, "load.seconds=5", f"results_dir={tmp_path}/r", "--dry-run")
    assert result.exit_code == 2
    assert f"{name} has none: selfspec load" in result.stderr


def test_a_plan_has_every_load_on_one_server_for_each_arm(tmp_path):
    result = command("load", "load.clients=1,8", "gate=maxp,margin", f"results_dir={tmp_path}/r", "--dry-run", "--json")
    assert result.exit_code == 0, result.stderr
    plan = json.loads(result.stdout.splitlines()[-1])
    engines = plan["engines"]
    assert [len(one) for one in engines] == [2, 4]  # two loads of the baseline, then of both gates on one server
    assert {point["clients"] for one in engines for point in one} == {1, 8}


def test_the_soak_is_one_command(tmp_path):
    result = command("load", "experiment=soak", f"results_dir={tmp_path}/r", "--dry-run", "--json")
    assert result.exit_code == 0, result.stderr
    points = [point for one in json.loads(result.stdout.splitlines()[-1])["engines"] for point in one]
    assert {(point["clients"], point["output_len"]) for point in points} == {(32, 128)}
    assert [point["arm"] for point in points] == ["baseline", "layer_skip"]


def test_nothing_said_is_a_closed_loop_of_eight(tmp_path):
    result = command("load", f"results_dir={tmp_path}/r", "--dry-run")
    assert "8 clients" in result.stdout
