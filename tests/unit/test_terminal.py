"""What a user sees of a command at work: in pseudo-terminals of 80 and 140 columns, and in a pipe."""

import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import model_folder
from points import point
from pseudo_terminal import Terminal

from selfspec_cli.commands import progress_table, working
from selfspec_cli.config.schema import GateConfig, Method, RunConfig
from selfspec_cli.stages import plan as planning
from selfspec_cli.terminal import last_lines

HERE = Path(__file__).parent
WAYS = ("print", "stderr", "logging", "warning", "fd1", "fd2", "child1", "child2")
SWEEP = ("sweep", "gate=varH", "tau_v=4,5,6", "workload.prompts=random", "perplexity_tokens=0", "repeats=3")


@pytest.fixture(autouse=True)
def model(tmp_path):
    model_folder(tmp_path / "model", num_hidden_layers=8, max_position_embeddings=1024)


def environment(**more):
    paths = [str(HERE.parents[1]), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TERM": "xterm-256color", **more}


def command(*words):
    return [str(HERE / "noisy_command.py"), *words, "model=./model", "layer=3"]


def shown_in(folder, words, columns, **more):
    """The command with these words, in a pseudo-terminal."""
    env = environment(NOISY_START="0.2") | more
    return Terminal([sys.executable, *command(*words)], folder, columns, env)


def log_of(folder):
    (log,) = (folder / "results" / "logs").glob("*.log")
    return log


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 140])
def test_a_sweep_draws_one_table_in_place_and_nothing_of_anybody_elses(tmp_path, columns):
    shown = shown_in(tmp_path, SWEEP, columns).read()
    assert shown.child.exitstatus == 0, shown.last
    assert "noise" not in shown.raw
    log = log_of(tmp_path)
    assert {word for word in WAYS if f"noise-{word} generate" in log.read_text()} == set(WAYS)
    assert re.fullmatch(r"\d{8}-\d{6}-\w+-sweep\.log", log.name)
    drawn = [seen for seen in shown.seen if "of 4 arms measured" in seen and f"log: results/logs/{log.name}" in seen]
    assert any("starting an engine: model, baseline" in seen for seen in drawn)
    last = drawn[-1].splitlines()
    arms = [line for line in last if line.lstrip().startswith(("baseline", "E=3 k="))]
    assert len(arms) == 4  # each on one line
    assert any(re.search(r"3 of 3 +\d+\.\d \(\d+ to \d+\)", line) for line in arms)
    assert sum("2.00x (2.00 to 2.00)" in line for line in arms) >= 2, drawn[-1]
    assert any("left" in seen for seen in drawn)
    assert "4 measured, 0 skipped, 0 failed" in shown.last
    assert "arms measured" not in shown.last  # the table gives way to the result
    assert not shown.screen.cursor.hidden


