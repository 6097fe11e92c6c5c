"""Programs that some tests need beside the virtual environment: whether they are here, and how they are installed.

    python tests/programs.py    installs what is missing, where this machine can (make programs)

A test that needs one is marked `needs(NAME, ...)`. `tests/summary.py` fails a run in which such a test was skipped on a
machine that could have installed it.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BROWSER = ROOT / ".browser"
AXE = BROWSER / "node_modules" / "axe-core" / "axe.min.js"


def chromium() -> str | None:
    """Path of the browser."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@dataclass(frozen=True)
class Program:
    """here: is it installed? manager: the program that installs it, as `arguments`; as_root: only for root."""

    here: Callable[[], bool]
    manager: str
    arguments: tuple[str, ...]
    as_root: bool = False

    def installable(self) -> bool:
        """Whether this machine could install it."""
        return shutil.which(self.manager) is not None and (not self.as_root or os.geteuid() == 0)


def _debian(package: str, here: Callable[[], bool]) -> Program:
    return Program(here, "apt-get", ("install", "-y", "--no-install-recommends", package), as_root=True)


PROGRAMS = {
    "chromium": _debian("chromium", lambda: chromium() is not None),
    "chromedriver": _debian("chromium-driver", lambda: shutil.which("chromedriver") is not None),
    "prometheus": _debian("prometheus", lambda: shutil.which("prometheus") is not None),
    "promtool": _debian("prometheus", lambda: shutil.which("promtool") is not None),
    "g++": _debian("g++", lambda: shutil.which("g++") is not None),
    "zsh": _debian("zsh", lambda: shutil.which("zsh") is not None),
    "fish": _debian("fish", lambda: shutil.which("fish") is not None),
    "axe-core": Program(
        AXE.is_file, "npm", ("install", "--prefix", str(BROWSER), "--no-save", "--no-audit", "--no-fund", "axe-core@4")
    ),
}


def missing(*names: str) -> list[str]:
    """Those of `names`, or of all programs, that are not installed."""
    return [name for name in names or PROGRAMS if not PROGRAMS[name].here()]


def reason(names: Sequence[str]) -> str:
    """Why a test is skipped; `named_in` reads it."""
    return f"not installed: {', '.join(names)}; make programs installs them"


def named_in(text: str) -> list[str]:
    """The programs of which a skipped test's reason says that they are not installed."""
    before, found, names = text.partition("not installed: ")
    return names.partition(";")[0].split(", ") if found and not before.strip() else []


def needs(*names: str):
    """The mark of tests that are skipped where one of these programs is missing."""
    import pytest

    without = missing(*names)
    return pytest.mark.skipif(bool(without), reason=reason(without))


def main() -> int:
    """Install what is missing and can be installed. Fails where that fails."""
    wanted = [name for name in missing() if PROGRAMS[name].installable()]
    if any(PROGRAMS[name].manager == "apt-get" for name in wanted):
        subprocess.run(["apt-get", "update"], check=True)
    for name in wanted:
        program = PROGRAMS[name]
        if not program.here():  # one package may bring two programs
            subprocess.run([program.manager, *program.arguments], check=True)
    for name in missing():
        print(f"{name} is missing, and this machine cannot install it: tests that need it are skipped", file=sys.stderr)
    return int(any(PROGRAMS[name].installable() for name in missing()))


if __name__ == "__main__":
    sys.exit(main())
