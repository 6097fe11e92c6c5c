"""What a user sees of a command at work: in pseudo-terminals of 80 and 140 columns, and in a pipe."""

import io
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import Clock, model_folder
from points import point
from pseudo_terminal import Terminal

from selfspec_cli.commands import working
from selfspec_cli.config.schema import GateConfig, Method, RunConfig
from selfspec_cli.stages import plan as planning
from selfspec_cli.terminal import last_lines

HERE = Path(__file__).parent
WAYS = ("print", "stderr", "logging", "warning", "fd1", "fd2", "child1", "child2")
SWEEP = ("sweep", "gate=varH", "tau_v=4,5,6", "workload.prompts=random", "perplexity_tokens=0", "repeats=3")


@pytest.fixture(autouse=True)
def model(tmp_path):
    model_folder(tmp_path / "model", num_hidden_layers=8, max_position_embeddings=1024)


def command(*words):
    return [sys.executable, str(HERE / "noisy_command.py"), *words, "model=./model", "layer=3"]


def environment(**more):
    paths = [str(HERE.parents[1]), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TERM": "xterm-256color", **more}


def shown_in(folder, words, columns, **more):
    """The command with these words, in a pseudo-terminal."""
    return Terminal(command(*words), folder, columns, environment(NOISY_START="0.2") | more)


def piped(folder, words, **more):
    """The command with these words, whose output goes into pipes."""
    pipes = {"capture_output": True, "text": True, "timeout": 120, "check": False}
    return subprocess.run(command(*words), cwd=folder, env=environment(**more), **pipes)


def log_of(folder):
    (log,) = (folder / "results" / "logs").glob("*.log")
    return log


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 140])
def test_a_sweep_shows_its_lines_over_a_status_and_nothing_of_anybody_elses(tmp_path, columns):
    shown = shown_in(tmp_path, SWEEP, columns).read()
    assert shown.child.exitstatus == 0, shown.last
    assert "noise" not in shown.raw
    log = log_of(tmp_path)
    assert {word for word in WAYS if f"noise-{word} generate" in log.read_text()} == set(WAYS)
    assert re.fullmatch(r"\d{8}-\d{6}-\w+-sweep\.log", log.name)
    drawn = [seen for seen in shown.seen if "of 4 arms measured" in seen and f"log: results/logs/{log.name}" in seen]
    assert any("starting an engine: model, baseline, 0:00:0" in seen for seen in drawn)
    assert any("3 of 4 arms measured" in seen and "left" in seen for seen in drawn)
    lines = [line for line in drawn[-1].splitlines() if line.startswith("arm ")]
    assert [line[:10] for line in lines] == [f"arm {number} of 4" for number in (1, 2, 3, 4)]
    assert "2.00x (2.00x to 2.00x)" in " ".join(drawn[-1].split())
    assert "4 measured, 0 skipped, 0 failed" in shown.last
    assert "arms measured" not in shown.last  # the status gives way to the result
    assert not shown.screen.cursor.hidden


@pytest.mark.slow
def test_a_pipe_gets_a_line_an_arm_and_no_control_characters(tmp_path):
    done = piped(tmp_path, SWEEP)
    assert done.returncode == 0 and "noise" not in done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr and "\r" not in done.stdout + done.stderr
    lines = done.stderr.splitlines()
    assert lines[0].startswith("4 point(s) on 2 engine(s)")
    assert lines[1] == f"log: results/logs/{log_of(tmp_path).name}"
    assert lines.index("measuring baseline") > min(at for at, line in enumerate(lines) if line.startswith("starting"))
    assert lines.count("measuring baseline") == 1
    arms = [line for line in lines if line.startswith("arm ")]
    assert [line.split(":")[0] for line in arms] == [f"arm {number} of 4" for number in (1, 2, 3, 4)]
    assert "tok/s" in arms[0] and "left" in arms[0]
    assert "2.00x (2.00x to 2.00x)" in arms[1]


@pytest.mark.slow
def test_a_point_that_fails_shows_the_log_so_far_and_the_sweep_goes_on(tmp_path):
    shown = shown_in(tmp_path, SWEEP, 140, NOISY_FAIL="5.0").read()
    assert shown.child.exitstatus == 1
    assert "failed: E=3 k=" in shown.raw and "the engine core is dead" in shown.raw
    assert "noise-child2 before-it-fails" in shown.raw
    assert "3 measured, 0 skipped, 1 failed" in shown.raw


@pytest.mark.slow
def test_an_engine_that_does_not_start_says_why_in_a_pipe_too(tmp_path):
    done = piped(tmp_path, ["roc", "workload.prompts=random"], NOISY_FAIL="start")
    assert done.returncode == 1
    assert "  noise-child2 start" in done.stderr
    assert f"all of it: results/logs/{log_of(tmp_path).name}" in done.stderr
    assert done.stderr.splitlines()[-2:] == [
        "selfspec: RuntimeError: no memory",
        "The same command with --debug shows the traceback.",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("when", "start"), [("starting an engine", "1000"), (" of 200", "0")])
