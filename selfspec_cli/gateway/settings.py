"""What a gateway is configured with: the schema of conf/gateway/*.yaml, and how a file and overrides become one."""

from __future__ import annotations

import os
import types
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from selfspec_cli.config.choices import GATEWAY, conf_dirs
from selfspec_cli.config.schema import ConfigError
from selfspec_cli.early_exit import knobs
from selfspec_cli.early_exit.errors import closest
from selfspec_cli.early_exit.knobs import knob

CACHES = ("none", "exact", "meaning")


@dataclass
class BackendSettings:
    """One place that answers."""

    name: str = knob("", help="what routes, metrics and errors call it")
    kind: str = knob("openai", help="how it is started and asked; a name of the registry of backends")
    url: str | None = knob(None, help="its address; a server that answers there is adopted", unset="one is started")
    words: list[str] = knob(factory=list, help="of `local` and `quantised`: what `selfspec serve` is given")
    options: list[str] = knob(factory=list, help="further options of the server that is started")
    environment: dict[str, Any] = knob(
        factory=dict, help="variables of the server that is started, such as CUDA_VISIBLE_DEVICES"
    )
    replicas: list[str] = knob(factory=list, help="of `pool`: addresses of the servers behind the router")
    prefill: str | None = knob(None, help="of `split`: address of the server that prefills", unset="required there")
    model: str | None = knob(None, help="the name of the model there", unset="the first that /v1/models names")
    serves: list[str] = knob(factory=list, help="names of models that clients may use for it, besides its own")
    weights: str | None = knob(
        None, help="backends with equal weights continue each other's streams", unset="the model's name, and the kind"
    )
    key_env: str | None = knob(None, help="environment variable that holds the key for it", unset="no key is sent")
    price_in: float = knob(0.0, help="price of a million prompt tokens", unit="money", low=0)
    price_out: float = knob(0.0, help="price of a million generated tokens", unit="money", low=0)
    price_hour: float = knob(0.0, help="price of the hour of the machine, shared by the requests on it", unit="money",
                             low=0)  # fmt: skip
    at_once: int | None = knob(None, help="most requests in flight there", unit="requests", low=1, unset="no limit")
    priorities: bool = knob(False, help="the server schedules by priority (vLLM: --scheduling-policy priority)")


@dataclass
class KeySettings:
    """One client's key, and its limits."""

    name: str = knob("", help="the tenant: what logs and limits call the client")
    env: str | None = knob(None, help="environment variable that holds the key", unset="sha256 is given")
    sha256: str | None = knob(None, help="SHA-256 of the key, in hexadecimal", unset="env is given")
    requests_per_minute: int | None = knob(
        None, help="most requests a minute", unit="requests", low=1, unset="no limit"
    )
    tokens_per_minute: int | None = knob(
        None, help="most tokens a minute, prompts and answers", unit="tokens", low=1, unset="no limit"
    )
    at_once: int | None = knob(None, help="most requests at once", unit="requests", low=1, unset="no limit")
    admin: bool = knob(False, help="may look at routes and settings, drain backends, and evict cached answers")


@dataclass
class LimitSettings:
    """What nobody may exceed, and how long the gateway waits."""

    body_mib: float = knob(32.0, help="largest body of a request", unit="MiB", above=0)
    at_once: int = knob(4096, help="most requests in the gateway at once", unit="requests", low=1)
    connect_seconds: float = knob(2.0, help="to connect to a backend", unit="s", above=0)
    first_byte_seconds: float = knob(120.0, help="a backend that has sent nothing for so long has failed", unit="s",
                                     above=0)  # fmt: skip
    stall_seconds: float = knob(30.0, help="likewise between two parts of a stream", unit="s", above=0)
    attempts: int = knob(3, help="backends that are tried for one request", low=1)
    failures: int = knob(3, help="failures in a row after which a backend is left alone", low=1)
    open_seconds: float = knob(5.0, help="for so long, before one request tries it", unit="s", above=0)
    poll_seconds: float = knob(1.0, help="between two looks at a backend's /health and /metrics", unit="s", above=0)
    drain_seconds: float = knob(30.0, help="for requests in flight to end when the gateway ends", unit="s", low=0)


@dataclass
class SloSettings:
    """What `cheapest_within_slo` and `sticky_until_saturated` are held to."""

    ttft_ms: float = knob(1000.0, help="time to first token that is tolerated", unit="ms", above=0)
    tpot_ms: float = knob(100.0, help="time per output token that is tolerated", unit="ms", above=0)


