"""What the gateway counts, for Prometheus at /metrics, and spans for OpenTelemetry where a collector is configured."""

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from selfspec_cli.gateway.replica import Replica
from selfspec_cli.gateway.request import Outcome
from selfspec_cli.record.gateway_log import Gain

COLLECTOR = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
FILES = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client's: counts of several workers, in files of this folder
_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)


class Telemetry:
    """The counters of one gateway, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def make(kind: Any, name: str, about: str, labels: Sequence[str] = (), **more: Any) -> Any:
            return kind(f"selfspec_gateway_{name}", about, labels, registry=self.registry, **more)

        gauge = partial(make, Gauge, multiprocess_mode="livemostrecent")  # where there are several workers
        total = partial(gauge, multiprocess_mode="livesum")
        histogram, route, backend = partial(make, Histogram, labels=("route",)), ("route",), ("backend",)

        self.requests = make(Counter, "requests", "requests that ended", ("route", "reason", "class", "status"))
        self.ttft = histogram("ttft_seconds", "time to first token, as measured", buckets=_FIRST)
        self.tpot = histogram("tpot_seconds", "time per output token, as measured", buckets=_TOKEN)
        self.e2e = histogram("e2e_seconds", "time to the last token", labels=("route", "plain"))
        about = "distance of the predicted time"
        self.ttft_error = histogram("ttft_error_seconds", f"{about} to first token", buckets=_FIRST)
        self.tpot_error = histogram("tpot_error_seconds", f"{about} per output token", buckets=_TOKEN)
        self.expected_ttft = gauge("expected_ttft_seconds", "predicted for the newest request", route)
        self.expected_tpot = gauge("expected_tpot_seconds", "predicted for the newest request", route)
        self.cache = make(Counter, "cache", "requests by what the cache said", ("verdict",))
        self.cost = make(Counter, "cost", "money", route)
        self.machine = make(Counter, "machine_seconds", "seconds of machines", route)
        self.tokens = make(Counter, "tokens", "tokens of prompts and answers", ("route", "kind"))
        self.retries = make(Counter, "retries", "attempts that failed before a byte was sent", backend)
        self.survived = make(Counter, "streams_continued", "streams that another backend continued", backend)
        self.lost = make(Counter, "stream_lost_seconds", "time that clients waited for a continuation")
        self.broken = make(Counter, "streams_broken", "streams that could not be continued", backend)
        self.queue = total("queue", "requests that wait", ("class",))
        self.inside = total("in_flight", "requests in the gateway")
        self.at = total("backend_in_flight", "requests at a backend, sent by this gateway", backend)
        self.up = gauge("backend_up", "1: takes requests; 0: does not", backend, multiprocess_mode="livemin")
        self.load = gauge("backend_running", "requests at a backend by its own /metrics", backend)
        self.work = gauge("backend_round_work", "what a round costs there, in plain steps", backend)
        self.drafts = gauge("backend_round_tokens", "tokens that a round brings there", backend)
        labels = ("model", "route", "of", "bound")
        self.gain = gauge("gain", "plain over routed: seconds or money a token", labels)

    def ended(self, out: Outcome) -> None:
        route = out.route or "none"
        self.requests.labels(route, out.reason or "none", out.request.kind, str(out.status)).inc()
        self.cache.labels(out.cache).inc()
        for measured, expected, times, errors, newest in (
            (out.ttft, out.expected_ttft, self.ttft, self.ttft_error, self.expected_ttft),
            (out.tpot, out.expected_tpot, self.tpot, self.tpot_error, self.expected_tpot),
        ):
            if measured is not None:
                times.labels(route).observe(measured)
            if expected is not None:
                newest.labels(route).set(expected)
            if measured is not None and expected is not None:
                errors.labels(route).observe(abs(measured - expected))
        if out.e2e is not None:
            self.e2e.labels(route, str(out.plain).lower()).observe(out.e2e)
        if out.cost is not None:
            self.cost.labels(route).inc(out.cost)
        if out.machine_s is not None:
            self.machine.labels(route).inc(out.machine_s)
        for kind, count in (("prompt", out.prompt_tokens), ("answer", out.tokens)):
            if count is not None:
                self.tokens.labels(route, kind).inc(count)
        for name in out.tried:
            self.retries.labels(name).inc()
        if out.lost is not None:
            self.lost.inc(out.lost)

    def gains(self, found: Sequence[Gain]) -> None:
        for one in found:
            for bound, value in (("gain", one.gain), ("low", one.low), ("high", one.high)):
                if value is not None:
                    self.gain.labels(one.model, one.route, one.of, bound).set(value)

    def now(self, inside: int, queue: Mapping[str, int], replicas: Sequence[Replica]) -> None:
        """The state of this moment. queue: requests that wait, by class."""
        self.inside.set(inside)
        for name, waiting in queue.items():
            self.queue.labels(name).set(waiting)
        for one in replicas:
            self.at.labels(one.name).set(len(one.flights))
            self.up.labels(one.name).set(one.up() and one.breaker.open_until == 0)
            if one.load.known:
                self.load.labels(one.name).set(one.load.running)
                self.work.labels(one.name).set(one.load.work)
                self.drafts.labels(one.name).set(one.load.tokens)

    def text(self) -> bytes:
        """Prometheus's text format; of all workers where there are several."""
        registry = self.registry
        if FILES in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)
        return bytes(generate_latest(registry))


class Tracing:
    """Spans of requests; nothing where no collector is named by OpenTelemetry's own variables."""

    def __init__(self) -> None:
        self._tracer: Any = None
        self._provider: Any = None
        if not any(os.environ.get(name) for name in COLLECTOR):
            return
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._propagator = TraceContextTextMapPropagator()
        self._provider = TracerProvider(resource=Resource.create({"service.name": "selfspec-gateway"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("selfspec")

    def span(self, name: str, headers: Mapping[str, str]) -> AbstractContextManager[Any]:
        """A span around one step of a request. headers: those of the client, whose trace it joins."""
        if self._tracer is None:
            return nullcontext()
        return self._tracer.start_as_current_span(name, context=self._propagator.extract(headers))

    def inject(self, headers: dict[str, str]) -> None:
        """Let a backend join the trace."""
        if self._tracer is not None:
            self._propagator.inject(headers)

    def close(self) -> None:
        if self._provider is not None:
            self._provider.shutdown()
