"""Which extra of this package brings a module; `pip install selfspec` alone brings what serving needs."""

from __future__ import annotations

EXTRAS = {
    "bench": (
        "altair", "hydra", "itables", "jinja2", "joblib", "numpy", "omegaconf", "optuna", "pandas", "rich", "scipy",
        "sklearn", "tabulate", "typer", "vl_convert", "yaml",
    ),
    "data": ("datasets",),
    "track": ("wandb",),
    "eval": ("lm_eval",),
    "load": ("locust",),
    "gateway": (
        "aiohttp", "fastapi", "httptools", "opentelemetry", "orjson", "prometheus_client", "uvicorn", "uvloop",
    ),
}  # fmt: skip
"""Extra -> modules, by the names under which they are imported."""
FROM_VLLM = ("torch", "transformers", "triton", "vllm")


def remedy(error: ModuleNotFoundError) -> str | None:
    """What to install where `error` was raised for a module of an extra; None for any other module."""
    module = (error.name or "").partition(".")[0]
    if module in FROM_VLLM:
        return f"{module} is not installed: pip install 'selfspec[cuda]' for NVIDIA GPUs, 'selfspec[cpu]' for CPUs"
    extra = next((name for name, modules in EXTRAS.items() if module in modules), None)
    return None if extra is None else f"{module} is not installed: pip install 'selfspec[{extra}]'"
