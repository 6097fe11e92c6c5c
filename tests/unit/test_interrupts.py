# ruff: noqa: PT012  (what is raised after an interrupt is raised somewhere in the block: that is the point)
import os
import signal
import threading
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
