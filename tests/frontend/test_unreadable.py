"""Models whose tokenizer cannot be read are reported and left out; the others are served."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from prism.errors import ConfigError
from prism.frontend.app import create_app
from prism.frontend.config_watcher import apply_config
from prism.frontend.requests import model_catalog
from prism.frontend.requests.model_catalog import ModelCatalog
from prism.frontend.text.chat_template import load_chat_template
from prism.messages.cluster import ClusterStatus
from prism.queueing.server import BundledRedis
from tests.frontend.conftest import listening, make_config
from tests.frontend.scripted_agent import ScriptedAgent, answering


@pytest.fixture
def sound(redis_server: BundledRedis, namespace: str, short_dir: Path) -> Any:
    return make_config(redis_server.url, namespace, short_dir)


@pytest.fixture
async def config(redis_server: BundledRedis, namespace: str, short_dir: Path) -> Any:
    made = make_config(redis_server.url, namespace, short_dir)
    (Path(made.model("chat").path) / "tokenizer.json").write_text("{")
    return made


async def test_only_that_model_is_refused_until_its_file_is_repaired(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_catalog, "RETRY_S", 0.05)
    app = create_app(config, "f0", without_unreadable=True)
    async with (
        ScriptedAgent(config) as agent,
        listening(app) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        agent.script = answering([7, 8, 0])

        async def post(model: str) -> httpx.Response:
            return await client.post("/v1/completions", json={"model": model, "prompt": [9, 9]})

        assert (await post("base")).status_code == 200
        refused = await post("chat")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "model_unavailable"
        assert refused.json()["error"]["message"].startswith(
            "chat cannot be served now: cannot load"
        )
        await app.state.queue.publish_status(
            ClusterStatus(2e9, "prism", {}, [], ready=True, degraded={"host:1": "is lost"})
        )
        health = await client.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "ready")
        assert set(health.json()["degraded"]) == {"chat", "host:1"}
        good = Path(config.model("base").path) / "tokenizer.json"
        (Path(config.model("chat").path) / "tokenizer.json").write_bytes(good.read_bytes())
        while (await post("chat")).status_code != 200:
            pass
        assert set((await client.get("/health")).json()["degraded"]) == {"host:1"}


def test_a_template_that_cannot_be_read_is_named(config: Any) -> None:
    directory = Path(config.model("base").path)
    (directory / "chat_template.jinja").write_bytes(b"\xff{{ messages }}")
    with pytest.raises(ConfigError, match=r"cannot read .*chat_template\.jinja.*repair the file"):
        load_chat_template(directory, {})


BROKEN = ["{% unheard %}", "{{ 1 +", "{% for m in messages %}", "{{ x | unheard }}", "{{ f( }}"]


@pytest.mark.parametrize("source", BROKEN)
def test_a_template_that_is_not_jinja_is_named(config: Any, source: str) -> None:
    directory = Path(config.model("chat").path)
    with pytest.raises(ConfigError, match=r"chat template is not valid Jinja: .*; repair it"):
        load_chat_template(directory, {"chat_template": source})


@pytest.mark.parametrize("comes", ["at the start", "by a reload"])
async def test_a_broken_template_costs_conversations_of_its_model_alone(
    sound: Any, comes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recovers when the file is repaired."""
    monkeypatch.setattr(model_catalog, "RETRY_S", 0.05)
    config = sound
    settings = Path(config.model("chat").path) / "tokenizer_config.json"
    good = settings.read_text()
    settings.write_text(json.dumps({**json.loads(good), "chat_template": BROKEN[0]}))
    first = config if comes == "at the start" else replace(config, models=[config.model("base")])
    app = create_app(first, "f0")
    async with (
        ScriptedAgent(config) as agent,
        listening(app) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        agent.script = answering([7, 8, 0])
        if comes == "by a reload":
            state, new = app.state, replace(config, revision=1)
            await apply_config(new, state.live, state.catalog, state.dispatcher)

        async def post(path: str, model: str, **body: Any) -> httpx.Response:
            return await client.post(path, json={"model": model, **body})

        said = [{"role": "user", "content": "x"}]
        assert (await post("/v1/completions", "base", prompt=[9, 9])).status_code == 200
        assert (await post("/v1/completions", "chat", prompt=[9, 9])).status_code == 200
        for path in ("/v1/chat/completions", "/tokenize"):
            refused = await post(path, "chat", messages=said)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (503, "model_unavailable")
            assert "chat template is not valid Jinja: Encountered unknown tag" in error["message"]
        await app.state.queue.publish_status(ClusterStatus(2e9, "prism", {}, [], ready=True))
        assert set((await client.get("/health")).json()["degraded"]) == {"chat"}
        settings.write_text(good)
        while (await post("/v1/chat/completions", "chat", messages=said)).status_code != 200:
            pass


async def test_at_the_first_start_it_is_an_error(config: Any) -> None:
    app = create_app(config, "f0")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        async with app.router.lifespan_context(app):
            pass


async def test_a_reload_during_a_retry_keeps_its_models(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that a retry, which waits for files, does not undo a reload that ends meanwhile."""
    monkeypatch.setattr(model_catalog, "RETRY_S", 0.0)
    catalog = await ModelCatalog.load(config.models, without_unreadable=True)
    begun, reloaded, load = threading.Event(), threading.Event(), model_catalog.load_tokenizers

    def waits(models: Any, unreadable: dict[str, str]) -> Any:
        if [model.name for model in models] == ["chat"]:
            begun.set()
            assert reloaded.wait(30)
        return load(models, unreadable)

    monkeypatch.setattr(model_catalog, "load_tokenizers", waits)
    retries = asyncio.create_task(catalog.retry_unreadable())
    assert await asyncio.to_thread(begun.wait, 30)
    added = replace(config.model("base"), name="added")
    await catalog.replace([*config.models, added])
    reloaded.set()
    begun.clear()
    assert await asyncio.to_thread(begun.wait, 30)  # the next retry: the first one has ended
    retries.cancel()
    assert catalog.tokenizer("added") is not None
