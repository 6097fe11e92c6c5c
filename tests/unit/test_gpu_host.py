"""experiments/gpu_host.sh: every job names scripts, commands and settings that there are. Nothing of them is run."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from selfspec_cli.config import paths
from selfspec_cli.config.compose import compose_runs

SCRIPT = paths.experiments_dir() / "gpu_host.sh"
JOBS = [name for name in re.findall(r"^(\w+)\(\) \{", SCRIPT.read_text(encoding="utf-8"), re.M) if name != "selfspec"]
END = "end of arguments"
RECORDING = f"""#!/bin/sh
printf '%s\\n' "$@" '{END}' >>"$RECORD"
"""


def asked(folder: Path, *jobs: str) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    """What the script says, and the arguments of every Python that it starts."""
    binary, record = folder / "bin" / "python3", folder / "record"
    binary.parent.mkdir()
    binary.write_text(RECORDING)
    binary.chmod(0o755)
    record.touch()
    found = os.environ | {"PATH": f"{binary.parent}:{os.environ['PATH']}", "RECORD": str(record)}
    done = subprocess.run([SCRIPT, folder / "models", folder / "out", *jobs], env=found, capture_output=True, text=True,
                          check=False)  # fmt: skip
    parts = record.read_text().split(f"{END}\n")[:-1]
    return done, [part.splitlines() for part in parts]


def test_every_job_names_what_there_is(tmp_path, monkeypatch):
    done, commands = asked(tmp_path, *JOBS)
    assert done.returncode == 0 and done.stdout.count("exit code 0") == len(JOBS), done.stdout
    models = tmp_path / "models"
    for name in ("smollm2", "smollm2_widened", "smollm2_widened_drafts/int4", "plain_widened", "reference_widened"):
        (models / name).mkdir(parents=True)
        (models / name / "config.json").write_text('{"num_hidden_layers": 30, "model_type": "llama"}')
    monkeypatch.chdir(models)
    verbs = []
    for first, *rest in commands:
        if first != "-m":
            assert Path(first).is_file()
            continue
        verb, words = rest[1], [word for word in rest[2:] if "=" in word]
        for word in words:
            if word.startswith("draft_weights_path="):
                Path(word.partition("=")[2]).touch()
        assert compose_runs(None, words, sweep=verb in ("sweep", "fit-weights")), words
        verbs.append(verb)
    assert {"sweep", "fit-weights", "profile"} == set(verbs)


@pytest.mark.parametrize("job", ["nothing", "copies;"])
def test_a_job_that_there_is_not_is_refused_before_any_begins(tmp_path, job):
    done, commands = asked(tmp_path, "widened", job)
    assert done.returncode == 2 and f"{job}: no such job" in done.stderr and commands == []
