"""Requests for external models reach one of their servers, and its answers come back unchanged."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from prism.config.schema.access import ApiKey, hashed
from prism.messages.external import ExternalModel, ServerLoad
from prism.queueing.server import BundledRedis
from tests.frontend.conftest import Stack, ids_of, make_config, stack_of
from tests.frontend.scripted_agent import answering

ANSWER: dict[str, Any] = {"id": "x", "choices": [{"text": "hi"}], "model": "served"}
ANSWER |= {"usage": {"prompt_tokens": 7, "completion_tokens": 3}}
EVENTS = [b'data: {"choices": [{"text": "%d"}]}\n\n' % n for n in range(4)]
DONE = b"data: [DONE]\n\n"
KEY = "key-of-one-1234567890"

Script = Callable[["Upstream", asyncio.StreamWriter], Coroutine[Any, Any, None]]


def head(status: int, kind: str, *more: str) -> bytes:
    lines = [f"HTTP/1.1 {status} Said", f"content-type: {kind}", "connection: close", *more]
    return "\r\n".join([*lines, "", ""]).encode()


async def whole(upstream: Upstream, writer: asyncio.StreamWriter) -> None:
    body = json.dumps(upstream.answer).encode()
    writer.write(head(200, "application/json", f"content-length: {len(body)}") + body)


def refused(status: int) -> Script:
    async def script(_: Upstream, writer: asyncio.StreamWriter) -> None:
        body = b'{"error": {"message": "no"}}'
        writer.write(head(status, "application/json", f"content-length: {len(body)}") + body)

    return script


def streamed(
    count: int = len(EVENTS), *, ends: bool = True, cut: int = 0, events: list[bytes] = EVENTS
) -> Script:
    """Sends events. `ends`: also the end; otherwise the connection breaks, after `cut` bytes of one
    more event."""

    async def script(upstream: Upstream, writer: asyncio.StreamWriter) -> None:
        writer.write(head(200, "text/event-stream", "transfer-encoding: chunked"))
        more = [events[count][:cut]] if cut else []
        for event in [*events[:count], *more, *([DONE] if ends else [])]:
            writer.write(b"%x\r\n%s\r\n" % (len(event), event))
            await writer.drain()
            await upstream.step.wait()
        if ends:
            writer.write(b"0\r\n\r\n")

    return script


async def lost(_: Upstream, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


@dataclass
class Upstream:
    """A server whose answers follow `script`. A stream's events wait for `step`."""

    script: Script = whole
    answer: dict[str, Any] = field(default_factory=lambda: ANSWER)
    served_name: str = "served"
    keeps: bool = False  # connections, which it closes at the next request
    bodies: list[bytes] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    step: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        text = (await reader.readuntil(b"\r\n\r\n")).decode()
        fields = dict(line.lower().split(": ", 1) for line in text.split("\r\n")[1:] if line)
        body = await reader.readexactly(int(fields.get("content-length", 0)))
        if text.startswith("GET /v1/models"):
            cards = json.dumps({"data": [{"id": self.served_name}]}).encode()
            said = head(200, "application/json", f"content-length: {len(cards)}")
            writer.write(
                (said.replace(b"connection: close\r\n", b"") if self.keeps else said) + cards
            )
            if self.keeps:
                await reader.read(1)
        else:
            self.bodies.append(body)
            self.heads.append(text)
            serving = asyncio.create_task(self.script(self, writer))
            closing = asyncio.create_task(reader.read())
            await asyncio.wait([serving, closing], return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                self.gone.set()
            serving.cancel()
            closing.cancel()
        writer.close()


@asynccontextmanager
async def upstreams(count: int) -> AsyncIterator[list[Upstream]]:
    async with AsyncExitStack() as stack:
        made = [Upstream() for _ in range(count)]
        for each in made:
            each.step.set()
            server = await asyncio.start_server(each.handle, "127.0.0.1", 0)
            await stack.enter_async_context(server)
            each.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield made


@dataclass
class Proxied:
    """Frontend with the external model "ext" on the servers `a` and `b`."""

    stack: Stack
    a: Upstream
    b: Upstream

    async def post(self, path: str = "/v1/completions", **more: Any) -> httpx.Response:
        body = {"model": "ext", "prompt": "hello", **more}
        return await self.stack.client.post(path, json=body)

    @property
    def loads(self) -> dict[str, ServerLoad]:
        found: dict[str, ServerLoad] = self.stack.state.external.loads()
        return found


@pytest.fixture
async def proxied(
    redis_server: BundledRedis, namespace: str, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Proxied]:
    monkeypatch.setenv("EXT_KEY", "secret-of-the-server")
    config = make_config(redis_server.url, namespace, short_dir, max_open_requests=8)
    async with upstreams(2) as (a, b):
        external = [ExternalModel("ext", (a.url, b.url), 1.0, 0.2, ("alias",), "EXT_KEY")]
        async with stack_of(msgspec.structs.replace(config, external=external)) as stack:
            yield Proxied(stack, a, b)


def sample(text: str, name: str, **labels: str) -> float:
    """Returns the sum of the samples with these labels."""
    found = (s for family in text_string_to_metric_families(text) for s in family.samples)
    return sum(s.value for s in found if s.name == name and labels.items() <= s.labels.items())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_an_answer_is_the_servers_own(proxied: Proxied) -> None:
    answer = await proxied.post("/v1/completions?x=1", logit_bias={"3": 1.50})
    assert (answer.status_code, answer.json()) == (200, ANSWER)
    [text] = proxied.a.heads
    assert text.startswith("POST /v1/completions?x=1 ")
    assert "authorization: Bearer secret-of-the-server" in text
    assert f"x-request-id: {answer.headers['x-request-id']}" in text
    assert json.loads(proxied.a.bodies[0]) == {
        "model": "served",
        "prompt": "hello",
        "logit_bias": {"3": 1.5},
    }
    metrics = (await proxied.stack.client.get("/metrics")).text
    assert sample(metrics, "prism_requests_total", model="ext", outcome="ok") == 1
    assert sample(metrics, "prism_prompt_tokens_total", model="ext") == 7
    assert sample(metrics, "prism_output_tokens_total", model="ext") == 3
    # The time of the first token is not known.
    assert sample(metrics, "prism_e2e_seconds_count", model="ext") == 1
    assert sample(metrics, "prism_slo_total", model="ext") == 0


async def test_a_stream_is_the_servers_own(proxied: Proxied) -> None:
    proxied.a.script = streamed()
    answer = await proxied.post(model="alias", stream=True)
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.content == b"".join([*EVENTS, DONE])
    metrics = (await proxied.stack.client.get("/metrics")).text
    assert sample(metrics, "prism_output_tokens_total", model="ext") == len(EVENTS)


async def test_an_sdk_reads_it(proxied: Proxied) -> None:
    client = openai.AsyncOpenAI(base_url=f"{proxied.stack.url}/v1", api_key="none")
    made = await client.completions.create(model="ext", prompt="hello")
    assert made.choices[0].text == "hi"
    assert [model.id async for model in client.models.list()] == ["chat", "base", "ext", "alias"]
    assert (await client.models.retrieve("alias")).owned_by == "external"
    await client.close()


async def test_models_of_engines_are_served_beside(proxied: Proxied) -> None:
    proxied.stack.agent.script = answering([*ids_of("yes"), 0])
    mine = await proxied.post(model="base", temperature=0)
    assert mine.json()["choices"][0]["text"] == "yes"
    unknown = await proxied.post(model="nobody")
    assert unknown.status_code == 404
    assert "available models: chat, base, ext, alias" in unknown.text
    wrong = await proxied.stack.client.post("/v1/completions", content=b'{"model": "ext"')
    assert wrong.status_code == 400
    assert proxied.a.bodies == []


@pytest.mark.parametrize("broken", [lost, refused(503), streamed(0, ends=False)])
async def test_another_server_answers_if_one_does_not(proxied: Proxied, broken: Script) -> None:
    proxied.a.script = broken
    assert (await proxied.post()).json() == ANSWER
    assert (len(proxied.a.bodies), len(proxied.b.bodies)) == (1, 1)


async def test_a_server_that_was_lost_is_the_last_choice(proxied: Proxied) -> None:
    proxied.a.script = lost
    for _ in range(3):
        assert (await proxied.post()).json() == ANSWER
    assert (len(proxied.a.bodies), len(proxied.b.bodies)) == (1, 3)


async def test_the_servers_refusal_of_a_request_is_passed_on(proxied: Proxied) -> None:
    proxied.a.script = refused(400)
    answer = await proxied.post()
    assert (answer.status_code, answer.json()) == (400, {"error": {"message": "no"}})
    assert proxied.b.bodies == []


async def test_a_request_that_may_end_servers_is_sent_twice_at_most(proxied: Proxied) -> None:
    proxied.a.script = proxied.b.script = lost
    answer = await proxied.post()
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert answer.json()["error"]["code"] == "server_lost"
    assert (len(proxied.a.bodies), len(proxied.b.bodies)) == (1, 1)
    metrics = (await proxied.stack.client.get("/metrics")).text
    assert sample(metrics, "prism_requests_total", model="ext", outcome="server_lost") == 1


async def test_a_server_that_is_not_available_is_the_last_choice(proxied: Proxied) -> None:
    proxied.a.script = refused(503)
    for _ in range(3):
        assert (await proxied.post()).json() == ANSWER
    assert (len(proxied.a.bodies), len(proxied.b.bodies)) == (1, 3)


async def test_a_connection_that_the_server_closes_is_no_failure(proxied: Proxied) -> None:
    """Sends to servers that keep connections open and close them at the next request."""
    proxied.a.keeps = proxied.b.keeps = True
    for _ in range(4):
        assert (await proxied.post()).json() == ANSWER


async def test_another_name_of_the_model_is_found(proxied: Proxied) -> None:
    assert (await proxied.post()).json() == ANSWER
    proxied.a.served_name, proxied.a.script = "renamed", refused(404)
    assert (await proxied.post()).status_code == 404
    proxied.a.script = whole
    assert (await proxied.post()).json() == ANSWER
    assert json.loads(proxied.a.bodies[-1])["model"] == "renamed"


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "ext", "prompt": ' + b"[" * 100_000,
        b'{"model": "\xff"}',
        b'{"model": "base", \xff}',
    ],
)
async def test_a_body_that_is_not_json_is_refused(proxied: Proxied, body: bytes) -> None:
    answer = await proxied.stack.client.post("/v1/completions", content=body)
    assert answer.status_code == 400, answer.text
    assert proxied.a.bodies == []


