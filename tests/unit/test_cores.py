"""How much of the processor a command had, and how much others had."""

import os
import shutil
import subprocess
import sys

import pytest

from selfspec_cli.stages import cores
from selfspec_cli.stages.cores import Moment

HERTZ = os.sysconf("SC_CLK_TCK")


def machine(proc, stat, processes):
    """A /proc. processes: number -> (parent, user, system, user and system of its children that have ended)."""
    proc.mkdir(exist_ok=True)
    (proc / "stat").write_text(stat)
    for number, (parent, *ticks) in processes.items():
        (proc / str(number)).mkdir(exist_ok=True)
        before = "0 " * 9
        (proc / str(number) / "stat").write_text(
            f"{number} (a) b) R {parent} {before}{' '.join(map(str, ticks))} 20 0\n"
        )


def test_what_neither_this_command_nor_its_children_used_others_had(tmp_path, monkeypatch):
    monkeypatch.setattr(cores, "PROC", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 2})
    me = os.getpid()
    family = {me: (1, 5, 5, 0, 0), me + 1: (me, 10, 0, 0, 0), me + 2: (me + 1, 20, 0, 0, 0), me + 3: (1, 1000, 0, 0, 0)}
    stat = "cpu 9\ncpu0 10 0 10 70 10 0 0 0 7 7\ncpu1 9 9 9 9 9 9 9 9\ncpu2 100 0 0 0 0 0 0 0\nintr 5\n"
    machine(tmp_path, stat, family)
    before = cores.now()
    assert before == Moment(200, 80, 40)
    # A child ends, and what it used is its parent's. One core has work for 50 ticks, the other for a second.
    shutil.rmtree(tmp_path / str(me + 2))
    stat = f"cpu0 60 0 10 {70 + HERTZ - 50} 10 0 0 0\ncpu1 0\ncpu2 {100 + HERTZ - 30} 0 0 0 0 0 0 30\n"
    machine(tmp_path, stat, {me + 1: (me, 60, 0, 15, 15)})
    own, others = 60, 50 + HERTZ - 60
    expected = {"cpu_own": own / (2 * HERTZ), "cpu_others": others / (2 * HERTZ)}
    assert cores.shares(before, cores.now()) == pytest.approx(expected, abs=0.001)


def test_what_is_not_known_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(cores, "PROC", tmp_path)
    assert cores.now() is None
    some = Moment(0, 0, 0)
    assert cores.shares(None, some) == cores.shares(some, None) == {}
    assert cores.shares(some, Moment(HERTZ // 4, 0, 0)) == {}  # too short
    assert cores.shares(some, Moment(100 * HERTZ, 10 * HERTZ, 91 * HERTZ))["cpu_others"] == 0.0


def test_work_of_a_process_that_was_started_is_this_commands_own():
    before = cores.now()
    assert before is not None
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"], check=True)
    assert cores.now().own - before.own >= 0.4 * HERTZ
