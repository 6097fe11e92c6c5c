"""How long work says where it is, so that stages know nothing of terminals."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selfspec_cli.record.point import Point
    from selfspec_cli.stages.plan import Plan, Planned


class Progress:
    """What work reports while it goes on. This one shows nothing; a command's screen is a subclass."""

    def __call__(self, what: str, done: int, total: int) -> None:
        """`done` of `total` of what is called `what`; it is over when done reaches total."""

    def ended(self, what: str, done: int, total: int) -> None:
        """It is over with `done` of `total`, which may be fewer."""

    def planned(self, plan: Plan) -> None:
        """A sweep begins with these points."""

    def starting(self, what: str) -> None:
        """An engine starts; what: for which model and arm."""

    def started(self) -> None:
        """It has started, or could not."""

    def measuring(self, planned: Planned) -> None:
        """The next point of the sweep is in hand."""

    def busy(self, others: float) -> None:
        """Other programs have so large a share of the processor, 0 to 1, that times will not be trusted."""

    def measured(self, point: Point) -> None:
        """It has been written down, measured or failed."""

    def failed(self, what: str, reason: str) -> None:
        """Work goes on without it, for that reason; an engine in a process of its own gives the reason in its log."""


ignore = Progress()  # shows nothing
