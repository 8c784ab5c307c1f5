"""API keys: access, allowed models, and rates."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from prism.config.schema.access import ApiKey, check_origins, hashed
from prism.errors import ConfigError
from prism.queueing.request_queue import RequestQueue
from prism.queueing.server import BundledRedis
from tests.frontend.conftest import Stack, ids_of, make_config, stack_of
from tests.frontend.scripted_agent import ScriptedAgent, answering

ALL, ONE, FEW, ROOT = ("key-of-" + name + "-1234567890" for name in ("all", "one", "few", "root"))
KEYS = [
    ApiKey("all", hashed(ALL)),
    ApiKey("one", hashed(ONE), models=["base"]),
    ApiKey("few", hashed(FEW), requests_per_minute=2, tokens_per_minute=1000),
    ApiKey("root", hashed(ROOT), operator=True),
]


@pytest.fixture
async def guarded(
    redis_server: BundledRedis, namespace: str, short_dir: Path
) -> AsyncIterator[Stack]:
    config = make_config(redis_server.url, namespace, short_dir)
    async with stack_of(msgspec.structs.replace(config, keys=KEYS)) as stack:
        stack.agent.script = answering([*ids_of("yes"), 0])
        yield stack


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def ask(stack: Stack, key: str, **more: Any) -> httpx.Response:
    body = {"model": "base", "prompt": "hello", "temperature": 0, **more}
    return await stack.client.post("/v1/completions", json=body, headers=bearer(key))


async def test_nothing_without_a_key(guarded: Stack) -> None:
    for path in ("/health", "/openapi.json", "/docs"):
        assert (await guarded.client.get(path)).status_code != 401
    wrong: list[dict[str, str]] = [{}, bearer(ALL + "x"), {"Authorization": ALL}]
    for headers in (*wrong, bearer(hashed(ALL))):
        for path in ("/v1/models", "/status", "/metrics", "/nowhere"):
            refused = await guarded.client.get(path, headers=headers)
            asked = "Bearer" if path.startswith("/v1/") else 'Basic realm="Prism"'
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, asked)
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert "x-request-id" in refused.headers
    posted = await guarded.client.post("/v1/completions", json={"model": "base", "prompt": "x"})
    assert posted.status_code == 401
    assert guarded.agent.seen == []


async def test_what_each_key_may(guarded: Stack) -> None:
    assert (await ask(guarded, ALL)).status_code == 200
    both = await guarded.client.get("/v1/models", headers={"x-api-key": ALL})
    assert [m["id"] for m in both.json()["data"]] == ["chat", "base"]
    one = await guarded.client.get("/v1/models", headers=bearer(ONE))
    assert [m["id"] for m in one.json()["data"]] == ["base"]
    assert (await ask(guarded, ONE)).status_code == 200
    refused = await ask(guarded, ONE, model="chat")
    assert refused.status_code == 404
    assert "does not exist, or not for this key; available models: base" in refused.text
    assert (await guarded.client.get("/v1/models/chat", headers=bearer(ONE))).status_code == 404
    assert (await guarded.client.get("/metrics", headers=bearer(ALL))).status_code == 403
    counted = (await guarded.client.get("/metrics", headers=bearer(ROOT))).text
    page = await guarded.client.get("/dashboard/", auth=("anybody", ROOT))
    assert page.status_code == 200
    assert (await guarded.client.get("/dashboard/", auth=("root", ROOT + "x"))).status_code == 401
    # A browser would send the password for another site's page, too.
    asked = {"model": "base", "prompt": "x"}
    posted = await guarded.client.post("/v1/completions", json=asked, auth=("root", ROOT))
    assert posted.status_code == 401
    told = (await guarded.client.get("/openapi.json")).json()
    assert (told["components"]["securitySchemes"]["key"]["scheme"], told["security"]) == (
        "bearer",
        [{"key": []}],
    )
    lines = [x for x in counted.splitlines() if 'key="one"' in x and "_total" in x]
    values = {x.partition("{")[0] + x[-4:] for x in lines}
    prompt = f"prism_key_tokens_total {len(ids_of('hello'))}.0"
    assert {"prism_key_requests_total 1.0", prompt} <= values


async def test_clients_of_two_keys_may_count_alike(guarded: Stack) -> None:
    """Answers and bodies under an Idempotency-Key are separate for each API key."""
    answers = []
    for key, prompt in ((ALL, "hello"), (ONE, "hello"), (ROOT, "bye"), (ONE, "hello")):
        headers = {**bearer(key), "Idempotency-Key": "1"}
        body = {"model": "base", "prompt": prompt}
        answers.append(await guarded.client.post("/v1/completions", json=body, headers=headers))
    assert [each.status_code for each in answers] == [200] * 4
    first, second, third, again = (each.json()["id"] for each in answers)
    assert len({first, second, third}) == 3
    assert again == second


async def test_rates_say_when_to_try_again(guarded: Stack) -> None:
    answers = [await ask(guarded, FEW) for _ in range(3)]
    assert [a.status_code for a in answers] == [200, 200, 429]
    assert 1 <= int(answers[2].headers["retry-after"]) <= 30
    assert "the key few is limited to 2 requests and 1000 tokens per minute" in answers[2].text
    assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"
    assert (await ask(guarded, ALL)).status_code == 200
    assert len(guarded.agent.seen) == 3


async def test_what_is_refused_costs_nothing(
    redis_server: BundledRedis, namespace: str, short_dir: Path
) -> None:
    """Counts rejected requests neither against a key's rate nor in its token counters."""
    config = make_config(redis_server.url, namespace, short_dir, max_open_requests=1)
    async with stack_of(msgspec.structs.replace(config, keys=KEYS)) as stack:
        first = asyncio.create_task(ask(stack, ALL))
        while not stack.agent.seen:
            await asyncio.sleep(0.01)
        for _ in range(5):
            refused = await ask(stack, FEW)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "frontend_full")
        counted = (await stack.client.get("/metrics", headers=bearer(ROOT))).text
        one = f'_prompt_tokens_total{{frontend="f0",model="base"}} {len(ids_of("hello"))}.0'
        assert one in counted
        assert 'key="few",kind="prompt",model="base"} 0.0' in counted
        first.cancel()
        while len(stack.state.dispatcher.log):
            await asyncio.sleep(0.01)
        stack.agent.script = answering([*ids_of("yes"), 0])
        assert (await ask(stack, FEW)).status_code == 200


