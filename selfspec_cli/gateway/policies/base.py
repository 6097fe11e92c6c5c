"""What a policy is: a name, options with their defaults, and what makes the chooser that routes requests."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.gateway.replica import Replica
from selfspec_cli.gateway.request import Request
from selfspec_cli.gateway.settings import SloSettings, checked


@dataclass(frozen=True)
class Choice:
    """Backends in the order in which they are tried, and why the first one is first, in few fixed words (a label).
    sure: an answer of which its backend is less sure (`cascade.sureness`) is asked of the next one; None takes any."""

    order: tuple[Replica, ...]
    reason: str
    sure: float | None = None


class Chooser:
    """Routes requests; made once for a gateway, so that it may remember."""

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Choice:
        """replicas: those that serve the model and take requests now, in the order of the settings; not empty."""
        raise NotImplementedError

    def learn(self, request: Request, replica: Replica, quality: float) -> None:
        """An answer of this backend was judged, 0 to 1."""


@dataclass(frozen=True)
class NoOptions:
    """Of a policy that has none."""


@dataclass(frozen=True)
class Policy:
    """An object of the registry. make: from its options and the limits to a chooser. options: a dataclass of knobs.
    alone: it is of no use where each of several processes (`workers`) knows its own requests only."""

    name: str
    help: str
    make: Callable[[Any, SloSettings], Chooser]
    options: type = NoOptions
    alone: bool = False

    def settings(self, given: Mapping[str, Any], workers: int = 1) -> Any:
        """This policy's options. given: of all policies. Raises ConfigError for a wrong one, or too many workers."""
        if self.alone and workers > 1:
            raise ConfigError(f"policy={self.name}: {workers} workers cannot share what it knows: workers=1")
        return checked(self.options, given.get(self.name) or {}, f"policy_options.{self.name}.")
