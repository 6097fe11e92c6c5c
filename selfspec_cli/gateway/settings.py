"""What a gateway is configured with: the schema of conf/gateway/*.yaml.

No secret is in settings, because they name the variables that hold keys, so they may be shown as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from selfspec_cli.early_exit.knobs import knob

CACHES = ("none", "exact", "meaning")
SPECIAL = ("tools", "images", "seeds")
"""Kinds of requests that are cached only where `also_for` names them."""


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
    model: str | None = knob(None, help="the one model there that clients get", unset="all that /v1/models names")
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

    body_mib: float = knob(32.0, help="largest body of a request", unit="MiB", above=0, high=1e6)
    at_once: int = knob(4096, help="most requests in the gateway at once", unit="requests", low=1)
    connect_seconds: float = knob(2.0, help="to connect to a backend", unit="s", above=0)
    first_byte_seconds: float = knob(120.0, help="a backend that has sent nothing for so long has failed", unit="s",
                                     above=0)  # fmt: skip
    stall_seconds: float = knob(30.0, help="likewise between two parts of a stream", unit="s", above=0)
    unread_seconds: float = knob(300.0, help="a client that has read nothing of its answer for so long is left, and "
                                 "one that has not sent its whole request", unit="s", above=0)  # fmt: skip
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


@dataclass(frozen=True)
class CacheOptions:
    """Which answers are kept, and which of them are given to questions that mean the same (`cache/promise.py` says what
    is promised)."""

    delta: float = knob(0.01, help="largest share of wrong ones among hits by meaning", unit="fraction", above=0,
                        high=0.99)  # fmt: skip
    alpha: float = knob(0.05, help="largest chance that the share is larger", unit="fraction", above=0, high=0.99)
    audit: float = knob(0.05, help="share of questions with an acceptable entry that are asked all the same, to see "
                        "whether it is right", unit="fraction", above=0, high=0.99)  # fmt: skip
    ttl_s: float = knob(7 * 86400.0, help="after which an entry is forgotten", unit="s", above=0)
    entries: int = knob(100_000, help="how many are kept; those that were not used for longest go first", low=1)
    mib: float = knob(1024.0, help="likewise of their size", unit="MiB", above=0, high=1e6)
    also_for: list[str] = knob(
        factory=list, help="of tools, images and seeds, which requests are cached too (the first two only exactly)",
        choices=SPECIAL,
    )  # fmt: skip
    seed: int | None = knob(None, help="of the coin that picks audits", low=0, unset="unpredictable")


@dataclass
class CacheSettings:
    """Answers that are given again."""

    kind: str = knob("none", help="which requests may be answered from the cache", choices=CACHES)
    judge: str | None = knob(
        None, help="backend that compares answers while it idles", unset="answers are the same if their texts are"
    )
    options: CacheOptions = field(default_factory=CacheOptions)


@dataclass
class LedgerSettings:
    """What routing gained: some requests are its baseline, and the others are compared with them."""

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
    backends: list[BackendSettings] = knob(factory=list, help="where requests can go; the first is the baseline")
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
