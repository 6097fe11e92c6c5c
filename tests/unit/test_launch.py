"""Sweeps on several workers and on spot machines: how they are cut, what SkyPilot is given, that nothing is lost when
a worker or the driver dies."""

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from commands import call, done, program, refused, until
from points import measured

from selfspec_cli.commands import measuring
from selfspec_cli.commands.sweep import SECRETS, sky_command
from selfspec_cli.config.compose import compose_runs
from selfspec_cli.config.schema import ConfigError, LauncherConfig, LauncherKind, Method, ModelConfig, RunConfig
from selfspec_cli.progress import ignore
from selfspec_cli.record import folder
from selfspec_cli.record.point import to_json
from selfspec_cli.stages import plan as planning
from selfspec_cli.stages import sweep
from selfspec_cli.stages.launch import driver, work

HERE = Path(__file__).parent
LAYERS = (2, 3, 4, 6)


PATHS = [str(HERE / "fake_worker"), str(HERE.parent), str(HERE.parents[1])]
"""Where a worker, and each command that starts one, finds engines that are made up and the package."""


def asked(kind="joblib", place=".", layers=LAYERS, device="cpu", ranks=1, **more):
    launcher, engine = LauncherConfig(kind=LauncherKind(kind), **more), replace(RunConfig().engine, device=device)
    model = ModelConfig(tensor_parallel_size=ranks)
    common = {"launcher": launcher, "engine": engine, "model": model, "results_dir": str(place)}
    return [RunConfig(layer=layer, **common) for layer in layers]


ENGINE = SimpleNamespace(set_gate=lambda *words: None)


