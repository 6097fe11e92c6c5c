"""`from selfspec_cli.vllm_plugin import vllm_names as vllm`, and `vllm.NAME`: the names of vLLM that the plugin uses.

The plugin has them from here and nowhere else, and releases/seams.toml has the module of each, so that a name that
moves is looked up in one place. Nothing of vLLM is imported before a name is asked for; a module that subclasses vLLM's
classes, or asks in each step, imports the names themselves. Names of modules that are only compared, or looked up in
`sys.modules`, stay where they are used (worker.WORKERS)."""

import importlib
import tomllib
from pathlib import Path
from typing import Any

SEAMS: dict[str, dict[str, str]] = tomllib.loads(
    (Path(__file__).parent / "releases" / "seams.toml").read_text(encoding="utf-8")
)
"""Tables by name: module or target -> names, separated by spaces."""
PLACES = {name: f"{module}:{name}" for module, names in SEAMS["imports"].items() for name in names.split()}
"""Name -> "module:name"."""


def __getattr__(name: str) -> Any:
    """vLLM's object."""
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = PLACES[name].partition(":")[0]
    owner = importlib.import_module(module)
    return getattr(owner, name) if hasattr(owner, name) else importlib.import_module(f"{module}.{name}")
