"""Both orders of reading and launching, alternating, for tests of an engine's reader on a GPU and without one."""

from __future__ import annotations

from typing import Any


def alternating() -> Any:
    """Takes the place of a reader's orders: one `Order` for every load, which says another order each time that it is
    asked for one. asked: how often.

    It decides nothing by times: for that the reader would ask again, and with two questions a step every step would
    have the same order.
    """
    from selfspec_cli.vllm_plugin.v2.step_order import Order

    class ByTurns(Order):
        asked = 0

        @property
        def first(self) -> bool:
            self.asked += 1
            return self.asked % 2 == 0

        @first.setter
        def first(self, decided: bool) -> None:
            pass

        def add(self, host: float, device: float) -> None:
            pass

        def __getitem__(self, load: int) -> ByTurns:
            return self

    return ByTurns()