def never(cfg):
    raise AssertionError("the driver opens no engine")


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A folder of results, and one in which made-up workers leave what they did; room for two workers."""
    place = tmp_path / "fake"
    place.mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [*PATHS, os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("FAKE_WORKER", str(place))
    monkeypatch.setattr(work, "own_cores", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    return tmp_path / "results", place


def run(cfgs, **more):
    return sweep.run(cfgs, open_engine=never, bench=never, **more)


def ran(place):
    return Counter((place / "measured").read_text().split("\n")[:-1])


def units(layers, workers=1, ends=None, **more):
    return work.cut(planning.plan(asked(layers=layers, **more)).families, workers, ends)


def test_a_family_is_dealt_out_with_its_baseline_in_each_unit():
    found = units((2, 3, 4, 5, 6), workers=2)
    assert [unit.name for unit in found] == ["u0", "u1"]
    assert [len(unit.points) for unit in found] == [4, 3]
    assert all(unit.points[0].is_baseline and not any(p.is_baseline for p in unit.points[1:]) for unit in found)
    assert sorted(p.cfg.layer for unit in found for p in unit.points[1:]) == [2, 3, 4, 5, 6]


def test_families_share_the_workers_by_their_engines():
    others = [replace(cfg, model=ModelConfig(name="other", path="reference_plain")) for cfg in asked(layers=(2,))]
    todo = planning.plan([*asked(layers=(2, 3, 4)), *others])
    assert sorted(len(unit.points) for unit in work.cut(todo.families, 2)) == [2, 2, 3]
    assert len(work.cut(todo.families, 1)) == 2
    assert work.cut([], 3) == []


def test_what_a_dead_worker_leaves_keeps_the_baseline_it_is_compared_with():
    (unit,) = units((2, 3))
    base, two, three = unit.points
    assert work.rest(unit, {base.key, two.key}, "r").points == (base, three)
    assert work.rest(unit, {base.key, two.key, three.key}, "r") is None
    assert work.rest(unit, {two.key, three.key}, "r").points == (base,)


def test_a_unit_takes_as_many_gpus_as_its_model_is_divided_among():
    (unit,) = units((2,), ranks=4)
    assert unit.gpus == 4


def test_no_gpu_is_held_twice_and_a_unit_of_many_gets_its_own(monkeypatch):
    held, order = [], []

    def points_of(document, environment, log, stopped):
        mine = environment["CUDA_VISIBLE_DEVICES"].split(",")
        assert not set(mine) & set(held)
        held.extend(mine)
        time.sleep(0.05)
        for number in mine:
            held.remove(number)
        order.append(document)
        yield work.Ended(0)

    monkeypatch.setattr(driver, "points_of", points_of)
    monkeypatch.setattr(driver, "description", lambda unit, run_id: unit.name)
    monkeypatch.setattr(driver, "workers_here", lambda cfg: 4)
    monkeypatch.setattr(work, "free", lambda cfg: ["0", "1"])
    monkeypatch.setattr(work, "near_cores", lambda gpu: [])
    given = [SimpleNamespace(name=name, devices=count) for name, count in (("a", 1), ("b", 2), ("c", 1), ("d", 2))]
    items = [item for _, item in driver.launch_here(given, asked(device="cuda")[0], "RUN", lambda unit: "")]
    assert items == [work.Ended(0)] * 4
    assert sorted(order) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("cores", "load", "pairs"), [(8, 0.0, 4), (8, 3.5, 2), (8, 20.0, 1), (2, 0.0, 1), (1, 0.0, 1), (5, 0.2, 2)]
)
def test_a_cpu_has_a_worker_for_each_idle_pair_of_cores_and_at_least_one(cores, load, pairs):
    found = work.free_pairs(range(cores), load)
    assert len(found) == pairs
    assert all(len(pair) == min(cores, 2) for pair in found)


def test_cores_near_a_gpu_are_those_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr(work.machine, "asked_of_gpus", lambda *_: [["00000000:3B:00.0"]])
    monkeypatch.setattr(work.Path, "read_text", lambda *_, **__: "0-3,8-11\n")
    monkeypatch.setattr(work, "own_cores", lambda: [2, 3, 4, 8])
    assert work.near_cores("0") == [2, 3, 8]
    assert work.of_gpus(["0", "1"]) == {"CUDA_VISIBLE_DEVICES": "0,1", work.CORES: "2,3,8"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["joblib", "submitit", "ray"])
def test_two_workers_measure_what_one_would_and_one_that_dies_loses_the_point_in_hand_alone(lab, kind):
    results, place = lab
    (place / "together").touch()  # each waits until the other has begun
    (place / "die-4").touch()
    result = run(asked(kind, results))
    assert result.exit_code == 0, [point.reason for point in result.failed]
    assert result.left == 0  # although the baseline was measured by each worker
    points = folder.read(results)[0]
    local = planning.plan(asked("local", results))
    assert {point.key for point in points} == {planned.key for planned in local.points}
    assert len(list((results / "logs").glob("*.log"))) == 3  # of two workers, and of the one that took over
    assert [int(file.read_text()) for file in place.glob("pid-*")] == [os.nice(0)] * 3
    assert ran(place) == Counter({"baseline None": 3, "layer_skip 4": 2} | {f"layer_skip {n}": 1 for n in (2, 3, 6)})
    bases = {point.id: point for point in points if point.arm["arm"] == "baseline"}
    for point in points:
        if point.id not in bases:  # compared with the baseline of its own worker
            assert bases[point.compared_with.baseline].run_id == point.run_id
    assert run(asked(kind, results)).skipped == len(LAYERS)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "had"), [("cuda", ["0", "1"]), ("cpu", ["0,1", "2,3"])])
def test_jobs_that_are_processes_of_this_host_have_gpus_or_cores_of_their_own(lab, monkeypatch, device, had):
    results, place = lab
    (place / "together").touch()
    monkeypatch.setattr(driver.machine, "gpus", lambda: [("GPU-a", "NVIDIA H100"), ("GPU-b", "NVIDIA H100")])
    assert run(asked("submitit", results, device=device)).exit_code == 0
    assert sorted(file.read_text() for file in place.glob("has-*")) == had


def test_a_ray_cluster_that_never_has_room_is_refused(monkeypatch):
    nodes = [{"Alive": True, "Resources": {"CPU": 64.0, "GPU": 1.0}} for _ in range(2)]
    monkeypatch.setattr(driver, "ray_connected", lambda cfg: SimpleNamespace(nodes=lambda: nodes))
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert driver.ray_workers(asked("ray", device="cuda")[0]) == 2
    with pytest.raises(ConfigError, match=r"a worker takes 2 GPU\(s\) of one node, and no node .* more than 1"):
        driver.ray_workers(asked("ray", device="cuda", ranks=2)[0])


@pytest.mark.slow
def test_a_point_on_which_workers_keep_dying_has_failed_and_the_others_have_not(lab):
    results, place = lab
    (place / "die-always-3").touch()
    result = run(asked("joblib", results))
    assert result.exit_code == 1
    (lost,) = result.failed
    assert lost.config["layer"] == 3
    assert lost.reason == "its worker was ended by SIGKILL"
    assert ran(place)["layer_skip 3"] == 2
    assert sorted(point.config["layer"] for point in result.points if point.ok and point.config["layer"]) == [2, 4, 6]


@pytest.mark.slow
def test_a_killed_drivers_sweep_goes_on_in_a_copy_of_its_folder_with_the_same_rows(lab, monkeypatch):
    results, place = lab
    monkeypatch.setenv("FAKE_SECONDS", "0.7")
    words = ["sweep", "layer=2,3,4,6", "launcher=joblib", f"results_dir={results}"]
    command = [sys.executable, "-m", "selfspec_cli", *words]
    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: len(folder.read(results)[0]) >= 2 or killed.poll() is not None)
    assert killed.poll() is None
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    copied = results.with_name("copied")  # to another machine
    shutil.copytree(results, copied)
    kept = {point.key: point for point in folder.read(copied)[0]}
    finished = [point.config["layer"] for point in kept.values() if point.config["layer"]]
    assert finished
    (pid,) = [int(file.name.removeprefix("pid-")) for file in place.glob("pid-*")]
    until(lambda: not Path(f"/proc/{pid}").exists())
    before = {path: path.stat().st_mtime_ns for path in results.rglob("*")}
    resumed = subprocess.run([*command[:-1], f"results_dir={copied}"], capture_output=True, text=True, check=False)
    assert resumed.returncode == 0, resumed.stderr
    points = folder.read(copied)[0]
    undisturbed = planning.plan(compose_runs(overrides=words[1:-1])).points
    assert {point.key for point in points} == {planned.key for planned in undisturbed}
    assert {point.id for point in kept.values()} <= {point.id for point in points}
    assert [ran(place)[f"layer_skip {layer}"] for layer in finished] == [1] * len(finished)
    assert before == {path: path.stat().st_mtime_ns for path in results.rglob("*")}  # the first machine's is left alone


@pytest.mark.slow
def test_points_that_jobs_left_behind_are_taken_in(lab):
    results, _ = lab
    run(asked("submitit", results, layers=(2,)))
    (file,) = [
        path
        for path in (results / folder.RUNS).glob("*.json")
        if folder.read(results, {path.stem})[0][0].config["layer"]
    ]
    spool = results / "logs" / "RUN-jobs" / "spool-u0"
    spool.mkdir(parents=True)
    file.rename(spool / "0001.json")
    result = run(asked("submitit", results, layers=(2,)))
    assert result.skipped == 1
    assert "1 point(s) that jobs of an earlier command had measured" in result.warnings[0]
    assert file.exists()
    assert driver.collect(results) == []


@pytest.mark.slow
def test_a_worker_with_fewer_cores_than_the_driver_measures_the_points_of_the_plan(lab, monkeypatch):
    results, place = lab
    monkeypatch.setattr(work, "own_cores", lambda: sorted(os.sched_getaffinity(0))[:1])
    here = planning.plan(asked("local", results, layers=(2, 3)))
    if " 1 cores" in here.points[0].device:
        pytest.skip("this machine has one core")
    result = run(asked("joblib", results, layers=(2, 3)))
    assert {point.device.rpartition(",")[2] for point in result.points} == {" 1 cores"}
    assert result.left == 0
    assert {point.key for point in result.points} == {planned.key for planned in here.points}
    assert run(asked("joblib", results, layers=(2, 3))).skipped == 2
    assert set(ran(place).values()) == {1}


def test_a_worker_names_a_point_as_the_plan_does_only_where_it_is_the_same_point(monkeypatch):
    def document_on(device, **changed):
        monkeypatch.setattr(work.machine, "device", lambda cfg: device)
        (unit,) = units((2,))
        return work.description(unit, "RUN") | changed, [planned.cfg for planned in unit.points]

    def same(there, here, **changed):
        document, cfgs = document_on(there, **changed)
        monkeypatch.setattr(work.machine, "device", lambda cfg: here)
        found = work.keys_of(document, cfgs)
        assert sorted(found.values()) in ([], sorted(planned["key"] for planned in document["points"]))
        return bool(found)

    assert same("no GPU", "2x NVIDIA H100")  # a login node
    assert same("EPYC, 64 cores", "EPYC, 2 cores")
    assert not same("EPYC, 64 cores", "Xeon, 2 cores")
    assert not same("NVIDIA A100", "NVIDIA H100")
    assert not same("no GPU", "NVIDIA H100", versions={"vllm": "0.1"})


@pytest.mark.slow
def test_workers_begin_no_point_after_the_end(lab):
    results, place = lab
    assert run(asked("joblib", results), ends=time.time() - 1).left == 1 + len(LAYERS)
    assert not (place / "measured").exists()
    (unit,) = units((2,), ends=time.time() - 1)
    assert list(work.points_of(work.description(unit, "RUN"), {})) == [work.Ended(0)]


def test_a_death_is_counted_against_the_point_that_the_worker_had_in_hand(tmp_path, monkeypatch):
    """Although another worker has measured the same baseline."""
    cfgs = [
        replace(cfg, engine=replace(cfg.engine, max_num_seqs=8), workload=replace(cfg.workload, batch=batch))
        for cfg in asked(layers=(2, 3), place=tmp_path, workers=2)
        for batch in (1, 2)
    ]
    failed = []

    def launch(given, cfg, run_id, log):
        for unit in given:
            spooled = []
            sweep.run_unit(
                [one.cfg for one in unit.points],
                run_id + unit.name,
                {},
                open_engine=lambda cfg: nullcontext(ENGINE),
                bench=lambda *words: measured(100.0, 101.0, 99.0),
                keep=spooled.append,
                ends=None,
            )
            dies = unit.name.startswith("u1") and unit.points[1].is_baseline  # at its second baseline, each time
            for point in spooled[: 1 if dies else None]:
                yield unit, to_json(point)
            yield unit, work.Ended(-9 if dies else 0)

    monkeypatch.setitem(driver.LAUNCHERS, "joblib", SimpleNamespace(workers=lambda cfg: 2, launch=launch))
    plan = planning.plan(cfgs)
    left = driver.run(
        plan,
        cfgs[0],
        "RUN",
        tmp_path,
        save=lambda point: None,
        fail=lambda planned, error: failed.append(planned.cfg),
        progress=ignore,
    )
    assert left == 0
    assert [cfg.workload.batch for cfg in failed] == [2]


def test_a_unit_that_wants_more_gpus_than_there_are_is_refused_before_anything_starts(tmp_path, monkeypatch):
    cfgs = [cfg for ranks in (1, 2) for cfg in asked(layers=(2,), place=tmp_path, device="cuda", ranks=ranks)]
    monkeypatch.setattr(driver.machine, "visible_gpus", lambda: ["NVIDIA H100"])
    with pytest.raises(ConfigError, match="tensor_parallel_size=2, and 1 GPUs can be seen"):
        run(cfgs)


@pytest.mark.slow
def test_an_interrupt_does_not_wait_for_the_points_in_hand(lab, monkeypatch):
    results, place = lab
    monkeypatch.setenv("FAKE_SECONDS", "30")

    def press():
        until(lambda: list(place.glob("pid-*")))
        os.kill(os.getpid(), signal.SIGINT)

    user = threading.Thread(target=press, daemon=True)  # it waits for ever where no worker begins
    user.start()
    with pytest.raises(KeyboardInterrupt):
        run(asked("joblib", results))
    user.join()
    assert not list(place.glob("ended-*"))
    for file in place.glob("pid-*"):
        assert not Path(f"/proc/{file.name.removeprefix('pid-')}").exists()


def test_baselines_of_earlier_commands_are_refused(tmp_path):
    (arm,) = asked(layers=(2,), place=tmp_path)
    base = replace(arm, method=Method.baseline, layer=None, launcher=LauncherConfig())
    sweep.run([base], open_engine=lambda cfg: nullcontext(ENGINE), bench=lambda *words: measured(100.0, 101.0, 99.0))
    with pytest.raises(ConfigError, match="launcher=joblib: a point is compared with a baseline of the same GPU"):
        run([arm], reuse_baseline=True)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [([], 1, "did not come back from the workers"), (["--max-hours", "2"], 0, "--max-hours 2 is over")],
)
def test_points_without_a_row_are_said_and_fail_a_sweep_that_had_no_limit(tmp_path, monkeypatch, options, code, said):
    monkeypatch.setattr(measuring, "_sweep", lambda *_: (sweep.SweepResult("RUN", left=2), []))
    shown = call("sweep", "layer=3", "k=4", f"results_dir={tmp_path}", *options)
    assert shown.exit_code == code, shown.output
    assert said in " ".join(shown.output.split())


# ---- spot machines ---------------------------------------------------------------------------------------------------


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
def test_a_job_that_is_taken_away_three_times_ends_as_one_that_is_not(lab, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{program(tmp_path).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SECONDS", "0.3")
    monkeypatch.setenv("SELFSPEC_WORDS", shlex.join(WIDE))
    draw, (results, _) = random.Random(3), lab

    def job():
        command = ["bash", "-c", TASK["run"].replace("/selfspec-results", str(results))]
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, start_new_session=True, cwd=tmp_path, **pipes)

    for number in range(3):
        running, least = job(), 1 + 2 * number
        until(lambda run=running, least=least: len(folder.read(results)[0]) >= least or run.poll() is not None)
        time.sleep(draw.uniform(0, 0.6))
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
    kept = {point.id for point in folder.read(results)[0]}
    assert kept
    last = job()
    assert last.wait() == 0, last.stderr.read()
    points, undisturbed = folder.read(results)[0], planning.plan(compose_runs(overrides=WIDE)).points
    assert kept <= {point.id for point in points}
    assert {point.key for point in points} == {planned.key for planned in undisturbed}
    arms = [point.key for point in points if point.compared_with is not None]
    assert len(arms) == len(set(arms)) == 8  # none was measured twice
