"""Prometheus metrics of this frontend's requests."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from prism import clock
from prism.frontend.http.calls import Call
from prism.frontend.metrics.siblings import labelled
from prism.frontend.metrics.tracing import RequestTimes, TracedChoice, Traces
from prism.messages.requests import Request
from prism.transport import malformed_total

# An unused series with the creation time of each counter would double the text.
disable_created_metrics()  # type: ignore[no-untyped-call]

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60)
_TPOT_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2)
_E2E_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600)
_COUNT_INTERVAL_S = 0.5  # between updates of the token counter by a running request


class Metrics:
    """Metrics of one frontend in a separate registry, and its traces if they are configured."""

    def __init__(self, traces: Traces | None = None) -> None:
        self.traces = traces
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests ended, by outcome", "outcome")
        self.retries = self._counter("retries", "Requests sent again after a failure")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens received")
        self.output_tokens = self._counter("output_tokens", "Output tokens received")
        self.slo = self._counter("slo", "Requests by SLO attainment", "slo", "met")
        self.ttft_s = self._histogram("ttft_seconds", "Time to first token", _TTFT_BUCKETS_S)
        self.tpot_s = self._histogram(
            "tpot_seconds", "Time per output token after the first", _TPOT_BUCKETS_S
        )
        self.queue_s = self._histogram(
            "queue_seconds", "Time from arrival until an engine has the request", _TTFT_BUCKETS_S
        )
        self.e2e_s = self._histogram("e2e_seconds", "Time to the last token", _E2E_BUCKETS_S)
        self.open = Gauge(
            "prism_open_requests", "Requests in progress", ["model"], registry=self.registry
        )
        self.key_requests = self._counter("key_requests", "Requests ended, by API key", "key")
        self.key_tokens = self._counter("key_tokens", "Tokens, by API key", "key", "kind")
        self.registry.register(_Malformed())

    def count_key_usage(self, call: Call) -> None:
        """Counts the requests and tokens of an ended generation for its API key."""
        if call.key:
            self.key_requests.labels(call.model, call.key).inc()
            self.key_tokens.labels(call.model, call.key, "prompt").inc(call.prompt_tokens)
            self.key_tokens.labels(call.model, call.key, "output").inc(call.output_tokens)

    def observe_queue_time(self, request: Request, started_unix_s: float) -> None:
        """Records the queueing time. `started_unix_s` is reported by the agent."""
        queue_s = max(0.0, started_unix_s - request.arrival_unix_s)
        self.queue_s.labels(request.model).observe(queue_s)

    def text(self, frontend_id: str, names: tuple[str, ...] = ()) -> str:
        """Returns the text for Prometheus: the samples of these names, or all of them."""
        return labelled(render_samples(self.registry, names), frontend_id)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"prism_{name}", text, ["model", *labels], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets_s: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"prism_{name}", text, ["model"], buckets=buckets_s, registry=self.registry
        )


def render_samples(registry: CollectorRegistry, names: tuple[str, ...]) -> str:
    """Returns the text for Prometheus: the samples of these names, or all of them."""
    wanted = registry.restricted_registry(names) if names else registry
    return generate_latest(wanted).decode()


class _Malformed(Collector):
    """Collector of this process's malformed messages. Those of the other processes are in the
    cluster's status."""

    def collect(self) -> Iterator[Metric]:
        yield malformed_messages({"frontend": malformed_total()})


