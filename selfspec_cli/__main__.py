"""The process `selfspec`: stdout carries results only; what libraries print goes to stderr, or into a log file."""

import os
import sys


def main() -> None:
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