async def test_events_with_carriage_returns_arrive_one_by_one(proxied: Proxied) -> None:
    crlf = [event.replace(b"\n", b"\r\n") for event in EVENTS]
    proxied.a.script = streamed(2, ends=False, events=crlf)
    answer = await proxied.post(stream=True)
    assert answer.content.startswith(b"".join(crlf[:2]) + b'data: {"error":')


async def test_an_event_without_an_end_is_passed_on(proxied: Proxied) -> None:
    long = [b"data: " + b"x" * (3 << 20)]
    proxied.a.script = streamed(1, events=long)
    answer = await proxied.post(stream=True)
    assert answer.content == long[0] + DONE


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
async def test_a_server_lost_in_a_stream_ends_it_with_an_error(proxied: Proxied, path: str) -> None:
    proxied.a.script = streamed(2, ends=False, cut=9)
    answer = await proxied.post(path, stream=True)
    begin = b"".join(EVENTS[:2])
    assert answer.content.startswith(begin)
    rest = answer.content[len(begin) :]
    assert b"the server of ext was lost; send the request again" in rest
    if path == "/v1/messages":
        assert rest.startswith(b"event: error\ndata: ")
    else:
        assert rest.startswith(b'data: {"error":')
        assert rest.endswith(DONE)
    assert proxied.b.bodies == []


