"""How a file of settings and overrides become a gateway's settings, every key known and every value checked."""

import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from selfspec_cli.config.choices import GATEWAY, conf_dirs
from selfspec_cli.config.paths import read_yaml
from selfspec_cli.config.schema import ConfigError
from selfspec_cli.early_exit.errors import closest
from selfspec_cli.gateway.backends import BACKENDS
from selfspec_cli.gateway.limits import digest_of, is_digest
from selfspec_cli.gateway.policies import POLICIES
from selfspec_cli.gateway.settings import GatewaySettings, checked


def load(name: str | None, overrides: Sequence[str] = ()) -> GatewaySettings:
    """The gateway that a file describes, with overrides KEY=VALUE such as policy=fixed or limits.at_once=2. name: a
    file, or the name of one in conf/gateway/ or ./conf/gateway/; None begins with the defaults. Raises ConfigError: no
    such file, key or value."""
    keys = [column.name for column in fields(GatewaySettings)]
    content = {} if name is None else read_yaml(_file(name), keys)
    for word in overrides:
        key, separator, text = word.partition("=")
        if not separator:
            raise ConfigError(f"{word}: write KEY=VALUE, such as policy=round_robin")
        try:
            _put(content, key.split("."), yaml.safe_load(text), word)
        except yaml.YAMLError as error:
            raise ConfigError(f"{word}: {' '.join(str(error).split())}") from error
    settings: GatewaySettings = checked(GatewaySettings, content, "")
    check(settings)
    return settings


def choices() -> dict[str, Path]:
    """The named gateways: a user's own first."""
    files = [file for folder in reversed(conf_dirs()) for file in sorted((folder / GATEWAY).glob("*.yaml"))]
    return {file.stem: file for file in files}


def check(settings: GatewaySettings) -> None:
    """Raises ConfigError for what a gateway cannot begin with."""
    if not settings.backends:
        raise ConfigError("backends: a gateway needs one at least; selfspec gateway demo begins without a file")
    names = [backend.name for backend in settings.backends]
    for place, backend in enumerate(settings.backends):
        if not backend.name or names.count(backend.name) > 1:
            raise ConfigError(f"backends.{place}.name={backend.name!r}: each backend needs a name of its own")
        BACKENDS[backend.kind].check(backend)
        if backend.key_env is not None and not os.environ.get(backend.key_env):
            raise ConfigError(f"backends.{place}.key_env={backend.key_env}: that environment variable is not set")
    POLICIES[settings.policy].settings({}, settings.workers)
    limited = {"limits": settings.limits.at_once} | {f"backends.{one.name}": one.at_once for one in settings.backends}
    for where, most in limited.items():
        if most is not None and most < settings.workers:
            raise ConfigError(f"{where}.at_once={most}: {settings.workers} or more, a share for each worker")
    for policy in (settings.policy, *settings.policy_options):
        named = getattr(POLICIES[policy].settings(settings.policy_options), "backend", "")
        if named not in ("", *names):
            raise ConfigError(closest(named, names, f"policy_options.{policy}.backend"))
    for place, key in enumerate(settings.keys):
        if not key.name or not key.key:
            raise ConfigError(f"keys.{place}: give name, and key: a variable that holds it, or its SHA-256")
        if not is_digest(key.key) and not os.environ.get(key.key):
            said = "that environment variable is not set, and it is no SHA-256, which has 64 hexadecimal digits"
            raise ConfigError(f"keys.{place}.key={key.key}: {said}")
    if len(settings.tls) not in (0, 2) or not all(os.access(file, os.R_OK) for file in settings.tls):
        raise ConfigError(f"tls={settings.tls}: give two files that can be read, the certificate and its key")
    digests = [digest_of(key) for key in settings.keys]
    for place, digest in enumerate(digests):
        if digest in digests[:place]:
            raise ConfigError(f"keys.{place}: the same key as keys.{digests.index(digest)}: whose limits hold?")


def _file(name: str) -> Path:
    path, found = Path(name).expanduser(), choices()
    if path.suffix not in (".yaml", ".yml"):
        if name not in found:
            raise ConfigError(closest(name, found, "gateway") + "; or give a file: NAME.yaml")
        return found[name]
    if not path.exists():
        allowed = f"a file NAME.yaml, or one of {', '.join(found)}"
        raise ConfigError(f"{path}: there is no such file; allowed: {allowed}")
    return path


def _put(content: Any, place: list[str], value: Any, word: str, before: str = "") -> None:
    """Set a value at a dotted place; a number picks an item of a list. before: the place of `content`, with a dot."""
    part, *rest = place
    if not isinstance(content, (dict, list)):
        raise ConfigError(f"{word}: {before.removesuffix('.')} is {content!r}, which has no {part!r}")
    key: Any = _index(content, part, word) if isinstance(content, list) else part
    if not rest:
        content[key] = value
        return
    if isinstance(content, dict) and not isinstance(content.get(part), (dict, list)):
        content[part] = [] if rest[0].isdigit() else {}
    _put(content[key], rest, value, word, f"{before}{part}.")


def _index(content: list[Any], part: str, word: str) -> int:
    """The place of an item by its number or its name; one more than there are adds an item."""
    names = [one.get("name") for one in content if isinstance(one, dict)]
    index = names.index(part) if part in names else int(part) if part.isdigit() else -1
    if not 0 <= index <= len(content):
        raise ConfigError(f"{word}: there is no item {part!r}; allowed: {', '.join(map(str, names)) or 'none yet'}")
    if index == len(content):
        content.append({})
    return index
