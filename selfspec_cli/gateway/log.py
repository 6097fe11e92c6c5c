"""The log of requests: one JSON object a line, appended in whole lines; and what went wrong in the gateway itself."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from selfspec_cli.gateway import packed

EVERY_SECONDS = 0.25
FILE = "requests.jsonl"


class RequestLog:
    """Rows are collected, and written by a thread several times a second, so that a slow disk delays no token.

    file: None keeps no log. text: what was asked is in it; otherwise its hash.
    """

    def __init__(self, file: Path | None, text: bool = False) -> None:
        self.file, self.text = file, text
        self._rows: list[bytes] = []
        self._task: asyncio.Task[None] | None = None
        self._lock = threading.Lock()
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)

    def add(self, row: dict[str, Any]) -> None:
        """A request has ended."""
        if self.file is not None:
            self._rows.append(packed.dumps(row))

    def fault(self, error: BaseException) -> None:
        """An error of the gateway's own, for whoever runs it."""
        print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)

    def open(self) -> None:
        """Begin to write, inside a running event loop."""
        if self.file is not None:
            self._task = asyncio.ensure_future(self._write_on())

    async def close(self) -> None:
        """Write what is left."""
        if self._task is not None:
            self._task.cancel()
        try:
            self.write()
        except OSError as error:  # what is closed after it has to be closed all the same
            self.fault(error)

    def write(self) -> None:
        """Append what was collected, in one write: lines of several processes do not mix."""
        with self._lock:  # whoever comes second finds all lines of the first in the file
            rows, self._rows = self._rows, []
            if not rows or self.file is None:
                return
            handle = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(handle, b"\n".join(rows) + b"\n")
            finally:
                os.close(handle)

    async def _write_on(self) -> None:
        while True:
            await asyncio.sleep(EVERY_SECONDS)
            if self._rows:
                try:
                    await asyncio.to_thread(self.write)
                except OSError as error:  # a full disk ends the log, not the gateway
                    self.fault(error)
