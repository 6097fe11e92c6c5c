"""What a policy is: a name, options with their defaults, and what makes the chooser that routes requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.early_exit.errors import closest
from selfspec_cli.gateway.asked import Asked
from selfspec_cli.gateway.replica import Replica
from selfspec_cli.gateway.settings import SloSettings
from selfspec_cli.gateway.timing import Prediction


def words_for(kind: type) -> str:
    """What a value of a type is called in a message."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a mapping"}
    return words.get(kind, kind.__name__)


@dataclass(frozen=True)
class Choice:
    """Backends in the order in which they are tried, and why the first one is first, in few fixed words (a label).

    sure: an answer of which its backend is less sure (`cascade.sureness`) is asked of the next one; None takes any.
    """

    order: tuple[Replica, ...]
    reason: str
    expected: Prediction | None = None
    sure: float | None = None


@dataclass(frozen=True)
class Ended:
    """How a request ended. tokens: of the answer. quality: 0 to 1, where somebody judged it."""

    replica: Replica
    tokens: int | None
    seconds: float
    cost: float
    quality: float | None = None


class Chooser:
    """Routes requests; made once for a gateway, so that it may remember."""

    def choose(self, asked: Asked, replicas: Sequence[Replica]) -> Choice:
        """replicas: those that serve the model and take requests now, in the order of the settings; not empty."""
        raise NotImplementedError

    def learn(self, asked: Asked, ended: Ended) -> None:
        """A request ended well, or its answer was judged."""


@dataclass(frozen=True)
class Policy:
    """An object of the registry. options: names and defaults; make: from options and limits to a chooser."""

    name: str
    help: str
    make: Callable[[Mapping[str, Any], SloSettings], Chooser]
    options: Mapping[str, Any] = field(default_factory=dict)

    def check(self, given: Mapping[str, Any]) -> None:
        """Raises ConfigError for an option that there is not, or one of another type."""
        for name, value in given.items():
            if name not in self.options:
                raise ConfigError(closest(name, self.options, f"option of policy {self.name}")
                                  if self.options else f"policy {self.name} takes no option {name!r}")  # fmt: skip
            default = self.options[name]
            kinds = (int, float) if isinstance(default, float) else type(default)
            if not isinstance(value, kinds) or isinstance(value, bool) != isinstance(default, bool):
                raise ConfigError(f"policy_options.{self.name}.{name}={value!r}: {words_for(type(default))} is needed")

    def chooser(self, given: Mapping[str, Any], slo: SloSettings) -> Chooser:
        """A chooser with the options that were given, and the defaults for the others."""
        self.check(given)
        return self.make({**self.options, **given}, slo)


def fewest_first(replicas: Sequence[Replica]) -> list[Replica]:
    """Those with the fewest requests first; of equals, in the order of the settings."""
    return sorted(replicas, key=lambda replica: replica.running())
