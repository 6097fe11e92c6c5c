"""What a gateway is configured with: the schema of conf/gateway/*.yaml, and values checked by it.

No secret is in settings, because they name the variables that hold keys, so they may be shown as they are.
"""

import types
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from typing import Any, get_args, get_origin, get_type_hints

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.early_exit import knobs
from selfspec_cli.early_exit.errors import closest
from selfspec_cli.early_exit.knobs import knob

_limit = partial(knob, None, low=1, unset="no limit")
SPECIAL = ("tools", "images", "sampled")
"""Kinds of requests that are cached only where `also_for` names them."""


@dataclass
class BackendSettings:
    name: str = knob("", help="what routes, metrics and errors call it")
    kind: str = knob("openai", help="how it is started and asked; a name of the registry of backends")
    url: str | None = knob(None, help="its address; a server that answers there is adopted", unset="one is started")
    words: list[str] = knob(
        factory=list,
        help="given to `selfspec serve` (`local`, `quantised`; vLLM's options after `--`) or vllm-router (`pool`)",
    )
    environment: dict[str, Any] = knob(factory=dict, help="of the server that is started: CUDA_VISIBLE_DEVICES=1")
    prefill: str | None = knob(None, help="of `split`: address of the server that prefills", unset="required there")
    model: str | None = knob(None, help="the one model there that clients get", unset="all that /v1/models names")
    serves: list[str] = knob(factory=list, help="names of models that clients may use for it, besides its own")
    weights: str | None = knob(
        None, help="backends with equal weights continue each other's streams", unset="the model's name, and the kind"
    )
    key_env: str | None = knob(None, help="environment variable that holds the key for it", unset="no key is sent")
    price_in: float = knob(0.0, help="price of a million prompt tokens", unit="money", low=0)
    price_out: float = knob(0.0, help="price of a million generated tokens", unit="money", low=0)
    price_hour: float = knob(0.0, help="price of an hour of the machine, shared by its requests", unit="money", low=0)
    at_once: int | None = _limit(help="most requests in flight there", unit="requests")


@dataclass
class KeySettings:
    """One client's key, and its limits."""

    name: str = knob("", help="the tenant: what logs and limits call the client")
    key: str = knob("", help="environment variable that holds the key, or the key's SHA-256 in hexadecimal")
    requests_per_minute: int | None = _limit(help="most requests a minute", unit="requests")
    tokens_per_minute: int | None = _limit(help="most tokens a minute, prompts and answers", unit="tokens")
    at_once: int | None = _limit(help="most requests at once", unit="requests")
    models: list[str] = knob(factory=list, help="models that it may ask for; empty: all")
    money_per_day: float | None = knob(None, help="most money a day (UTC)", unit="money", above=0, unset="no limit")
    admin: bool = knob(False, help="may look at routes and settings, drain backends, and evict cached answers")


@dataclass
class LimitSettings:
    """What nobody may exceed, and how long the gateway waits."""

    body_mib: float = knob(
        32.0, help="largest body of a request; all together may have 16 times as much", unit="MiB", above=0, high=1e6
    )
    at_once: int = knob(4096, help="most requests in the gateway at once", unit="requests", low=1)
    queue_seconds: float = knob(
        10.0, help="a request waits so long for a place at full backends, fair by tenant", unit="s", low=0
    )
    request_seconds: float = knob(600.0, help="whole time of a request, its answer included", unit="s", above=0)
    first_byte_seconds: float = knob(
        120.0, help="a backend that has sent no event of a stream for so long has failed", unit="s", above=0
    )
    stall_seconds: float = knob(30.0, help="likewise between two events; comments do not count", unit="s", above=0)
    unread_seconds: float = knob(
        300.0, help="a client is left that has read nothing, or not sent its request, for so long", unit="s", above=0
    )


