"""The process `selfspec`: its stdout carries results only; what vLLM and its libraries print goes to stderr, and while
a command works to a log file (`commands/working.py`)."""

from __future__ import annotations

import os
import sys
import warnings


def main() -> None:
    """Run the command line and exit with its code."""
    # Before vLLM is imported, here or in a worker. A user's own setting wins.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")  # vLLM's to mend, nothing to tell a user
    reserve_stdout()
    try:
        from selfspec_cli.commands.app import app
    except ModuleNotFoundError as error:
        from selfspec_cli.extras import remedy

        message = remedy(error)
        if message is None:
            raise
        print(f"selfspec: the command line measures and fits; serving needs only vLLM. {message}", file=sys.stderr)
        sys.exit(2)
    app(prog_name="selfspec")


def reserve_stdout() -> None:
    """Keep the real stdout for `sys.stdout` alone; file descriptor 1, which C libraries and children use, is stderr."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, buffering=1)
    os.dup2(2, 1)


if __name__ == "__main__":
    main()
