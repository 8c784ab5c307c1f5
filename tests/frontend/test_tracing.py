"""A request's spans, as a collector receives them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import msgspec
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import SpanProcessor

from prism.config import resolve
from prism.errors import ConfigError
from prism.frontend.metrics import tracing
from prism.messages.requests import Chunk, Failure, Request, Started
from prism.queueing.server import BundledRedis
from tests.frontend.conftest import Stack, make_config, stack_of

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Yields the collector's address and the spans that it has received."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                raise NotImplementedError
            message = ExportTraceServiceRequest.FromString(body)
            spans.extend(
                span
                for resource in message.resource_spans
                for scope in resource.scope_spans
                for span in scope.spans
            )
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


async def slow(request: Request) -> AsyncIterator[Chunk | Failure]:
    """Sends two tokens, 50 ms apart."""
    for index, end in enumerate((None, "stop")):
        await asyncio.sleep(0.05)
        yield Chunk(request.id, request.attempt, index, [7], end)


async def ask(stack: Stack) -> None:
    """Sends a request that the scripted agent starts 20 ms after its arrival."""

    async def started(request: Request) -> AsyncIterator[Chunk | Failure]:
        at = Started(request.id, 1, "host:0", request.arrival_unix_s + 0.02)
        stack.state.dispatcher.log.take_start(at)
        async for chunk in slow(request):
            yield chunk

    stack.agent.script = started
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    body = {"model": "base", "prompt": [9, 9, 9]}
    answer = await stack.client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200


async def test_a_collector_gets_the_way_of_a_request(
    redis_server: BundledRedis, namespace: str, short_dir: Path
) -> None:
    config = make_config(redis_server.url, namespace, short_dir)
    began_ns = time.time_ns()
    with collector() as (address, spans):
        frontend = msgspec.structs.replace(config.frontend, traces=address)
        async with stack_of(msgspec.structs.replace(config, frontend=frontend)) as stack:
            await ask(stack)
    by_name = {span.name: span for span in spans}
    assert set(by_name) == {"generate base", "queue", "prefill", "decode"}
    root = by_name.pop("generate base")
    assert root.trace_id.hex() == TRACE
    assert root.parent_span_id.hex() == PARENT
    assert attributes(root) == {
        "gen_ai.request.model": "base",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2,
        "prism.outcome": "ok",
    }
    for span in by_name.values():
        assert span.parent_span_id == root.span_id
        assert attributes(span)["prism.attempts"] == 1
    assert attributes(by_name["prefill"])["prism.device"] == "host:0"
    queue, prefill, decode = (by_name[name] for name in ("queue", "prefill", "decode"))
    times = [queue.start_time_unix_nano, queue.end_time_unix_nano, prefill.end_time_unix_nano]
    times += [decode.end_time_unix_nano, root.end_time_unix_nano]
    assert times == sorted(times)
    assert began_ns - 1e6 <= root.start_time_unix_nano == queue.start_time_unix_nano
    assert prefill.start_time_unix_nano == queue.end_time_unix_nano
    assert not any("9, 9" in str(span) for span in spans)


async def test_none_are_made_unless_wanted(stack: Stack) -> None:
    await ask(stack)
    assert stack.state.dispatcher._metrics.traces is None


def test_a_collector_that_says_nothing_delays_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    released = Event()

    class Stuck(SpanProcessor):
        def shutdown(self) -> None:
            released.wait(20)

    with collector() as (address, _):
        traces = tracing.Traces(address, "f0")
        traces._provider.add_span_processor(Stuck())
        monkeypatch.setattr(tracing, "EXPORT_TIMEOUT_S", 0.2)
        closing = Thread(target=traces.close)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()
        released.set()


def test_what_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'localhost:4318' is not an HTTP address"):
        resolve._check_traces("localhost:4318")
    monkeypatch.setattr(resolve, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'prism-serving\[traces\]'"):
        resolve._check_traces("http://localhost:4318/v1/traces")