@dataclass
class SloSettings:
    """What `cheapest_within_slo` and `sticky_until_saturated` are held to."""

    ttft_ms: float = knob(1000.0, help="time to first token that is tolerated", unit="ms", above=0)
    tpot_ms: float = knob(100.0, help="time per output token that is tolerated", unit="ms", above=0)


@dataclass
class CacheSettings:
    """Answers that are given again to the same request of the same tenant."""

    mib: float = knob(
        0.0, help="room for answers; 0: nothing is kept; the least recently used go first", unit="MiB", low=0, high=1e6
    )
    ttl_s: float = knob(7 * 86400.0, help="after which an answer is forgotten", unit="s", above=0)
    also_for: list[str] = knob(
        factory=list,
        help="of tools, images and sampled (a temperature above 0, or none named), which requests are cached too",
        choices=SPECIAL,
    )


@dataclass
class LedgerSettings:
    """What routing gained: some requests are its baseline, and the others are compared with them."""

    plain_share: float = knob(
        0.01, help="requests that go to the first backend, without drafts or cache", unit="fraction", low=0, high=1
    )


@dataclass
class GatewaySettings:
    host: str = knob("127.0.0.1", help="address to listen on")
    port: int = knob(8080, help="port to listen on; 0 takes a free one", low=0, high=65535)
    workers: int = knob(1, help="processes that answer at that port", low=1, high=256)
    policy: str = knob("least_time", help="who chooses the backend; a name of the registry of policies")
    policy_options: dict[str, Any] = knob(factory=dict, help="options of the policies, by the policy's name")
    backends: list[BackendSettings] = knob(factory=list, help="where requests can go; the first is the baseline")
    keys: list[KeySettings] = knob(factory=list, help="who may ask; empty: everybody")
    limits: LimitSettings = field(default_factory=LimitSettings)
    slo: SloSettings = field(default_factory=SloSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    ledger: LedgerSettings = field(default_factory=LedgerSettings)
    log_text: bool = knob(False, help="log what was asked; otherwise its hash")
    tls: list[str] = knob(factory=list, help="files of the certificate and its key, in PEM; empty: plain HTTP")
    origins: list[str] = knob(factory=list, help="web pages that may ask (CORS), such as https://app.example")
    results_dir: str = knob("results", help="folder of the log (in gateway/requests.jsonl) and of the cache")


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a mapping"}


def checked(schema: Any, content: Any, place: str) -> Any:
    """An instance of a dataclass of knobs. place: what its keys begin with in messages, such as `limits.`. Raises
    ConfigError for a key that is not known, or a value of another type or out of its range."""
    if not isinstance(content, dict):
        raise ConfigError(f"{place.rstrip('.') or 'gateway'}: a mapping of settings is needed, not {content!r}")
    hints = get_type_hints(schema)
    for key in content:
        if key not in hints:
            raise ConfigError(closest(f"{place}{key}", [f"{place}{one}" for one in hints] or ["none"], "key"))
    made = schema(**{key: _value(hints[key], value, f"{place}{key}") for key, value in content.items()})
    for name, option in knobs.options(schema).items():
        if "." in name:  # checked with the mapping that it is in
            continue
        value, about = getattr(made, name), option.knob
        if option.is_number and not knobs.admits(option, value):
            raise ConfigError(f"{place}{name}={value}: allowed: {about.allowed()}")
        for word in value if isinstance(value, list) else [value]:
            if about.choices and word not in about.choices:
                raise ConfigError(about.wrong_word(word, f"{place}{name}"))
    return made


def _value(kind: Any, value: Any, place: str) -> Any:
    if is_dataclass(kind):
        return checked(kind, value, f"{place}.")
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
    if wanted is float and not isinstance(value, bool):
        with suppress(TypeError, ValueError, OverflowError):
            return float(value)  # 3, and 1e-3, which YAML takes for text
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise ConfigError(f"{place}={value!r}: {_WORDS.get(wanted, wanted.__name__)} is needed")
    return value
