"""HTTP itself: methods, CORS, ids of requests, the access log, what /openapi.json says."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from prism.config.schema.cluster_config import FrontendConfig
from prism.queueing.server import BundledRedis
from tests.frontend.conftest import Stack, ids_of, make_config, stack_of
from tests.frontend.scripted_agent import answering

COMPLETION = {"model": "base", "prompt": "hello", "max_tokens": 3, "temperature": 0}
ORIGIN = "https://chat.example.org"


async def test_methods(stack: Stack) -> None:
    for path in ("/v1/models", "/v1/models/base", "/openapi.json", "/docs"):
        answer = await stack.client.head(path)
        assert (answer.status_code, answer.content) == (200, b""), path
        whole = await stack.client.get(path)
        assert answer.headers["content-type"] == whole.headers["content-type"]
    for path, allowed in (("/v1/models", "GET, HEAD"), ("/v1/completions", "POST")):
        wrong = await stack.client.delete(path)
        assert (wrong.status_code, wrong.headers["allow"]) == (405, f"{allowed}, OPTIONS")
        assert wrong.json()["error"]["type"] == "invalid_request_error"
        asked = await stack.client.options(path)
        assert (asked.status_code, asked.headers["allow"]) == (204, f"{allowed}, OPTIONS")
    assert (await stack.client.options("/nowhere")).status_code == 404
    nameless = await stack.client.get("/v1/models/")
    assert (nameless.status_code, nameless.json()["error"]["code"]) == (404, "model_not_found")
    assert (await stack.client.head("/v1/completions")).status_code == 405


async def test_an_id_for_each_request(stack: Stack) -> None:
    given = await stack.client.get("/v1/models", headers={"X-Request-ID": "trace/1:a"})
    assert given.headers["x-request-id"] == "trace/1:a"
    ids = set()
    for name in ("", "two words", "x" * 129, "\u00fc"):
        headers = {"x-request-id": name.encode()}
        answer = await stack.client.get("/v1/models", headers=headers)
        ids.add(answer.headers["x-request-id"])
    assert all(len(each) == 32 for each in ids)
    assert len(ids) == 4


async def test_the_access_log(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "prism.access")
    stack.agent.script = answering([*ids_of("yes"), 0])
    secret = {"Authorization": "Bearer sk-do-not-log", "x-request-id": "mine"}
    done = await stack.client.post("/v1/completions?q=secret", json=COMPLETION, headers=secret)
    async with stack.client.stream("POST", "/v1/completions", json=COMPLETION | {"stream": True}):
        pass
    await stack.client.get("/health")
    await stack.client.get("/no%0Awhere")
    lines = [r.getMessage() for r in caplog.records if r.name == "prism.access"]
    assert not any(word in line for line in lines for word in ("sk-do", "secret", "hello", "\n"))
    first, _, lost = (json.loads(line) for line in lines)
    assert first.pop("ms") > 0
    assert first == {
        "id": "mine", "method": "POST", "path": "/v1/completions", "client": "127.0.0.1",
        "model": "base", "generation": done.json()["id"],
        "prompt_tokens": len(ids_of("hello")),
        "output_tokens": done.json()["usage"]["completion_tokens"],
        "status": 200,
    }  # fmt: skip
    assert "path" not in lost  # it may be a prompt
    assert lost["status"] == 404


async def test_a_bug_has_an_id_too(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(stack.state.queue, "status", broken)
    answer = await stack.client.get("/status", headers={"x-request-id": "find-me"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "find-me")


async def test_no_origin_but_those_that_are_named(
    redis_server: BundledRedis, namespace: str, short_dir: Path
) -> None:
    config = make_config(
        redis_server.url, namespace, short_dir, cors_origins=[ORIGIN], max_open_requests=2
    )
    ask = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    async with stack_of(config) as stack:
        for origin, allowed in ((ORIGIN, ORIGIN), ("https://evil.example", None)):
            headers = {"Origin": origin}
            before = await stack.client.options("/v1/completions", headers=headers | ask)
            assert before.headers.get("access-control-allow-origin") == allowed
            assert (before.status_code == 200) == (allowed is not None)
            answer = await stack.client.get("/v1/models", headers=headers)
            assert answer.headers.get("access-control-allow-origin") == allowed
        # More prompts than could ever be open: trying again would not help.
        many = {"model": "base", "prompt": ["a", "b", "c"]}
        refused = await stack.client.post("/v1/completions", json=many)
        assert refused.status_code == 400
        assert (
            "requests 3 choices; at most 2 of base can be open"
            in refused.json()["error"]["message"]
        )


async def test_pages_of_other_sites_have_nothing_computed(
    redis_server: BundledRedis, namespace: str, short_dir: Path
) -> None:
    config = make_config(
        redis_server.url,
        namespace,
        short_dir,
        cors_origins=[ORIGIN],  # type: ignore[arg-type]
    )
    async with stack_of(config) as stack:
        stack.agent.script = answering(ids_of("yes"))
        for site, origin, status in (
            ("cross-site", "https://evil.example", 403),
            ("cross-site", ORIGIN, 200),
            ("same-origin", stack.url, 200),
            (None, ORIGIN, 200),
        ):
            headers = {"Origin": origin, "Content-Type": "text/plain"}
            headers |= {"Sec-Fetch-Site": site} if site else {}
            body = json.dumps(COMPLETION)
            answer = await stack.client.post("/v1/completions", content=body, headers=headers)
            assert answer.status_code == status, answer.text
        followed = await stack.client.get("/v1/models", headers={"Sec-Fetch-Site": "cross-site"})
        assert followed.status_code == 200
    assert len(stack.agent.seen) == 3


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        ("http://evil.example", None, 403),
        ("http://192.168.1.5:8000", "192.168.1.6:8000", 403),
        ("null", None, 403),
        ("http://[::1", None, 403),
        ("", None, 403),
        ("null", "", 403),
        ("http://evil.example@192.168.1.5", "evil.example", 403),
        (None, None, 200),  # no browser
        ("http://127.0.0.1:3000", None, 200),  # another port is the same site
        ("http://LAN.example", "lan.example:8000", 200),
        ("http://[fe80::1]:8000", "[fe80::1]:8000", 200),
    ],
)
async def test_browsers_that_do_not_name_the_site_are_judged_by_origin(
    stack: Stack, origin: str | None, host: str | None, status: int
) -> None:
    """Covers old browsers, and all browsers when the server is another machine without TLS."""
    sent = {"Origin": origin, "Host": host, "Content-Type": "text/plain"}
    headers = {name: value for name, value in sent.items() if value is not None}
    stack.agent.script = answering(ids_of("yes"))
    body = json.dumps(COMPLETION)
    answer = await stack.client.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == status, answer.text
    assert (await stack.client.get("/v1/models", headers=headers)).status_code == 200
    assert len(stack.agent.seen) == (status == 200)


async def test_without_the_option_there_is_no_cors(stack: Stack) -> None:
    answer = await stack.client.get("/v1/models", headers={"Origin": ORIGIN})
    assert "access-control-allow-origin" not in answer.headers
    assert FrontendConfig().cors_origins == []


async def test_openapi_has_bodies_and_errors(stack: Stack) -> None:
    made: dict[str, Any] = (await stack.client.get("/openapi.json")).json()
    schemas = made["components"]["schemas"]
    for path, name in (
        ("/v1/completions", "CompletionBody"),
        ("/v1/chat/completions", "ChatBody"),
        ("/v1/responses", "ResponsesBody"),
    ):
        posted = made["paths"][path]["post"]
        schema = posted["requestBody"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{name}"}
        assert {"200", "400", "401", "404", "413", "429", "503", "504"} <= set(posted["responses"])
        assert posted["responses"]["200"]["content"].keys() == {
            "application/json",
            "text/event-stream",
        }
    counters = made["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
    assert [*counters] == ["text/plain"]
    for path in ("/health", "/status"):
        away = made["paths"][path]["get"]["responses"]["503"]["content"]["application/json"]
        assert away["schema"]["required"] == ["status", "reason"]
    counted = made["paths"]["/tokenize"]["post"]
    assert "TokenizeBody" in str(counted["requestBody"])
    assert {"400", "404", "503"} <= set(counted["responses"])
    assert not {"422", "504"} & set(counted["responses"])
    assert {"type": "string"} in schemas["CompletionBody"]["properties"]["prompt"]["anyOf"]
    assert "422" not in made["paths"]["/v1/models/{name}"]["get"]["responses"]
    references = set(_references(made))
    assert references == {f"#/components/schemas/{name}" for name in schemas}


def _references(node: Any) -> list[str]:
    if isinstance(node, list):
        return [r for each in node for r in _references(each)]
    if not isinstance(node, dict):
        return []
    found = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
    return found + [r for each in node.values() for r in _references(each)]
