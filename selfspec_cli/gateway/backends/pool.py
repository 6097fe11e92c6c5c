"""Replicas of one kind behind vllm-router, which is started here; the gateway sees one backend.

The router has no /metrics of vLLM's, so what is known is measured. It is a program of an environment of its own (`pip
install vllm-router`); `words` may have program=PATH, and hold the addresses of the replicas and its options.
"""

import shutil

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.gateway.backends.base import BackendKind, check_use, need_address
from selfspec_cli.gateway.settings import BackendSettings


def _program(settings: BackendSettings) -> str:
    named = [word.removeprefix("program=") for word in settings.words if word.startswith("program=")]
    return named[0] if named else "vllm-router"


def _replicas(settings: BackendSettings) -> list[str]:
    return [word for word in settings.words if word.startswith(("http://", "https://"))]


def check(settings: BackendSettings) -> None:
    """Raises ConfigError where there is neither an address, nor a router and replicas."""
    check_use(settings, "words", "environment")
    for url in _replicas(settings):
        need_address(settings, "words", url)
    if settings.url is not None:
        return need_address(settings, "url", settings.url)
    if not _replicas(settings):
        raise ConfigError(f"backend {settings.name}: give words: [http://HOST:PORT, ...], or url of a router")
    if shutil.which(_program(settings)) is None:
        remedy = "pip install vllm-router in an environment of its own, and add program=PATH to words"
        raise ConfigError(f"backend {settings.name}: there is no program {_program(settings)!r}: {remedy}")


def command(settings: BackendSettings, port: int) -> list[str]:
    replicas = _replicas(settings)
    more = [word for word in settings.words if word not in replicas and not word.startswith("program=")]
    return [_program(settings), "--worker-urls", *replicas, "--host", "127.0.0.1", "--port", str(port), *more]


BACKEND = BackendKind("pool", "replicas of one kind behind vllm-router", check, command)
