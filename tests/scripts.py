"""Modules of folders that are no packages: scripts of experiments/ and docs/generate/."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType


@contextmanager
def importable(folder: Path) -> Iterator[Callable[[str], ModuleType]]:
    """What imports a module of `folder` by its name; modules beside it can be imported meanwhile, too."""
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(folder))
