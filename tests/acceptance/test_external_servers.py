"""Two stock SGLang servers on one device as external servers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines.sharing import PAGE, Pair, opened_pair
from tests.engines.stock import SGLangServer, until
from tests.serve.conftest import Cluster, serving
from tests.sglang.models import LLAMA, QWEN3, prompts, spec_of

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

MODELS = (LLAMA, QWEN3)
ELASTIC = 12 << 20  # for both together, in addition to one request of each
CAPACITY = -(-(sum(spec_of(m).weight_bytes for m in MODELS) + (1 << 20)) // PAGE) * PAGE
CAPACITY += sum(5 * 128 * spec_of(model).token_bytes for model in MODELS) + ELASTIC


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with opened_pair(dict.fromkeys(MODELS, SGLangServer), CAPACITY) as made:
        yield made


def url_of(pair: Pair, model: str) -> str:
    return f"http://127.0.0.1:{pair.servers[model].port}"


def external(name: str, *urls: str) -> dict[str, Any]:
    return {"name": name, "adapter": "external", "servers": list(urls)}


@pytest.fixture
def cluster(pair: Pair, tmp_path: Path, short_dir: Path) -> Iterator[Cluster]:
    models = [external(f"roof-{name}", url_of(pair, name)) for name in MODELS]
    with serving(tmp_path, short_dir, devices=[], models=models) as made:
        yield made


def complete(url: str, model: str, prompt: list[int], tokens: int) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["choices"][0]
    return found


def complete_all(url: str, model: str, asked: list[list[int]], tokens: int) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda prompt: complete(url, model, prompt, tokens), asked))


def test_a_burst_takes_idle_memory_by_our_limits_and_answers_are_equal(
    pair: Pair, cluster: Cluster
) -> None:
    direct = url_of(pair, LLAMA)
    asked = prompts(LLAMA, 12, (200, 230), seed=5)
    alone = complete_all(direct, LLAMA, asked, 220)
    pair.flush()
    pair.fill_with_prefixes(QWEN3)
    held = pair.of(QWEN3)
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(complete_all, cluster.url, f"roof-{LLAMA}", asked, 220)
        until(lambda: pair.of(QWEN3).limit_bytes is not None)
        until(lambda: pair.of(LLAMA).committed_bytes > pair.half_bytes())
        limited = pair.of(QWEN3)
        assert limited.limit_bytes is not None
        assert limited.reserved_bytes <= limited.limit_bytes < held.reserved_bytes
        assert job.result() == alone
    until(lambda: all(pair.of(model).limit_bytes is None for model in MODELS))
    assert [pair.of(model).min_bytes for model in MODELS] == [
        5 * 128 * spec_of(model).token_bytes for model in MODELS
    ]


def test_a_stream_has_the_servers_text(pair: Pair, cluster: Cluster) -> None:
    """Leaves out ids and times, in which two answers of one server differ."""
    [prompt] = prompts(QWEN3, 1, (20, 30), seed=9)
    direct = url_of(pair, QWEN3)

    def texts(url: str, model: str) -> list[Any]:
        body = {"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json={**body, "stream": True}, timeout=60)
        lines = [line for line in answer.text.split("\n\n") if line and not line.endswith("[DONE]")]
        assert answer.text.endswith("data: [DONE]\n\n")
        return [httpx.Response(200, text=line[6:]).json()["choices"] for line in lines]

    mine, theirs = texts(cluster.url, f"roof-{QWEN3}"), texts(direct, QWEN3)
    assert _joined(mine) == _joined(theirs)


def _joined(choices: list[Any]) -> str:
    return "".join(choice[0]["text"] for choice in choices)


def test_a_killed_server_is_routed_around(pair: Pair, tmp_path: Path, short_dir: Path) -> None:
    """Runs last: it ends a server of the pair. The other one has other weights."""
    urls = [url_of(pair, name) for name in (QWEN3, LLAMA)]
    [prompt] = prompts(LLAMA, 1, (20, 30), seed=11)
    right = complete(urls[1], LLAMA, prompt, 4)
    with serving(tmp_path, short_dir, devices=[], models=[external("roof", *urls)]) as cluster:
        body = {"model": "roof", "prompt": prompt, "max_tokens": 400, "stream": True}
        with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            for process in pair.servers[QWEN3].children():
                process.kill()
            pair.servers[QWEN3].end()
            rest = list(lines)
        assert '"code":"server_lost"' in rest[-4]
        assert complete_all(cluster.url, "roof", [prompt] * 8, 4) == [right] * 8
        until(lambda: urls[0] in httpx.get(f"{cluster.url}/health").json().get("degraded", {}))