async def test_a_client_that_leaves_frees_the_server(proxied: Proxied) -> None:
    proxied.a.step.clear()
    proxied.a.script = streamed()
    body = {"model": "ext", "prompt": "hello", "stream": True}
    async with proxied.stack.client.stream("POST", "/v1/completions", json=body) as answer:
        await anext(answer.aiter_bytes())
        assert proxied.loads[proxied.a.url].requests == 1
    await asyncio.wait_for(proxied.a.gone.wait(), 10)
    await until(lambda: proxied.loads == {})


async def test_the_load_counts_tokens_and_is_spread(proxied: Proxied) -> None:
    for each in (proxied.a, proxied.b):
        each.script = streamed()
        each.step.clear()
    asked = [asyncio.create_task(proxied.post(stream=True, prompt="x" * 400)) for _ in range(2)]
    await until(lambda: sum(load.tokens for load in proxied.loads.values()) > 200)
    assert [load.requests for load in proxied.loads.values()] == [1, 1]
    async with asyncio.timeout(10):
        while len((await proxied.stack.state.queue.frontends())["f0"].external) < 2:
            await asyncio.sleep(0.05)
    for each in (proxied.a, proxied.b):
        each.step.set()
    assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
    assert proxied.loads == {}


async def test_open_requests_are_limited(proxied: Proxied) -> None:
    proxied.a.step.clear()
    proxied.b.step.clear()
    proxied.a.script = proxied.b.script = streamed()
    asked = [asyncio.create_task(proxied.post(stream=True)) for _ in range(8)]
    await until(lambda: sum(load.requests for load in proxied.loads.values()) == 8)
    refused_one = await proxied.post()
    assert refused_one.status_code == 429
    assert "8 may be (frontend.max_open_requests)" in refused_one.text
    proxied.a.step.set()
    proxied.b.step.set()
    await asyncio.gather(*asked)