async def test_a_key_with_a_rate_waits_for_redis(namespace: str, short_dir: Path) -> None:
    (short_dir / "redis").mkdir()
    with BundledRedis(short_dir / "redis") as redis:
        config = make_config(redis.url, namespace, short_dir)
        async with stack_of(msgspec.structs.replace(config, keys=KEYS)) as stack:
            redis.kill()
            waiting = asyncio.create_task(ask(stack, FEW))
            await asyncio.sleep(0.5)
            assert not waiting.done()
            redis.start()
            async with ScriptedAgent(config) as restarted:
                restarted.script = answering([*ids_of("yes"), 0])
                assert (await waiting).status_code == 200


async def test_rates_hold_for_all_frontends(redis_server: BundledRedis, namespace: str) -> None:
    """Shares rates between connections; output tokens are charged after the answer."""
    one, two = (RequestQueue.connect(redis_server.url, namespace) for _ in range(2))
    try:
        waits = await asyncio.gather(*(q.take_rate("k", 6, 0, 5) for q in (one, two) * 6))
        assert sorted(w > 0 for w in waits) == [False] * 6 + [True] * 6
        assert await one.take_rate("t", 0, 600, 100) == 0
        assert await two.take_rate("t", 0, 600, 2000, spent=True) == 0
        began_s = time.monotonic()
        owed_s = await one.take_rate("t", 0, 600, 10)
        assert 140 < owed_s + (time.monotonic() - began_s) <= 151.1
        await two.refund_rate("t", 0, 600, 2000)
        assert await one.take_rate("t", 0, 600, 10) == 0
        # More than a minute's worth at once is let in when all of it is there.
        assert await one.take_rate("big", 0, 600, 5000) == 0
        assert await one.take_rate("big", 0, 600, 1) > 400
    finally:
        await one.close()
        await two.close()


@pytest.mark.parametrize(
    ("origin", "remedy"),
    [
        ("x", "https://x"),
        ("https://x.example/page?a=1", "https://x.example"),
        ("HTTP://me@X.example:80", "http://x.example"),
        ("https://x.example:0443", "https://x.example"),
        ("http://x.example:443/", "http://x.example:443"),
        ("https://*.x.example", "for example https://chat.example:8080, or * for all"),
        ("https://x.example:port", "for example https://chat.example:8080, or * for all"),
        ("", "for example https://chat.example:8080, or * for all"),
    ],
)
def test_an_origin_that_no_browser_sends(origin: str, remedy: str) -> None:
    check_origins(["*", "null", "http://localhost:3000", "http://[::1]:8", "app://a-b_c"])
    says = r"^frontend\.cors_origins\[1\]: .* is not a valid origin; write "
    with pytest.raises(ConfigError, match=f"{says}{re.escape(remedy)}$"):
        check_origins(["*", origin])