@pytest.mark.slow
def test_a_pipe_gets_a_line_an_arm_and_no_control_characters(tmp_path):
    done = subprocess.run(
        [sys.executable, *command(*SWEEP)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "noise" not in done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr and "\r" not in done.stdout + done.stderr
    lines = done.stderr.splitlines()
    assert lines[0].startswith("4 point(s) on 2 engine(s)")
    assert lines[1] == f"log: results/logs/{log_of(tmp_path).name}"
    assert lines.index("measuring baseline") > min(at for at, line in enumerate(lines) if line.startswith("starting"))
    assert lines.count("measuring baseline") == 1
    arms = [line for line in lines if line.startswith("arm ")]
    assert [line.split(":")[0] for line in arms] == [f"arm {number} of 4" for number in (1, 2, 3, 4)]
    assert "tok/s" in arms[0] and "left" in arms[0]
    assert "2.00x (2.00 to 2.00)" in arms[1]


@pytest.mark.slow
def test_a_point_that_fails_shows_the_log_so_far_and_the_sweep_goes_on(tmp_path):
    shown = shown_in(tmp_path, SWEEP, 140, NOISY_FAIL="5.0").read()
    assert shown.child.exitstatus == 1
    assert "failed: E=3 k=" in shown.raw and "the engine core is dead" in shown.raw
    assert "noise-child2 before-it-fails" in shown.raw
    assert "3 measured, 0 skipped, 1 failed" in shown.raw


@pytest.mark.slow
def test_an_engine_that_does_not_start_says_why_in_a_pipe_too(tmp_path):
    words, env = command("roc", "workload.prompts=random"), environment(NOISY_FAIL="start")
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "  noise-child2 start" in done.stderr
    assert f"all of it: results/logs/{log_of(tmp_path).name}" in done.stderr
    assert done.stderr.splitlines()[-2:] == [
        "selfspec: RuntimeError: no memory",
        "The same command with --debug shows the traceback.",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "start"),
    [("starting an engine", "1000"), (" of 200", "0")],
    ids=["while an engine starts", "while it measures"],
)
def test_an_interrupt_leaves_the_table_and_says_what_the_same_command_does(tmp_path, when, start):
    shown = shown_in(tmp_path, [*SWEEP[:-1], "repeats=200"], 80, NOISY_START=start)
    shown.read(until=when)
    while "noise-child2" not in log_of(tmp_path).read_text():  # the line on the screen comes before the engine's own
        time.sleep(0.02)
    shown.child.sendintr()
    shown.read()
    assert shown.child.exitstatus == 130, shown.last
    assert "of 4 arms measured" in shown.last
    assert f"log: results/logs/{log_of(tmp_path).name}" in shown.last
    assert "noise" not in shown.raw  # nothing of the log covers the table
    said = " ".join(shown.last.split())
    assert "the same command measures the rest, and the baseline anew unless you add --reuse-baseline" in said
    assert not shown.screen.cursor.hidden


@pytest.mark.slow
def test_debug_shows_everything(tmp_path):
    done = subprocess.run(
        [sys.executable, *command(*SWEEP), "--debug"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert {word for word in WAYS if f"noise-{word} generate" in done.stderr} == set(WAYS)
    assert not (tmp_path / "results" / "logs").exists()
    assert "noise" not in done.stdout


# ---- without a process -----------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def planned(**more):
    cfgs = [RunConfig(gate=GateConfig("varH"), threshold=tau, **more) for tau in (4.0, 5.0)]
    return planning.plan([RunConfig(method=Method.baseline), *cfgs])


def test_time_left_comes_from_what_was_measured():
    clock = Clock()
    state, plan = progress_table.State(clock), planned()
    plan.seconds = 100.0
    state.plan(plan)
    clock.now = 30.0
    assert state.left() == pytest.approx(70.0)  # by earlier runs
    first, second, _ = plan.points
    state.starts = [6.0]
    state.arms[first.key].state, state.arms[first.key].seconds = "done", 10.0
    assert state.left() == pytest.approx(2 * 10.0 + 6.0)  # two arms, and the second engine
    state.measuring(second)
    state.count("repeats", 3, 6)
    assert state.left() == pytest.approx(1.5 * 10.0 + 6.0)


def test_time_left_of_workers_includes_the_starts_that_nobody_here_sees():
    clock = Clock()
    state, plan = progress_table.State(clock), planned()
    state.plan(plan)
    clock.now = 50.0
    state.arms[plan.points[0].key].state, state.arms[plan.points[0].key].seconds = "done", 10.0
    assert state.left() == pytest.approx(2 * 50.0)


def test_a_point_that_came_whole_has_its_speed():
    state, found = progress_table.State(Clock()), point()
    state.measured(found)
    assert found.tok_s
    assert state.arms[found.key].tok_s == list(found.tok_s)


def test_nothing_is_promised_before_anything_is_known():
    state = progress_table.State(Clock())
    state.plan(planned())
    assert state.left() is None


def test_a_long_sweep_shows_the_arms_around_the_one_in_hand():
    state, text = progress_table.State(Clock()), io.StringIO()
    cfgs = [RunConfig(gate=GateConfig("varH"), threshold=float(tau)) for tau in range(1, 40)]
    plan = planning.plan(cfgs)
    state.plan(plan)
    for chosen in plan.points[:20]:
        state.arms[chosen.key].state = "done"
    state.measuring(plan.points[20])
    from rich.console import Console

    Console(file=text, width=100).print(progress_table.draw(state, "a.log", 100))
    assert "varH ≤ 20" in text.getvalue() and "varH ≤ 39" not in text.getvalue()
    assert "(28 more)" in text.getvalue()
    assert len(text.getvalue().splitlines()) < 20


def test_a_long_count_in_a_pipe_is_spoken_of_now_and_then():
    text, clock = io.StringIO(), Clock()
    screen = working.Screen(text, Path("a.log"), in_place=False)
    screen.state.clock = clock
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
    assert screen.state.counts == {}


def test_durations():
    found = [progress_table.duration(seconds) for seconds in (0.4, 59, 61, 3700)]
    assert found == ["0 s", "59 s", "1 min 1 s", "1 h 1 min"]


def test_the_last_lines_of_a_log(tmp_path):
    log = tmp_path / "a.log"
    log.write_text("one\n\ntwo\rthree\n  \nfour\n")
    assert last_lines(log, 2) == ["three", "four"]
    assert last_lines(tmp_path / "gone.log", 2) == []


def test_a_pipe_is_told_what_is_being_done_whenever_nothing_was_said(monkeypatch):
    monkeypatch.setattr(working, "QUIET", 0.01)
    text, plan = io.StringIO(), planned()
    screen = working.Screen(text, None, in_place=False)
    screen.state.clock = Clock()
    screen.open()
    screen.planned(plan)
    try:
        for begin, line in (
            (lambda: screen.starting("baseline"), "starting an engine: baseline, "),
            (lambda: (screen.started(), screen.measuring(plan.points[0])), "measuring baseline: warm-up, "),
            (lambda: screen("repeats", 2, 5), "measuring baseline: 2 of 5 repeats, "),
        ):
            begin()
            seen = len(text.getvalue())
            while f"{line}0 s so far\n" not in text.getvalue()[seen:]:
                time.sleep(0.005)
    finally:
        screen.close(keep=False)
    assert text.getvalue().count("\nmeasuring baseline\n") == 1  # as that part begins
    time.sleep(0.03)
    said = text.getvalue()
    time.sleep(0.05)
    assert text.getvalue() == said  # a closed screen is silent


def test_warming_up_is_no_repeat():
    state = progress_table.State(Clock())
    plan = planned()
    state.plan(plan)
    state.measuring(plan.points[0])
    state.count("warm-up", 1, 1)
    assert progress_table._repeats(state.arms[plan.points[0].key]) == "warm-up"
    state.count("repeats", 1, 3)
    assert progress_table._repeats(state.arms[plan.points[0].key]) == "1 of 3"
