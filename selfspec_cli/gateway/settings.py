"""What a gateway is configured with: the schema of conf/gateway/*.yaml.

No secret is in settings, because they name the variables that hold keys, so they may be shown as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass, is_pydantic_dataclass

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.early_exit.errors import closest

ONLY_KNOWN_KEYS = ConfigDict(extra="forbid", allow_inf_nan=False)


def setting(default: Any, about: str, **limits: Any) -> Any:
    """A field of a schema. about: one line, for docs/gateway_reference.md. limits: as pydantic has them."""
    return Field(default=default, description=about, **limits)


@dataclass(config=ONLY_KNOWN_KEYS)
class NoOptions:
    """Of a policy that has none."""


@dataclass(config=ONLY_KNOWN_KEYS)
class BackendSettings:
    name: str = setting("", "what routes, metrics and errors call it")
    kind: str = setting("openai", "how it is started and asked; a name of the registry of backends")
    url: str | None = setting(None, "its address; a server that answers there is adopted; unset: one is started")
    words: list[str] = setting(
        [], "given to `selfspec serve` (`local`, `quantised`; vLLM's options after `--`) or vllm-router (`pool`)"
    )
    environment: dict[str, Any] = setting({}, "of the server that is started: CUDA_VISIBLE_DEVICES=1")
    prefill: str | None = setting(None, "of `split`: address of the server that prefills; unset: required there")
    model: str | None = setting(None, "the one model there that clients get; unset: all that /v1/models names")
    serves: list[str] = setting([], "names of models that clients may use for it, besides its own")
    weights: str | None = setting(
        None, "backends with equal weights continue each other's streams; unset: the model's name, and the kind"
    )
    key_env: str | None = setting(None, "environment variable that holds the key for it; unset: no key is sent")
    price_in: float = setting(0.0, "price of a million prompt tokens", ge=0)
    price_out: float = setting(0.0, "price of a million generated tokens", ge=0)
    price_hour: float = setting(0.0, "price of an hour of the machine, shared by its requests", ge=0)
    at_once: int | None = setting(None, "most requests in flight there", ge=1)


@dataclass(config=ONLY_KNOWN_KEYS)
class KeySettings:
    """One client's key, and its limits."""

    name: str = setting("", "the tenant: what logs and limits call the client")
    key: str = setting("", "environment variable that holds the key, or the key's SHA-256 in hexadecimal")
    requests_per_minute: int | None = setting(None, "most requests a minute", ge=1)
    tokens_per_minute: int | None = setting(None, "most tokens a minute, prompts and answers", ge=1)
    at_once: int | None = setting(None, "most requests at once", ge=1)
    models: list[str] = setting([], "models that it may ask for; empty: all")
    money_per_day: float | None = setting(None, "most money a day (UTC)", gt=0)
    admin: bool = setting(False, "may look at routes and settings, drain backends, and evict cached answers")


@dataclass(config=ONLY_KNOWN_KEYS)
class LimitSettings:
    """What nobody may exceed, and how long the gateway waits."""

    body_mib: float = setting(32.0, "largest body of a request; all together may have 16 times as much", gt=0, le=1e6)
    at_once: int = setting(4096, "most requests in the gateway at once", ge=1)
    queue_seconds: float = setting(10.0, "a request waits so long for a place at full backends, fair by tenant", ge=0)
    request_seconds: float = setting(600.0, "whole time of a request, its answer included", gt=0)
    first_byte_seconds: float = setting(
        120.0, "a backend that has sent no event of a stream for so long has failed", gt=0
    )
    stall_seconds: float = setting(30.0, "likewise between two events; comments do not count", gt=0)
    unread_seconds: float = setting(
        300.0, "a client is left that has read nothing, or not sent its request, for so long", gt=0
    )


@dataclass(config=ONLY_KNOWN_KEYS)
class SloSettings:
    """What `cheapest_within_slo` and `sticky_until_saturated` are held to."""

    ttft_ms: float = setting(1000.0, "time to first token that is tolerated", gt=0)
    tpot_ms: float = setting(100.0, "time per output token that is tolerated", gt=0)


@dataclass(config=ONLY_KNOWN_KEYS)
class CacheSettings:
    """Answers that are given again to the same request of the same tenant."""

    mib: float = setting(0.0, "room for answers; 0: nothing is kept; the least recently used go first", ge=0, le=1e6)
    ttl_s: float = setting(7 * 86400.0, "after which an answer is forgotten", gt=0)
    also_for: list[Literal["tools", "images", "sampled"]] = setting(
        [], "of tools, images and sampled (a temperature above 0, or none named), which requests are cached too"
    )


@dataclass(config=ONLY_KNOWN_KEYS)
class LedgerSettings:
    """What routing gained: some requests are its baseline, and the others are compared with them."""

    plain_share: float = setting(0.01, "requests that go to the first backend, without drafts or cache", ge=0, le=1)


@dataclass(config=ONLY_KNOWN_KEYS)
class GatewaySettings:
    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8080, "port to listen on; 0 takes a free one", ge=0, le=65535)
    workers: int = setting(1, "processes that answer at that port", ge=1, le=256)
    policy: str = setting("least_time", "who chooses the backend; a name of the registry of policies")
    policy_options: dict[str, Any] = setting({}, "options of the policies, by the policy's name")
    backends: list[BackendSettings] = setting([], "where requests can go; the first is the baseline")
    keys: list[KeySettings] = setting([], "who may ask; empty: everybody")
    limits: LimitSettings = Field(default_factory=LimitSettings)
    slo: SloSettings = Field(default_factory=SloSettings)
    cache: CacheSettings = Field(default_factory=CacheSettings)
    ledger: LedgerSettings = Field(default_factory=LedgerSettings)
    log_text: bool = setting(False, "log what was asked; otherwise its hash")
    tls: list[str] = setting([], "files of the certificate and its key, in PEM; empty: plain HTTP")
    origins: list[str] = setting([], "web pages that may ask (CORS), such as https://app.example")
    results_dir: str = setting("results", "folder of the log (in gateway/requests.jsonl) and of the cache")


def validated(schema: Any, content: Any, place: str = "") -> Any:
    """Plain values as an instance of a schema; raises ConfigError for a key or a value that it has not. place: what its
    keys begin with in messages, such as `limits.`."""
    try:
        return TypeAdapter(schema).validate_python(content)
    except ValidationError as error:
        raise ConfigError(_problem(schema, error.errors()[0], place)) from error


def _problem(schema: Any, first: Mapping[str, Any], place: str) -> str:
    *above, last = first["loc"] or ("",)
    place += "".join(f"{part}." for part in above)
    if first["type"] != "unexpected_keyword_argument":
        return f"{f'{place}{last}'.rstrip('.') or 'gateway'}={first['input']!r}: {first['msg']}"
    for name in above:
        if isinstance(name, str):  # a number is the place in a list
            kind = schema.__pydantic_fields__[name].annotation
            schema = next(one for one in (kind, *get_args(kind)) if is_pydantic_dataclass(one))
    allowed = [f"{place}{name}" for name in schema.__pydantic_fields__] or ["none"]
    return closest(f"{place}{last}", allowed, "key")
