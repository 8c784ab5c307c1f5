"""A model comes up on the second machine with weights from the first one's store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from prism.engines.fake import expected_tokens
from prism.queueing.server import BundledRedis
from tests.acceptance.conftest import prepare
from tests.acceptance.harness import model_yaml
from tests.acceptance.reference import is_greedy
from tests.serve.conftest import until
from tests.serve.test_nodes import DEVICE, Node, database, node, status, write_nodes

__all__ = ["database"]
PROMPT = [9, 8, 7]
TOKENS = 24
START_S = 400
RATES = {"network_rate": "1GB", "disk_rate": "500MB"}
OTHER = {"a": "b", "b": "a"}


@contextmanager
def both(path: Path, **variables: str) -> Iterator[tuple[Node, Node]]:
    with ExitStack() as stack:
        first, second = (stack.enter_context(node(path, name, **variables)) for name in "ab")
        for each in (first, second):
            until(lambda: "ready in " in each.output(), "ready", START_S)  # noqa: B023
            each.await_ready()
        yield first, second


def home(made: Node, model: str) -> str:
    """Returns the node where the scheduler placed the model at the start."""
    until(lambda: status(made)["placement"].get(model), f"{model} is placed")
    return str(status(made)["placement"][model]).partition("@")[2]


def move(first: Node, model: str, target: str) -> None:
    for command in (("evict", model), ("activate", model, "--device", target)):
        done = first.operate(*command)
        assert done.returncode == 0, done.stderr
    until(lambda: first.post(model, prompt=PROMPT, max_tokens=1).status_code == 200, "an answer")


def tokens(made: Node, model: str) -> list[int]:
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(
        f"{made.url}/v1/completions",
        json={"model": model, "return_token_ids": True, **body},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def came_from(folder: Path, model: str, peer: str, taker: str) -> bool:
    logs = "".join(path.read_text() for path in (folder / f"{taker}-logs").rglob("*.log"))
    return f"{model} came from the weight store of {peer}" in logs


def test_an_activation_and_a_hint(tmp_path: Path, database: BundledRedis) -> None:
    """Fetches weights from a peer. The fake engine compares every byte with the store."""
    models: list[dict[str, Any]] = [{"name": name, "path": name} for name in "ab"]
    path = write_nodes(tmp_path, database.url, RATES, models=models)
    with both(path, PRISM_FAKE='{"load_weights": true}') as (first, second):
        source, kept = home(first, "a"), home(first, "b")
        target, other = (OTHER[node] for node in (source, kept))
        move(first, "a", f"host:0@{target}")
        assert tokens(second, "a") == expected_tokens(PROMPT, TOKENS)
        assert came_from(tmp_path, "a", source, target)
        done = second.operate("prefetch", "b", "--device", f"host:0@{other}")
        assert done.returncode == 0, done.stderr
        assert came_from(tmp_path, "b", kept, other)
        assert not came_from(tmp_path, "a", target, source)
        assert tokens(second, "b") == expected_tokens(PROMPT, TOKENS)


@pytest.mark.long
@pytest.mark.sglang
@pytest.mark.timeout(900)
def test_what_sglang_loaded(tmp_path: Path, database: BundledRedis) -> None:
    """Fetches weights in the form of the first machine's engine, so that no file loader runs."""
    prepare("tiny-llama")
    path = write_nodes(
        tmp_path,
        database.url,
        {**RATES, "devices": [{**DEVICE, "capacity": "192MiB", "engines": 1}]},
        models=[model_yaml("tiny-llama")],
        engine={"adapter": "sglang", "drain_timeout": "10s"},
    )
    with both(path) as (first, second):
        source = home(first, "tiny-llama")
        before = tokens(first, "tiny-llama")
        move(first, "tiny-llama", f"host:0@{OTHER[source]}")
        assert came_from(tmp_path, "tiny-llama", source, OTHER[source])
        assert tokens(second, "tiny-llama") == before
    assert is_greedy("tiny-llama", tuple(PROMPT), tuple(before))
