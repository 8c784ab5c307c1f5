"""Machines of a running cluster are replaced, and come and go, and no request fails."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
import yaml

from prism.engines.fake import expected_tokens
from prism.queueing.server import BundledRedis
from tests.ports import free_port
from tests.serve.conftest import Cluster, until
from tests.serve.test_nodes import (
    Node,
    database,
    keys_left,
    leader,
    node,
    refusal,
    status,
    write_nodes,
)

__all__ = ["database"]
MODELS = [{"name": n, "path": n} for n in ("a", "b")]
PAIR = {"host:0@a", "host:0@b"}
NEWER = "from prism.serve.node import registration; registration.version = lambda _: '9.9.9'"
TOKENS = 60


def answer(nodes: dict[str, Cluster], number: int) -> str:
    """Returns the node that has answered.

    Like a load balancer, the client skips a node that refuses or does not answer.
    """
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
    """Sends requests all the time and yields the nodes that answered them. None may fail."""
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
    agents = httpx.get(f"{cluster.url}/status").json()["agents"]
    return {m["model"] for a in agents if a["device"].endswith(f"@{name}") for m in a["models"]}


def said(cluster: Node, *arguments: str) -> str:
    done = cluster.operate(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def said_by_all(running: dict[str, Node], *arguments: str) -> list[str]:
    with ThreadPoolExecutor(len(running)) as pool:
        return list(pool.map(lambda each: said(each, *arguments), running.values()))


def drained(running: dict[str, Node], name: str, by: str) -> None:
    """Drains node `name` by a command on machine `by`."""
    safe, empty = said(running[by], "drain", f"@{name}").splitlines()[-2:]
    assert safe == f"prism-serve on {name} may be stopped now: no request uses its devices"
    assert empty.startswith(f"@{name} is empty after ")
    print(empty)
    assert models_of(running[by], name) == set()


@pytest.mark.long
def test_a_newer_version_comes_machine_by_machine(tmp_path: Path, database: BundledRedis) -> None:
    """Drains, stops, starts and undrains each machine in turn, under load."""
    path = write_nodes(tmp_path, database.url, models=MODELS)
    with ExitStack() as stack:
        running = {name: stack.enter_context(node(path, name)) for name in "ab"}
        for each in running.values():
            each.await_ready()
        nodes: dict[str, Cluster] = dict(running)
        with load(nodes) as answered:
            for name, other in ("ab", "ba"):
                until(lambda: {"a", "b"} <= set(answered[-50:]), "both answer")
                drained(running, name, by=other)
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
                    assert "node a joined, version 9.9.9" in running["b"].output()
        print(f"{len(answered)} requests")
    assert keys_left(database) == []


def rewritten(path: Path, nodes: list[dict[str, Any]]) -> None:
    data = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**data, "nodes": nodes}))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_machine_comes_and_goes(tmp_path: Path, database: BundledRedis) -> None:
    """Moves all of the other machines to a third one, scheduler included, and back, under load."""
    path = write_nodes(tmp_path, database.url, models=MODELS)
    two = yaml.safe_load(path.read_text())["nodes"]
    third = {**two[0], "name": "c", "address": "127.0.0.3", "port": free_port()}
    with ExitStack() as stack:
        running = {name: stack.enter_context(node(path, name)) for name in "ab"}
        for each in running.values():
            each.await_ready()
        nodes: dict[str, Cluster] = dict(running)
        with load(nodes, clients=3) as answered:
            rewritten(path, [*two, third])
            assert "nodes: a has other devices" in refusal(path, "c")
            for each in running.values():
                assert said(each, "reload") == "reloaded: added node c\n"
            running["c"] = nodes["c"] = stack.enter_context(node(path, "c"))
            running["c"].await_ready()
            for name in "ab":
                drained(running, name, by="c")
            assert models_of(running["a"], "c") == {"a", "b"}
            for name in "ab":  # only c can plan, and all processes find it
                os.kill(running[name].child("prism.cluster"), signal.SIGSTOP)
            until(lambda: leader(database) == "c", "c plans")
            for name in "ab":
                os.kill(running[name].child("prism.cluster"), signal.SIGCONT)
                said(running["c"], "undrain", f"@{name}")
            rewritten(path, two)
            assert "nodes: c is in use" in running["a"].operate("reload").stderr
            drained(running, "c", by="a")
            assert running["c"].stop() == 0
            del nodes["c"]
            for name in "ab":
                until(lambda name=name: removed(running[name]), "c is taken out")
            assert {agent["device"] for agent in status(running["a"])["agents"]} == PAIR
            assert not status(running["a"]).get("degraded")
            before = len(answered)
            until(lambda: len(answered) > before + 20, "requests")
        print(f"{len(answered)} requests")
    assert keys_left(database) == []


def removed(cluster: Node) -> bool:
    """Returns whether a reload removed node c. An agent that has just ended may prevent it."""
    return cluster.operate("reload").stdout == "reloaded: removed node c\n"
