"""Sweeps on spot machines: the command for SkyPilot, and a job that is taken away and begun again."""

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from commands import done, refused

from selfspec_cli.commands.sweep import SECRETS, sky_command
from selfspec_cli.config.compose import compose_runs
from selfspec_cli.record import folder
from selfspec_cli.stages import plan as planning

HERE = Path(__file__).parent
TASK = yaml.safe_load((HERE.parents[1] / "infra" / "selfspec.yaml").read_text(encoding="utf-8"))
WORDS = ["gate=varH", "tau_v=4,5,6", "skip_layers='3,4'", "launcher=sky", "launcher.bucket=mine", "results_dir=here"]
WIDE = ["layer=2,3,4,6", "k=3,5"]


def test_the_command_hands_on_what_was_typed_and_nothing_of_the_launcher(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    command = sky_command(compose_runs(overrides=WORDS)[0], WORDS)
    assert command[:3] == ["sky", "jobs", "launch"]
    assert Path(command[3]).name == "selfspec.yaml"
    assert "SELFSPEC_BUCKET=mine" in command
    (words,) = [word.partition("=")[2] for word in command if word.startswith("SELFSPEC_WORDS=")]
    assert shlex.split(words) == WORDS[:3]
    assert command[command.index("--secret") + 1] == "HF_TOKEN"  # its value stays in the environment
    assert "hf_secret" not in " ".join(command)
    assert command[-1] == "WANDB_API_KEY="


def test_what_the_machine_that_is_found_can_use_is_handed_on_and_the_rest_is_refused():
    more = "launcher.workers=3"
    shown = done("sweep", *WORDS, more, "--max-hours", "2", "--retry-failed", "--dry-run", "--json")
    (words,) = [word.partition("=")[2] for word in json.loads(shown.stdout)["command"] if "SELFSPEC_WORDS=" in word]
    assert shlex.split(words) == [*WORDS[:3], more, "--retry-failed", "--max-hours=2.0"]
    for option in ("--again", "--reuse-baseline"):
        assert f"{option} cannot be handed on" in refused("sweep", *WORDS, option, "--dry-run")


def test_a_dry_run_shows_the_command_and_a_machine_without_sky_says_how_to_get_it(monkeypatch):
    shown = done("sweep", *WORDS, "--dry-run")
    assert "sky jobs launch" in shown.stdout
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "pipx install 'skypilot[aws]'" in refused("sweep", *WORDS)


def test_a_sweep_without_a_bucket_is_refused():
    assert "launcher.bucket=NAME" in refused("sweep", "launcher=sky")


def test_the_task_has_a_spot_machine_a_bucket_secrets_and_autostop():
    machine = TASK["resources"]
    assert machine["use_spot"] is True
    assert machine["accelerators"] == "H100:1"
    assert machine["autostop"] == {"idle_minutes": 30, "down": True}
    assert set(TASK["secrets"]) == set(SECRETS)
    (mount,) = TASK["file_mounts"]
    assert f"results_dir={mount}" in TASK["run"]


@pytest.mark.slow
def test_a_job_that_is_taken_away_three_times_ends_as_one_that_is_not(tmp_path):
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "selfspec"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m selfspec_cli "$@"\n')
    command.chmod(0o755)
    (tmp_path / "fake").mkdir()
    paths = [HERE / "fake_worker", HERE.parent, HERE.parents[1]]
    environment = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "FAKE_WORKER": str(tmp_path / "fake"),
        "FAKE_SECONDS": "0.3",
        "SELFSPEC_WORDS": shlex.join(WIDE),
    }

    def job(results):
        script = TASK["run"].replace("/selfspec-results", str(results))
        return subprocess.Popen(
            ["bash", "-c", script],
            env=environment,
            start_new_session=True,
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    draw, results = random.Random(3), tmp_path / "results"
    for number in range(3):
        running = job(results)
        until = time.monotonic() + 120
        while len(folder.read(results)[0]) < 1 + 2 * number and running.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 0.6))
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
    kept = {point.id for point in folder.read(results)[0]}
    assert kept
    last = job(results)
    assert last.wait() == 0, last.stderr.read()
    points, undisturbed = folder.read(results)[0], planning.plan(compose_runs(overrides=WIDE)).points
    assert kept <= {point.id for point in points}
    assert {point.key for point in points} == {planned.key for planned in undisturbed}
    arms = [point.key for point in points if point.compared_with is not None]
    assert len(arms) == len(set(arms)) == 8  # none was measured twice
