"""The log of requests: one JSON object a line, appended in whole lines; and what went wrong in the gateway itself."""

from __future__ import annotations

import os
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from selfspec_cli.gateway import packed

FILE = "requests.jsonl"


class RequestLog:
    """Rows are written by a thread, so that a slow disk delays no token. text: what was asked is in it; otherwise its
    hash."""

    def __init__(self, file: Path, text: bool = False) -> None:
        self.file, self.text = file, text
        self._thread = ThreadPoolExecutor(1, "log")
        self._fails = False
        file.parent.mkdir(parents=True, exist_ok=True)

    def add(self, row: dict[str, Any]) -> None:
        """A request has ended."""
        self._thread.submit(self._append, packed.dumps(row) + b"\n")

    def fault(self, error: BaseException) -> None:
        """An error of the gateway's own, for whoever runs it."""
        print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)

    def write(self) -> None:
        """Wait until every row is in the file."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Write what is left."""
        self._thread.shutdown()

    def _append(self, line: bytes) -> None:
        """In one write: lines of several processes do not mix."""
        try:
            handle = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(handle, line)
            finally:
                os.close(handle)
        except OSError as error:  # a full disk ends the log, not the gateway
            if not self._fails:
                self.fault(error)
            self._fails = True
        else:
            self._fails = False
