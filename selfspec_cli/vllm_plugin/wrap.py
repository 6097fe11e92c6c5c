"""Putting something in the place of an attribute, and taking it out again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

FAULTS_FOLDER = Path(__file__).parents[2] / "tests" / "packages" / "faults"
"""Of the faults that `--plant` plants, which a checkout has and the wheel has not."""
Undo = Callable[[], None]


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> Undo:
    """owner.name becomes make(owner.name); the function returned takes it back."""
    original, own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, make(original))

    def undo() -> None:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)

    return undo


class Wrapped:
    """In place of a sampler or a module: calls go to `call`, attributes are the original's."""

    def __init__(self, original: Any, call: Callable[..., Any]) -> None:
        self._original, self._call = original, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)
