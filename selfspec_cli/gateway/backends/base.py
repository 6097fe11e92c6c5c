"""What a kind of backend is: how its settings are checked, what is started for it, and what it understands."""

import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.gateway.settings import BackendSettings


def need_address(settings: BackendSettings, key: str, url: str | None, query: bool = False) -> None:
    """Raises ConfigError for what is no address that requests can be sent to. query: it may have one."""
    with suppress(ValueError):  # of a port that there is not
        parts = urlsplit(url or "")
        fine = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        if fine and not ((parts.query and not query) or parts.fragment or parts.username):
            return
    said = f"{key}={url!r}: write http://HOST:PORT, without a query, and without a key, which key_env names"
    raise ConfigError(f"backend {settings.name}: {said}")


def without_v1(url: str) -> str:
    """An address without the API's /v1."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def check_use(settings: BackendSettings, *used: str) -> None:
    """Raises ConfigError for a setting that its kind of backend does not use."""
    for name in ("words", "environment", "prefill"):
        if name not in used and getattr(settings, name):
            allowed = f"of words, environment and prefill it uses {', '.join(used) or 'none of these'}"
            said = f"{name}={getattr(settings, name)!r}: kind {settings.kind} does not use it; {allowed}"
            raise ConfigError(f"backend {settings.name}: {said}")


@dataclass(frozen=True)
class BackendKind:
    """An object of the registry. check: raises ConfigError for settings that it cannot begin with. command: the words
    that start its server on a port of this machine; None where nothing is started. vllm: it answers as vLLM does: token
    ids, priorities, /metrics, `vllm_xargs`. changes_weights: its answers are not those of the unchanged model. before:
    (client, backend, path, body) -> body, before a request is sent there."""

    name: str
    help: str
    check: Callable[[BackendSettings], None]
    command: Callable[[BackendSettings, int], list[str]] | None = None
    vllm: bool = True
    changes_weights: bool = False
    before: Callable[[Any, Any, str, dict[str, Any]], Awaitable[dict[str, Any]]] | None = None


def serve_command(settings: BackendSettings, port: int) -> list[str]:
    """`selfspec serve` with the words of a backend, on a port of this machine."""
    words, options = split(settings.words)
    here = ["--host", "127.0.0.1", "--port", str(port)]
    return [sys.executable, "-m", "selfspec_cli", "serve", *words, "--", *here, *options]


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """(words of `selfspec serve`, options of vLLM's server, which stand after `--`)."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def check_serve(settings: BackendSettings) -> None:
    """Raises ConfigError for words that are no settings; `selfspec serve` checks them in full when it starts."""
    check_use(settings, "words", "environment")
    if settings.url is not None:
        need_address(settings, "url", settings.url)
    wrong = [word for word in split(settings.words)[0] if "=" not in word]
    if wrong:
        raise ConfigError(f"backend {settings.name}: words={wrong[0]!r}: write KEY=VALUE, as for selfspec serve")
    if settings.url is None and not settings.words:
        raise ConfigError(f"backend {settings.name}: give url, or words for selfspec serve, such as [layer=3, k=4]")


def log_of(settings: BackendSettings, folder: Path) -> Path:
    return folder / f"backend-{settings.name}.log"
