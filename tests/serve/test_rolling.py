"""Machines of a running cluster are replaced, and come and go, and no request fails."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event

import httpx
import pytest

from prism.engines.fake import expected_tokens
from prism.queueing.server import BundledRedis
from tests.serve.conftest import Cluster, until
from tests.serve.test_nodes import Node, database, keys_left, node, status, write_nodes

__all__ = ["database"]
MODELS = [{"name": n, "path": n} for n in ("a", "b")]
NEWER = "import prism.serve.node; prism.serve.node.version = lambda _: '9.9.9'"
TOKENS = 60


def answer(nodes: dict[str, Cluster], number: int) -> str:
    """Which node has answered. As a load balancer does: one that refuses, or does not answer, is
    passed over."""
    model, prompt = "ab"[number % 2], [9, 8, 7 + number % 50]
    body = {"prompt": prompt, "max_tokens": TOKENS, "return_token_ids": True, "ignore_eos": True}
    said = {}
    for name, each in sorted(nodes.items(), reverse=number % 4 > 1):
        try:
            got = each.post(model, **body)
        except httpx.TransportError as error:
            said[name] = repr(error)
            continue
        said[name] = got.text
        if got.status_code != 503:
            assert got.status_code == 200, said
            assert got.json()["choices"][0]["token_ids"] == expected_tokens(prompt, TOKENS)
            return name
    raise AssertionError(said)


@contextmanager
def load(nodes: dict[str, Cluster], clients: int = 6) -> Iterator[list[str]]:
    """Requests all the time; the nodes that answered them. None may fail."""
    enough, answered = Event(), list[str]()

    def ask(first: int) -> None:
        number = first
        while not enough.is_set():
            answered.append(answer(dict(nodes), number))
            number += clients

    with ThreadPoolExecutor(clients) as pool:
        asking = [pool.submit(ask, first) for first in range(clients)]
        try:
            yield answered
        finally:
            enough.set()
        for each in asking:
            each.result()


def models_of(cluster: Node, name: str) -> set[str]:
    agents = status(cluster)["agents"]
    return {m["model"] for a in agents if a["device"].endswith(f"@{name}") for m in a["models"]}


def drained(running: dict[str, Node], name: str) -> None:
    """Asked for on the other machine."""
    (other,) = (each for each in running if each != name)
    done = running[other].operate("drain", f"@{name}")
    assert done.returncode == 0, done.stderr
    safe, empty = done.stdout.splitlines()[-2:]
    assert safe == f"prism-serve may be stopped on {name} now: no request needs its devices"
    assert empty.startswith(f"@{name} is empty, and stays so, after ")
    print(empty)
    assert models_of(running[other], name) == set()


@pytest.mark.long
def test_a_newer_version_comes_machine_by_machine(tmp_path: Path, database: BundledRedis) -> None:
    """Drain, stop, start, undrain: each in turn, under load."""
    path = write_nodes(tmp_path, database.url, models=MODELS)
    with ExitStack() as stack:
        running = {name: stack.enter_context(node(path, name)) for name in "ab"}
        for each in running.values():
            each.await_ready()
        nodes: dict[str, Cluster] = dict(running)
        with load(nodes) as answered:
            for name in "ab":
                until(lambda: {"a", "b"} <= set(answered[-50:]), "both answer")
                drained(running, name)
                assert running[name].stop() == 0
                back = stack.enter_context(node(path, name, setup=NEWER))
                back.await_ready()
                nodes[name] = running[name] = back
                assert set(status(back)["drained"]) == {f"host:0@{name}"}
                before = len(answered)
                until(lambda least=before + 20: len(answered) > least, "requests meanwhile")
                assert models_of(back, name) == set()
                assert back.operate("undrain", f"@{name}").returncode == 0
                if name == "a":
                    assert "node a is there, version 9.9.9" in running["b"].output()
        print(f"{len(answered)} requests")
    assert keys_left(database) == []
