"""OpenTelemetry spans of requests, if `frontend.traces` is set.

The frontend makes all spans of a request when it ends. Agents report the start in an engine
(`Started`), so that neither agents nor engines need the library. The library exports in a separate
thread, drops spans if the collector is too slow, and reads OpenTelemetry's environment variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple

from prism.messages.requests import Request, Started

if TYPE_CHECKING:
    from opentelemetry.context import Context

EXPORT_TIMEOUT_S = 5


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Times of one HTTP request, in seconds since the epoch."""

    began_unix_s: float
    first_unix_s: float | None  # first token
    ended_unix_s: float


class TracedChoice(NamedTuple):
    """One choice of an HTTP request: its last attempt, and its first start in an engine."""

    request: Request
    started: Started | None


class Traces:
    """Exporter of spans to a collector at `address`, by OTLP over HTTP. REQUIRES: the extra
    `traces`, which is checked when the configuration is read."""

    def __init__(self, address: str, frontend_id: str) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named = {"service.name": "prism", "service.instance.id": frontend_id}
        resource = Resource.create(named)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=address, timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("prism")
        self._api = trace
        self._parents = TraceContextTextMapPropagator()

    def close(self) -> None:
        """Sends the remaining spans and blocks for at most EXPORT_TIMEOUT_S. The library's timeouts
        are longer, or not kept."""
        closing = Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(EXPORT_TIMEOUT_S)

    def request(
        self,
        choices: Sequence[TracedChoice],
        times: RequestTimes,
        outcome: str,
        output_tokens: int,
        parent: str,
    ) -> None:
        """Exports the spans of an ended HTTP request. `parent`: a `traceparent`, or ""."""
        first = choices[0].request
        root = self._tracer.start_span(
            f"generate {first.model}",
            context=self._parents.extract({"traceparent": parent}),
            kind=self._api.SpanKind.SERVER,
            start_time=_ns(times.began_unix_s),
            attributes={
                "gen_ai.request.model": first.model,
                "gen_ai.usage.input_tokens": sum(len(each.request.prompt_ids) for each in choices),
                "gen_ai.usage.output_tokens": output_tokens,
                "prism.outcome": outcome,
            },
        )
        if outcome not in ("ok", "cancelled"):
            root.set_status(self._api.StatusCode.ERROR, outcome)
        inside = self._api.set_span_in_context(root)
        for each in choices:
            self._choice(each, times, inside)
        root.end(_ns(times.ended_unix_s))

    def _choice(self, choice: TracedChoice, times: RequestTimes, inside: Context) -> None:
        """Exports the spans of one choice: queue until an agent starts it, prefill until the first
        token, then decode."""
        started, end = choice.started, times.ended_unix_s
        about: dict[str, str | int] = {
            "prism.request": choice.request.id,
            "prism.attempts": choice.request.attempt,
        }
        start = min(started.unix_s, end) if started else end
        self._span("queue", times.began_unix_s, start, about, inside)
        if started is None:
            return
        about["prism.device"] = started.device
        first = max(start, times.first_unix_s or end)
        self._span("prefill", start, first, about, inside)
        if times.first_unix_s is not None:
            self._span("decode", first, end, about, inside)

    def _span(
        self, name: str, began: float, ended: float, about: dict[str, str | int], inside: Context
    ) -> None:
        span = self._tracer.start_span(name, inside, start_time=_ns(began), attributes=about)
        span.end(_ns(ended))


def _ns(unix_s: float) -> int:
    return round(unix_s * 1e9)
