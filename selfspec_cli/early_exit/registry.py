"""Objects by name: those of this package's modules, and those that installed packages offer as entry points.

Free of torch, because settings are checked against these names wherever a user types them."""

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from selfspec_cli.early_exit.errors import SettingsError, closest

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """A mapping from names to objects, filled when it is first read: the object called `first`, this package's other
    objects by name, then other packages' objects by name.
    noun: what an object is called in messages. kind: the class of every object. package: every object of that class in
    one of its modules is added. group: entry points of this group add theirs, under new names. An entry point that
    cannot be loaded is left out, and asking for it by name says why."""

    def __init__(self, noun: str, kind: type[T], package: str, group: str, *, first: str | None = None) -> None:
        self.noun, self.package, self.group, self.first = noun, package, group, first
        self.kind: type[Any] = kind

    def __getitem__(self, name: str) -> T:
        """Raises SettingsError, naming the nearest, for a name that is not known or cannot be loaded."""
        if name not in self._found:
            raise SettingsError(self.broken.get(name) or closest(name, self._found, self.noun))
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    @property
    def broken(self) -> dict[str, str]:
        """Entry points that could not be used, by name, with the reason as a sentence for the user."""
        return self._loaded[1]

    @property
    def _found(self) -> dict[str, T]:
        return self._loaded[0]

    def __contains__(self, name: object) -> bool:
        return name in self._found  # Mapping's own would build the message for a missing name

    @cached_property
    def _loaded(self) -> tuple[dict[str, T], dict[str, str]]:
        built_in = sorted(self._built_in(), key=lambda thing: (thing.name != self.first, thing.name))
        objects = {thing.name: thing for thing in built_in}
        broken: dict[str, str] = {}
        for point in sorted(entry_points(group=self.group), key=lambda point: point.name):
            try:
                thing = self._load(point, objects)
            except Exception as error:  # another package's code may raise anything
                reason = f"{type(error).__name__}: {error}" if not str(error) else str(error)
                broken[point.name] = f"{self.noun} {point.name!r} of {_origin(point)} cannot be used: {reason}"
            else:
                objects[thing.name] = thing
        return objects, broken

    def _built_in(self) -> Iterator[Any]:
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__, f"{self.package}."):
            members = vars(importlib.import_module(module.name)).values()
            yield from (thing for thing in members if isinstance(thing, self.kind))

    def _load(self, point: EntryPoint, taken: Mapping[str, T]) -> Any:
        thing: Any = point.load()
        if not isinstance(thing, self.kind):
            raise TypeError(f"{point.value} is a {type(thing).__name__}, and a {self.kind.__name__} is needed")
        if thing.name != point.name:
            raise ValueError(f"the object is called {thing.name!r}; the entry point must have the same name")
        if thing.name in taken:
            raise ValueError("that name is taken")
        return thing


def _origin(point: EntryPoint) -> str:
    distribution = point.dist
    return "an installed package" if distribution is None else f"{distribution.name} {distribution.version}"
