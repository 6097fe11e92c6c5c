"""Processes that a command starts: each in a session of its own, ended with the command, however that ends."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import BinaryIO

# The kernel sends SIGTERM to a process that has asked for it when its parent is gone, and `exec` keeps the wish. A
# process of its own asks, because Python cannot safely run between fork and exec. SIGINT, by which servers are ended,
# is ignored in what a script starts behind `&`, and by what that starts, unless it is asked for again.
_WITH_PARENT = (
    "import ctypes, os, signal, sys\n"
    "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
    "try: ctypes.CDLL(None).prctl(1, 15)\n"  # PR_SET_PDEATHSIG, SIGTERM
    "except (OSError, AttributeError): pass\n"
    "if os.getppid() != int(sys.argv[1]): sys.exit('the command that started this is gone')\n"
    "os.execvp(sys.argv[2], sys.argv[2:])"
)


def start(command: Sequence[str], out: BinaryIO, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process with output to `out`; Ctrl-C does not reach it, and it gets SIGTERM when this one is gone."""
    return subprocess.Popen(
        [sys.executable, "-c", _WITH_PARENT, str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=out,
        env=dict(environment),
        start_new_session=True,
    )


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def end(process: subprocess.Popen[bytes], wish: signal.Signals, seconds: float) -> None:
    """Ask a process to end, wait so long, then end every process of its session."""
    if process.poll() is None:
        process.send_signal(wish)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
