"""One Ctrl-C ends a command, wherever it arrives."""

import signal
import subprocess
import sys
import weakref

import pytest

from selfspec_cli import interrupts
from selfspec_cli.commands.screen import INTERRUPTED


class Thing:
    pass


def press_where_nobody_can_hear():
    """Ctrl-C inside a weak reference's callback: Python prints the exception and goes on."""
    thing = Thing()
    reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
    del thing
    return reference


def run(*steps):
    """The names of the steps that were reached, and whether the command was interrupted."""
    reached = []
    try:
        with interrupts.watched():
            for step in steps:
                step()
                reached.append(step.__name__)
    except KeyboardInterrupt:
        return reached, True
    return reached, False


def press():
    signal.raise_signal(signal.SIGINT)


def measure():
    """A stage at work: it asks at its safe places."""
    interrupts.check()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_python_loses_is_raised_at_the_next_safe_place_once():
    assert run(measure, press_where_nobody_can_hear, measure) == (["measure", "press_where_nobody_can_hear"], True)
    assert run(measure) == (["measure"], False)  # the next command of this process


def test_an_interrupt_that_is_not_lost_is_raised_where_it_arrives():
    assert run(measure, press, measure) == (["measure"], True)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_belongs_together_is_finished_first():
    written = []

    def save():
        with interrupts.held(), interrupts.held():
            press()
            written.append("the other half")

    assert run(save, measure) == ([], True)
    assert written == ["the other half"]


COMMAND = """
import signal, sys, weakref
from selfspec_cli import interrupts
from selfspec_cli.commands import screen
class Thing: pass
def main():
    with screen.guard(False, False):
        thing = Thing()
        reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
        del thing
        for point in range(3):
            interrupts.check()  # as Engine.generate does before each of vLLM's steps
            print("measured", point)
try:
    main()
except BaseException as error:
    sys.exit(getattr(error, "exit_code", 99))
"""


def test_a_command_ends_with_130_and_measures_nothing_more():
    done = subprocess.run([sys.executable, "-c", COMMAND], capture_output=True, text=True, check=False)
    assert done.returncode == INTERRUPTED
    assert "Exception ignored" in done.stderr  # so the exception itself was lost
    assert "interrupted;" in done.stderr
    assert "measured" not in done.stdout