def malformed_messages(counts: dict[str, int]) -> Metric:
    """Returns the metric of malformed messages. `counts`: process -> count."""
    name, text = "prism_malformed_messages", "Messages dropped as malformed"
    dropped = CounterMetricFamily(name, text, labels=["process"])
    for process, count in counts.items():
        dropped.add_metric([process], count)
    return dropped


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies of one HTTP request."""

    ttft_s: float
    tpot_s: float | None  # None if no choice has a second token


class RequestTimer:
    """Timer of one HTTP request on the monotonic clock, which reports to `Metrics` at its end."""

    def __init__(
        self, metrics: Metrics, model: str, slo_ttft_s: float, slo_tpot_s: float, choices: int
    ) -> None:
        self._metrics = metrics
        self._model = model
        self._slo_ttft_s = slo_ttft_s
        self._slo_tpot_s = slo_tpot_s
        self._choices = choices
        self._began_s = self._last_s = 0.0
        self._first_s: float | None = None
        self._tokens = self._counted = 0
        self._next_count_s = 0.0
        self._whole = False
        self._parent = ""
        self._output_tokens = metrics.output_tokens.labels(model)

    def begin(self, began_s: float, parent: str) -> None:
        """Starts the timer. `parent`: a `traceparent`, or ""."""
        self._began_s, self._parent = began_s, parent
        self._metrics.open.labels(self._model).inc()

    def submitted(self, prompt_tokens: int) -> None:
        """Counts the prompt of an accepted request."""
        self._metrics.prompt_tokens.labels(self._model).inc(prompt_tokens)

    def tokens(self, count: int) -> None:
        if count == 0:
            return
        self._last_s = time.monotonic()
        self._first_s = self._first_s or self._last_s
        self._tokens += count
        # Updating the counter for each token would cost as much as detokenizing it.
        if self._last_s >= self._next_count_s:
            self._next_count_s = self._last_s + _COUNT_INTERVAL_S
            self._count()

    def vector_received(self) -> None:
        """Records a vector. The client sees all vectors when the last one has arrived."""
        self._first_s = self._last_s = time.monotonic()

    def whole(self, tokens: int) -> None:
        """Records an answer that arrived as a whole, whose first token's time is not known."""
        self._last_s, self._whole = time.monotonic(), True
        self._tokens = tokens

    def _count(self) -> None:
        self._output_tokens.inc(self._tokens - self._counted)
        self._counted = self._tokens

    def latencies(self) -> Latencies | None:
        """Returns the latencies up to the last token so far, or None before the first one."""
        if self._first_s is None:
            return None
        following = self._tokens - self._choices
        decode_s = (self._last_s - self._first_s) * self._choices
        return Latencies(
            ttft_s=self._first_s - self._began_s,
            tpot_s=decode_s / following if following > 0 else None,
        )

    def end(self, outcome: str, choices: Sequence[TracedChoice]) -> None:
        self._count()
        if self._metrics.traces is not None and choices:
            times = self._times()
            self._metrics.traces.request(choices, times, outcome, self._tokens, self._parent)
        self._metrics.open.labels(self._model).dec()
        self._metrics.requests.labels(self._model, outcome).inc()
        latencies = self.latencies()
        if self._whole:
            self._metrics.e2e_s.labels(self._model).observe(self._last_s - self._began_s)
        elif outcome == "ok" and latencies is not None:
            self._observe(latencies)
        elif self._first_s is None and time.monotonic() > self._began_s + self._slo_ttft_s:
            self._attain("ttft", False)

    def _times(self) -> RequestTimes:
        ahead_s = clock.ahead_s()
        first_unix_s = self._first_s + ahead_s if self._first_s else None
        return RequestTimes(self._began_s + ahead_s, first_unix_s, clock.unix_s())

    def _observe(self, latencies: Latencies) -> None:
        ttft_s, tpot_s = latencies.ttft_s, latencies.tpot_s
        self._metrics.ttft_s.labels(self._model).observe(ttft_s)
        self._metrics.e2e_s.labels(self._model).observe(self._last_s - self._began_s)
        self._attain("ttft", ttft_s <= self._slo_ttft_s)
        if tpot_s is not None:
            self._metrics.tpot_s.labels(self._model).observe(tpot_s)
            self._attain("tpot", tpot_s <= self._slo_tpot_s)

    def _attain(self, slo: str, met: bool) -> None:
        self._metrics.slo.labels(self._model, slo, str(met).lower()).inc()
