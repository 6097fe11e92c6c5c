"""A command in a pseudo-terminal: what it writes there, and what its user sees."""

import re

import pytest

pexpect = pytest.importorskip("pexpect")
pyte = pytest.importorskip("pyte")

ROWS = 40


class Terminal:
    """raw: everything written. seen: what the user saw after each write, and before a picture was erased."""

    def __init__(self, command, folder, columns, environment, timeout=120):
        # pytest-xdist sets COLUMNS in its workers, which counts for more than the size of the terminal.
        environment = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}
        self.child = pexpect.spawn(
            command[0], command[1:], cwd=str(folder), env=environment, timeout=timeout, dimensions=(ROWS, columns)
        )
        self.screen, self.raw, self.seen = pyte.Screen(columns, ROWS), "", []
        self.stream = pyte.Stream(self.screen)

    def read(self, until=None):
        """Read to the end of the command, or until its user has seen `until`."""
        while True:
            try:
                text = self.child.read_nonblocking(4096, timeout=self.child.timeout).decode(errors="replace")
            except pexpect.EOF:
                self.child.close()
                assert until is None, self.last
                return self
            self.raw += text
            for part in re.split(r"(?=\r\x1b\[2K)", text):  # each picture begins by erasing the one before
                self.stream.feed(part)
                self.seen.append("\n".join(line.rstrip() for line in self.screen.display).rstrip())
            if until is not None and any(until in seen for seen in self.seen):
                return self

    @property
    def last(self):
        """What the user sees now."""
        return self.seen[-1] if self.seen else ""
