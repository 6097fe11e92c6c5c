"""Putting something in the place of an attribute, and taking it out again."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

FAULTS_FOLDER = Path(__file__).parents[2] / "tests" / "packages" / "faults"
"""Of the faults that `--plant` plants, which a checkout has and the wheel has not."""
Undo = Callable[[], None]
Function = Callable[..., Any]


def around(function: Function) -> Callable[[Function], Function]:
    """`function(original, *arguments)` as what makes a replacement of vLLM's `original`, called with `arguments`."""

    @functools.wraps(function)
    def make(original: Function) -> Function:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        return replacement

    return make


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


def around_object(function: Function) -> Callable[[Any], Any]:
    """As `around`, for what is called and is no function, such as a sampler or a module: its attributes stay."""
    return lambda original: _Wrapped(original, functools.partial(function, original))


class _Wrapped:
    """Calls go to `call`, attributes are the original's."""

    def __init__(self, original: Any, call: Callable[..., Any]) -> None:
        self._original, self._call = original, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)