async def test_keys_limit_models_and_rates(
    redis_server: BundledRedis, namespace: str, short_dir: Path
) -> None:
    config = make_config(redis_server.url, namespace, short_dir)
    keys = [ApiKey("one", hashed(KEY), models=["ext"], requests_per_minute=1)]
    async with upstreams(1) as [upstream]:
        external = [ExternalModel(n, (upstream.url,), 1.0, 0.2) for n in ("ext", "other")]
        config = msgspec.structs.replace(config, keys=keys, external=external)
        async with stack_of(config) as stack:
            bearer = {"authorization": f"Bearer {KEY}"}

            async def ask(model: str, headers: dict[str, str]) -> int:
                body = {"model": model, "prompt": "hello"}
                answer = await stack.client.post("/v1/completions", json=body, headers=headers)
                return answer.status_code

            assert await ask("ext", {}) == 401
            assert await ask("other", bearer) == 404
            assert await ask("ext", bearer) == 200
            assert await ask("ext", bearer) == 429
            assert len(upstream.heads) == 1
            assert KEY not in upstream.heads[0]


async def test_a_flood_on_one_model_leaves_the_others_their_part(
    redis_server: BundledRedis, namespace: str, short_dir: Path
) -> None:
    config = make_config(redis_server.url, namespace, short_dir, max_open_requests=8)
    async with upstreams(2) as (a, b):
        external = [ExternalModel(u, (s.url,), 1.0, 0.2) for u, s in (("a", a), ("b", b))]
        async with stack_of(msgspec.structs.replace(config, external=external)) as stack:
            a.step.clear()
            a.script = streamed()

            async def ask(model: str, *, stream: bool) -> int:
                body = {"model": model, "prompt": "x", "stream": stream}
                return (await stack.client.post("/v1/completions", json=body)).status_code

            flood = [asyncio.create_task(ask("a", stream=True)) for _ in range(8)]
            await until(lambda: sum(task.done() for task in flood) == 2)
            assert await ask("b", stream=False) == 200
            a.step.set()
            assert sorted(await asyncio.gather(*flood)) == [200] * 6 + [429] * 2


@pytest.mark.parametrize("names", [("prompt", "completion"), ("input", "output")])
async def test_tokens_of_whole_answers_are_charged(
    redis_server: BundledRedis, namespace: str, short_dir: Path, names: tuple[str, str]
) -> None:
    config = make_config(redis_server.url, namespace, short_dir)
    keys = [ApiKey("one", hashed(KEY), tokens_per_minute=1000)]
    async with upstreams(1) as [upstream]:
        usage = dict(zip((f"{name}_tokens" for name in names), (5, 990), strict=True))
        upstream.answer = {**ANSWER, "usage": usage}
        external = [ExternalModel("ext", (upstream.url,), 1.0, 0.2)]
        config = msgspec.structs.replace(config, keys=keys, external=external)
        async with stack_of(config) as stack:
            bearer = {"authorization": f"Bearer {KEY}"}

            async def ask() -> int:
                body = {"model": "ext", "prompt": "hello" * 10}
                path = "/v1/messages"
                return (await stack.client.post(path, json=body, headers=bearer)).status_code

            assert await ask() == 200
            async with asyncio.timeout(10):
                while await ask() != 429:
                    await asyncio.sleep(0.05)


async def test_a_request_waits_for_a_sleeping_server_and_leaves_it(
    redis_server: BundledRedis, namespace: str, short_dir: Path
) -> None:
    config = make_config(redis_server.url, namespace, short_dir)
    async with upstreams(1) as [upstream]:
        external = [ExternalModel("ext", (upstream.url,), 1.0, 0.2, sleep_after_s=1.0)]
        async with stack_of(msgspec.structs.replace(config, external=external)) as stack:
            sleep, body = stack.state.queue.sleep, {"model": "ext", "prompt": "hello"}

            async def entered() -> int:
                found = await sleep.look("scheduler", [upstream.url], takes_over=True)
                assert found is not None
                return found.entered[upstream.url]

            async def until_entered(count: int) -> None:
                async with asyncio.timeout(10):
                    while await entered() != count:
                        await asyncio.sleep(0.01)

            await until_entered(0)
            assert await sleep.claim("scheduler", upstream.url, '{"junk')
            posts = [stack.client.post("/v1/completions", json=body) for _ in range(3)]
            waiting = [asyncio.create_task(post) for post in posts]
            await until_entered(3)
            waiting.pop().cancel()
            await until_entered(2)
            assert upstream.bodies == []
            await sleep.write("scheduler", upstream.url, "")
            assert {each.status_code for each in await asyncio.gather(*waiting)} == {200}
            await until_entered(0)
