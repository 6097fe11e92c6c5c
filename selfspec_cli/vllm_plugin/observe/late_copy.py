"""Numbers that a device counts, on the host, without the host ever waiting for the device."""

import time

import torch
from torch import Tensor

EVERY = 0.5
"""Seconds between two copies. One is a single small transfer in the stream of the work that counts."""


class LateCopy:
    """A tensor's values as they were a moment ago."""

    def __init__(self, source: Tensor, every: float = EVERY) -> None:
        self._source, self._every = source, every
        on_gpu = source.is_cuda
        self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=on_gpu)
        self._done = torch.cuda.Event() if on_gpu else None
        self._under_way, self._next = False, -float("inf")

    def read(self) -> list[int] | None:
        """The values of a copy that has arrived since the last call, None if none has; begins the next one."""
        values = None
        if self._under_way and (self._done is None or self._done.query()):
            values, self._under_way = self._host.tolist(), False
        now = time.monotonic()
        if not self._under_way and now >= self._next:
            with torch.inference_mode():  # the first read may come from inside of it and others from outside
                self._host.copy_(self._source, non_blocking=True)
            if self._done is not None:
                self._done.record()
            self._under_way, self._next = True, now + self._every
        return values
