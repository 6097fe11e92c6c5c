"""Replicas of one kind behind vllm-router, which is started here; the gateway sees one backend.

The router has no /metrics of vLLM's, so what is known of it is what the gateway measures. It is a program of an
environment of its own (`pip install vllm-router`): the first of `options` may name it as program=PATH.
"""

import shutil

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.gateway.backends.base import BackendKind, check_use, need_address
from selfspec_cli.gateway.settings import BackendSettings


def _program(settings: BackendSettings) -> str:
    named = [word.removeprefix("program=") for word in settings.options if word.startswith("program=")]
    return named[0] if named else "vllm-router"


def check(settings: BackendSettings) -> None:
    """Raises ConfigError where there is neither an address, nor a router and replicas."""
    check_use(settings, "replicas", "options", "environment")
    for place, url in enumerate(settings.replicas):
        need_address(settings, f"replicas.{place}", url)
    if settings.url is not None:
        return need_address(settings, "url", settings.url)
    if not settings.replicas:
        raise ConfigError(f"backend {settings.name}: give replicas: [http://HOST:PORT, ...], or url of a router")
    if shutil.which(_program(settings)) is None:
        raise ConfigError(f"backend {settings.name}: there is no program {_program(settings)!r}: pip install "
                          "vllm-router in an environment of its own, and options: [program=PATH]")  # fmt: skip


def command(settings: BackendSettings, port: int) -> list[str] | None:
    """vllm-router over the replicas."""
    more = [word for word in settings.options if not word.startswith("program=")]
    return [_program(settings), "--worker-urls", *settings.replicas, "--host", "127.0.0.1", "--port", str(port), *more]


BACKEND = BackendKind("pool", "replicas of one kind behind vllm-router", check, command)