@dataclass
class BatchSettings:
    """Requests of class `batch`: they wait until a backend idles, or enough of them are there."""

    enough: int = knob(8, help="so many are let go together, whether or not a backend idles", unit="requests", low=1)
    deadline_seconds: float = knob(60.0, help="a request that names no deadline waits no longer", unit="s", above=0)


@dataclass
class CacheSettings:
    """Answers that are given again."""

    kind: str = knob("none", help="which requests may be answered from the cache", choices=CACHES)
    judge: str | None = knob(
        None, help="backend that compares answers while it idles", unset="answers are the same if their texts are"
    )
    options: dict[str, Any] = knob(factory=dict, help="handed to the cache as they are")


@dataclass
class LedgerSettings:
    """What it won: some requests go the plain way, and the others are compared with them."""

    plain_share: float = knob(0.01, help="share of requests that go without drafts and cache to the first backend",
                              unit="fraction", low=0, high=1)  # fmt: skip
    seed: int = knob(0, help="of the choice of these requests", low=0)


@dataclass
class GatewaySettings:
    """A gateway."""

    host: str = knob("127.0.0.1", help="address to listen on")
    port: int = knob(8080, help="port to listen on; 0 takes a free one", low=0, high=65535)
    policy: str = knob("least_time", help="who chooses the backend; a name of the registry of policies")
    policy_options: dict[str, Any] = knob(factory=dict, help="options of the policies, by the policy's name")
    backends: list[BackendSettings] = knob(factory=list, help="where requests can go, the plain way first")
    keys: list[KeySettings] = knob(factory=list, help="who may ask; empty: everybody")
    limits: LimitSettings = field(default_factory=LimitSettings)
    slo: SloSettings = field(default_factory=SloSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    ledger: LedgerSettings = field(default_factory=LedgerSettings)
    survive: bool = knob(True, help="a stream whose backend dies is continued by another one")
    log: str | None = knob(None, help="file that requests are logged to, one JSON object a line",
                           unset="requests.jsonl in results_dir/gateway")  # fmt: skip
    log_text: bool = knob(False, help="log what was asked; otherwise its hash")
    tracing: str | None = knob(None, help="address of an OpenTelemetry collector (OTLP over HTTP)", unset="no traces")
    results_dir: str = knob("results", help="folder of the log")


def load(name: str | None, overrides: Sequence[str] = ()) -> GatewaySettings:
    """The gateway that a file describes, with overrides KEY=VALUE such as policy=fixed or limits.attempts=2.

    Args:
        name: a file, or the name of one in conf/gateway/ or ./conf/gateway/; None begins with the defaults.

    Raises:
        ConfigError: no such file, key or value; the message names it, what is allowed, and the nearest spelling.
    """
    content = {} if name is None else _read(_file(name))
    for word in overrides:
        key, separator, text = word.partition("=")
        if not separator:
            raise ConfigError(f"{word}: write KEY=VALUE, such as policy=round_robin")
        try:
            _put(content, key.split("."), yaml.safe_load(text), word)
        except yaml.YAMLError as error:
            raise ConfigError(f"{word}: {' '.join(str(error).split())}") from error
    settings: GatewaySettings = _made(GatewaySettings, content, "")
    check(settings)
    return settings


def choices() -> dict[str, Path]:
    """The named gateways: a user's own first."""
    files = [file for folder in reversed(conf_dirs()) for file in sorted((folder / GATEWAY).glob("*.yaml"))]
    return {file.stem: file for file in files}


def check(settings: GatewaySettings) -> None:
    """Raises ConfigError for what a gateway cannot begin with."""
    from selfspec_cli.gateway.backends import BACKENDS
    from selfspec_cli.gateway.policies import POLICIES

    if not settings.backends:
        raise ConfigError("backends: a gateway needs one at least; selfspec gateway demo begins without a file")
    names = [backend.name for backend in settings.backends]
    for place, backend in enumerate(settings.backends):
        if not backend.name or names.count(backend.name) > 1:
            raise ConfigError(f"backends.{place}.name={backend.name!r}: each backend needs a name of its own")
        BACKENDS[backend.kind].check(backend)
        if backend.key_env is not None and not os.environ.get(backend.key_env):
            raise ConfigError(f"backends.{place}.key_env={backend.key_env}: that environment variable is not set")
    if settings.cache.judge is not None and settings.cache.judge not in names:
        raise ConfigError(closest(settings.cache.judge, names, "backend of cache.judge"))
    for policy in (settings.policy, *settings.policy_options):
        POLICIES[policy].check(settings.policy_options.get(policy) or {})
    for place, key in enumerate(settings.keys):
        if not key.name or (key.env is None) == (key.sha256 is None):
            raise ConfigError(f"keys.{place}: give a name, and either env or sha256")
        if key.env is not None and not os.environ.get(key.env):
            raise ConfigError(f"keys.{place}.env={key.env}: that environment variable is not set")


def plain(value: Any) -> Any:
    """Settings as JSON's own types; no secret is in them, because settings name the variables that hold keys."""
    if is_dataclass(value):
        return {column.name: plain(getattr(value, column.name)) for column in fields(value)}
    if isinstance(value, list):
        return [plain(one) for one in value]
    return value


def _file(name: str) -> Path:
    path = Path(name).expanduser()
    if path.suffix in (".yaml", ".yml"):
        return path
    found = choices()
    if name not in found:
        raise ConfigError(closest(name, found, "gateway") + "; or give a file: NAME.yaml")
    return found[name]


def _read(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: it must be a mapping of settings")
    return content


def _put(content: Any, place: list[str], value: Any, word: str) -> None:
    """Set a value at a dotted place; a number picks an item of a list."""
    for depth, part in enumerate(place[:-1]):
        content = _inner(content, part, place[depth + 1], word)
    last = place[-1]
    if isinstance(content, list):
        content[_index(content, last, word)] = value
    else:
        content[last] = value


def _inner(content: Any, part: str, following: str, word: str) -> Any:
    if isinstance(content, list):
        return content[_index(content, part, word)]
    if not isinstance(content.get(part), (dict, list)):
        content[part] = [] if following.isdigit() else {}
    return content[part]


def _index(content: list[Any], part: str, word: str) -> int:
    """The place of an item by its number or its name; one more than there are adds an item."""
    names = [one.get("name") for one in content if isinstance(one, dict)]
    index = names.index(part) if part in names else int(part) if part.isdigit() else -1
    if not 0 <= index <= len(content):
        raise ConfigError(f"{word}: there is no item {part!r}; allowed: {', '.join(map(str, names)) or 'none yet'}")
    if index == len(content):
        content.append({})
    return index


def _made(schema: Any, content: Any, place: str) -> Any:
    """An instance of a schema, every key known and every value of its type and in its range."""
    if not isinstance(content, dict):
        raise ConfigError(f"{place.rstrip('.') or 'gateway'}: a mapping of settings is needed, not {content!r}")
    hints, known = get_type_hints(schema), [column.name for column in fields(schema)]
    for key in content:
        if key not in known:
            raise ConfigError(closest(f"{place}{key}", [f"{place}{one}" for one in known], "key"))
    made = schema(**{key: _value(hints[key], value, f"{place}{key}") for key, value in content.items()})
    for column in fields(schema):
        about = column.metadata.get("knob")
        if about is None:
            continue
        factory = column.default_factory
        option = knobs.Option(column.name, hints[column.name],
                              column.default if factory is MISSING else factory(), about)  # fmt: skip
        value = getattr(made, column.name)
        if option.is_number and not knobs.admits(option, value):
            raise ConfigError(f"{place}{column.name}={value}: allowed: {about.allowed()}")
        if about.choices and value not in about.choices:
            raise ConfigError(about.wrong_word(value, f"{place}{column.name}"))
    return made


def _value(kind: Any, value: Any, place: str) -> Any:
    if is_dataclass(kind):
        return _made(kind, value, f"{place}.")
    if get_origin(kind) is list:
        if not isinstance(value, list):
            raise ConfigError(f"{place}={value!r}: a list is needed")
        (inner,) = get_args(kind)
        return [_value(inner, one, f"{place}.{index}") for index, one in enumerate(value)]
    if get_origin(kind) is types.UnionType:
        if value is None:
            return None
        kind = next(one for one in get_args(kind) if one is not type(None))
    wanted = dict if get_origin(kind) is dict else kind
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise ConfigError(f"{place}={value!r}: {wanted.__name__} is needed")
    return value
