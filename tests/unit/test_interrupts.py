# ruff: noqa: PT012  (what is raised after an interrupt is raised somewhere in the block: that is the point)
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import nullcontext, suppress

import pytest

from selfspec_cli import interrupts


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_waits_for_a_safe_place_and_is_not_lost_in_a_callback(capfd):
    """Without `deferred` the KeyboardInterrupt is raised inside the callback, printed and dropped."""

    class Thing:
        pass

    reached = []
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        thing = Thing()
        watched = weakref.ref(thing, lambda _: interrupt())
        del thing
        assert watched() is None
        reached.append("after the callback")
        interrupts.check()
        reached.append("after the check")
    assert reached == ["after the callback"]
    stderr = capfd.readouterr().err
    assert "press Ctrl-C again" in stderr
    assert "Exception ignored" not in stderr
    interrupts.check()  # it has ended the block, once


def test_one_that_is_swallowed_comes_back_at_the_next_safe_place():
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        interrupt()
        with suppress(KeyboardInterrupt):
            interrupts.check()
        interrupts.check()
        pytest.fail("the interrupt was lost")


@pytest.mark.parametrize("ignored", [False, True], ids=["", "where a shell ignores SIGINT"])
def test_sigterm_is_ctrl_c(ignored):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if ignored else signal.getsignal(signal.SIGINT)
    reached = []
    try:
        with pytest.raises(KeyboardInterrupt), interrupts.by_sigterm(), interrupts.deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            reached.append("it waits for a safe place")
            interrupts.check()
            reached.append("behind the safe place")
        with pytest.raises(KeyboardInterrupt), interrupts.by_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)
            reached.append("behind it where nothing waits")
    finally:
        signal.signal(signal.SIGINT, before)
    assert reached == ["it waits for a safe place"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_that_is_somebody_elses_stays_theirs():
    got = []
    before = signal.signal(signal.SIGTERM, lambda *_: got.append("theirs"))
    try:
        with interrupts.by_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert got == ["theirs"]


def test_a_second_one_does_not_wait():
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        interrupt()
        interrupt()
        pytest.fail("the second interrupt waited")


def test_blocks_may_nest_and_leave_the_handler_as_it_was():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        with interrupts.deferred():
            interrupt()
        pytest.fail("the inner block ended without raising")
    assert signal.getsignal(signal.SIGINT) is before
    with interrupts.deferred():
        pass
    assert signal.getsignal(signal.SIGINT) is before


def test_what_fails_because_of_an_interrupt_is_the_interrupt():
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        interrupt()
        raise RuntimeError("the engine core is dead")
    with pytest.raises(RuntimeError), interrupts.deferred():
        raise RuntimeError("of itself")


def test_while_an_engine_starts_an_interrupt_does_not_wait():
    with pytest.raises(KeyboardInterrupt), interrupts.deferred(), interrupts.at_once():
        interrupt()
        pytest.fail("it waited")
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        with interrupts.at_once():
            pass
        interrupt()  # outside it waits again
        interrupts.check()
        pytest.fail("it was lost")


def test_no_engine_starts_after_an_interrupt():
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        interrupt()  # as one that comes while the last engine is closed
        with interrupts.at_once():
            pytest.fail("an engine was started")


@pytest.mark.parametrize("around", [interrupts.deferred, nullcontext], ids=["in a sweep", "alone"])
def test_one_is_not_lost_to_who_drops_keyboard_interrupts_as_vllm_does_while_an_engine_starts(around):
    with pytest.raises(KeyboardInterrupt), around(), interrupts.at_once():
        with suppress(KeyboardInterrupt):
            interrupt()
        pytest.fail("it was lost")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_one_that_is_dropped_while_an_engine_starts_comes_back_after_it():
    with pytest.raises(KeyboardInterrupt), interrupts.at_once():
        thing = threading.Event()
        watched = weakref.ref(thing, lambda _: interrupt())
        del thing
        assert watched() is None


def test_outside_the_main_thread_nothing_changes():
    seen = []

    def work():
        with interrupts.deferred():
            seen.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert seen == [before]


@pytest.mark.slow
def test_a_sweep_ends_after_one_interrupt_wherever_it_comes(tmp_path):
    """A process that sweeps over fake engines and spends its time in weak references' callbacks."""
    code = f"""
import sys, time, weakref
from itertools import count
sys.path.insert(0, {os.path.dirname(__file__)!r})
from contextlib import nullcontext
from points import measured
from selfspec_cli.config.schema import GateConfig, RunConfig
from selfspec_cli.stages import sweep
from selfspec_cli import interrupts

class Engine:
    def set_gate(self, *words): pass

class Thing: pass

def bench(cfg, engine, progress):
    for _ in count() if cfg.threshold else range(20):  # the third point is in hand until the signal comes
        thing = Thing()
        ref = weakref.ref(thing, lambda _: time.sleep(0.01))
        del thing
        interrupts.check()
    print(cfg.threshold, flush=True)
    return measured(100.0, 101.0, 99.0)

cfgs = [RunConfig(gate=GateConfig("varH"), threshold=t / 10, results_dir={str(tmp_path)!r}) for t in range(60)]
try:
    sweep.run(cfgs, open_engine=lambda cfg: nullcontext(Engine()), bench=bench)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as other:
        assert other.stdout.readline()  # the baseline
        other.stdout.readline()
        time.sleep(0.05)
        other.send_signal(signal.SIGINT)
        assert other.stdout.read().split() == ["interrupted"]
        assert "Exception ignored" not in other.stderr.read()