def test_an_interrupt_leaves_the_status_and_says_what_the_same_command_does(tmp_path, when, start):
    shown = shown_in(tmp_path, [*SWEEP[:-1], "repeats=200"], 80, NOISY_START=start)
    shown.read(until=when)
    while "noise-child2" not in log_of(tmp_path).read_text():  # the line on the screen comes before the engine's own
        time.sleep(0.02)
    shown.child.sendintr()
    shown.read()
    assert shown.child.exitstatus == 130, shown.last
    assert "of 4 arms measured" in shown.last
    assert f"log: results/logs/{log_of(tmp_path).name}" in shown.last
    assert "noise" not in shown.raw  # nothing of the log covers the status
    said = " ".join(shown.last.split())
    assert "the same command measures the rest, and the baseline anew unless you add --reuse-baseline" in said
    assert not shown.screen.cursor.hidden


@pytest.mark.slow
def test_debug_shows_everything(tmp_path):
    done = piped(tmp_path, [*SWEEP, "--debug"])
    assert done.returncode == 0
    assert {word for word in WAYS if f"noise-{word} generate" in done.stderr} == set(WAYS)
    assert not (tmp_path / "results" / "logs").exists()
    assert "noise" not in done.stdout


# ---- without a process -----------------------------------------------------------------------------------------------


def planned():
    cfgs = [RunConfig(gate=GateConfig("varH"), threshold=tau) for tau in (4.0, 5.0)]
    return planning.plan([RunConfig(method=Method.baseline), *cfgs])


def screen_of(clock, plan=None):
    """A screen that writes into a text, and that text; plan: of the sweep that it shows."""
    text = io.StringIO()
    screen = working.Screen(text, Path("a.log"), clock=clock)
    if plan is not None:
        screen.planned(plan)
    return screen, text


def test_time_left_comes_from_what_was_measured():
    clock, plan = Clock(), planned()
    assert screen_of(clock, plan)[0].left() is None  # nothing is known yet
    plan.seconds = 100.0
    screen, _ = screen_of(clock, plan)
    clock.now = 30.0
    assert screen.left() == pytest.approx(70.0)  # by earlier runs
    screen.finished = {plan.points[0].key}
    assert screen.left() == pytest.approx(2 * 30.0)
    screen.measuring(plan.points[1])
    screen("repeats", 3, 6)
    assert screen.left() == pytest.approx(30.0 / 1.5 * 1.5)


def test_a_point_that_came_whole_has_its_speed():
    (screen, text), found = screen_of(Clock()), point()
    screen.measured(found)
    assert re.match(rf"arm 1 of 1: .*: {statistics.median(found.tok_s):,.1f} \(", text.getvalue())


def test_a_long_count_in_a_pipe_is_spoken_of_now_and_then():
    clock = Clock()
    screen, text = screen_of(clock)
    for done in range(1, 101):
        clock.now = float(done)
        screen("trials E3-lens", done, 100)
    lines = text.getvalue().splitlines()
    assert lines[-1] == "trials E3-lens: 100 of 100"
    assert 4 <= len(lines) <= 7
    assert lines[1] == "log: a.log" and "about" in lines[0]
    screen("exits", 3, 5)
    screen.ended("exits", 3, 5)
    screen.ended("trials E3-lens", 100, 100)  # that it is complete was said
    assert text.getvalue().splitlines()[len(lines) :] == ["exits: ended after 3 of 5"]
    assert screen.counts == {}


def test_durations():
    assert [working.duration(seconds) for seconds in (0.4, 61, 3700)] == ["0:00:00", "0:01:01", "1:01:40"]


def test_the_last_lines_of_a_log(tmp_path):
    log = tmp_path / "a.log"
    log.write_text("one\n\ntwo\rthree\n  \nfour\n")
    assert last_lines(log, 2) == ["three", "four"]
    assert last_lines(tmp_path / "gone.log", 2) == []


def test_a_pipe_is_told_what_is_being_done_whenever_nothing_was_said(monkeypatch):
    monkeypatch.setattr(working, "QUIET", 0.01)
    plan = planned()
    screen, text = screen_of(Clock(), plan)
    screen.open()
    try:
        for begin, line in (
            (lambda: screen.starting("baseline"), "starting an engine: baseline, "),
            (lambda: (screen.started(), screen.measuring(plan.points[0])), "measuring baseline, "),
            (lambda: screen("repeats", 2, 5), "measuring baseline, repeats: 2 of 5, "),
        ):
            begin()
            seen = len(text.getvalue())
            while f"{line}0:00:00 so far\n" not in text.getvalue()[seen:]:
                time.sleep(0.005)
    finally:
        screen.close(keep=False)
    assert text.getvalue().count("\nmeasuring baseline\n") == 1  # as that part begins
    time.sleep(0.03)
    said = text.getvalue()
    time.sleep(0.05)
    assert text.getvalue() == said  # a closed screen is silent


def test_that_others_are_in_the_way_is_said_once():
    screen, text = screen_of(Clock())
    screen.busy(0.834)
    screen.busy(0.9)
    (line,) = [line for line in text.getvalue().splitlines() if "other programs" in line]
    assert line.startswith("other programs have 83% of the processor: ")
