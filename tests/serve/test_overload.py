"""A model that the policy gives up, in a real cluster of fake engines."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from prism.engines.fake import expected_tokens
from tests.policies import giving_up
from tests.policies.installed import install_giving_up
from tests.serve.conftest import Cluster, serving, until

# One request at a time runs, for longer than engine.drain_timeout.
FAKE = '{"decode_step_ms": 100}'
ENGINE = {"adapter": "fake", "static": "1MiB", "drain_timeout": "1s", "max_running": 1}
LONG = 40
ANSWER_S = 2.0


def refused(cluster: Cluster) -> bool:
    return bool(httpx.get(f"{cluster.url}/status").json()["overload"] == ["a"])


def check_rejected(answer: httpx.Response) -> None:
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["retry-after"]) > 0
    error = answer.json()["error"]
    assert error["code"] == "model_unavailable"
    assert error["message"] == f"a cannot be placed now: {giving_up.REASON}"


def test_it_is_rejected_by_name_and_comes_back(
    tmp_path: Path, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finishes the stream that runs, although it takes longer than engine.drain_timeout."""
    give_up = install_giving_up(tmp_path, monkeypatch)
    changes = {"policy": "giving-up", "engine": ENGINE, "journal": {"keep": "decisions"}}
    with serving(tmp_path, short_dir, FAKE, **changes) as cluster:
        for model in "ab":
            assert cluster.post(model).status_code == 200
        with ThreadPoolExecutor() as pool:
            asked = {"max_tokens": LONG, "return_token_ids": True, "ignore_eos": True}
            running = pool.submit(cluster.post, "a", **asked)
            until(lambda: report(cluster)["running"] == 1, "a runs")
            waiting = pool.submit(cluster.post, "a", prompt=[1, 2])
            until(lambda: report(cluster)["waiting"] == 1, "a waits")
            give_up("a")
            began_s = time.monotonic()
            check_rejected(waiting.result())
            assert time.monotonic() - began_s < ANSWER_S
            assert not running.done()
            tokens = running.result().json()["choices"][0]["token_ids"]
            assert tokens == expected_tokens([9, 8, 7], LONG)
        until(lambda: report(cluster) is None, "a is gone")
        for _ in range(3):
            began_s = time.monotonic()
            check_rejected(cluster.post("a"))
            assert time.monotonic() - began_s < ANSWER_S
            assert cluster.post("b").status_code == 200
        assert refused(cluster)
        assert httpx.get(f"{cluster.url}/health").json()["degraded"].keys() == {"a"}
        shown = " ".join(cluster.operate("status").stdout.split())
        assert f"a: requests are rejected: {giving_up.REASON}" in shown
        metrics = httpx.get(f"{cluster.url}/metrics").text
        assert 'prism_overload{model="a"} 1.0' in metrics
        assert 'model="a",outcome="model_unavailable"} 4.0' in metrics
        os.kill(cluster.child("prism.cluster"), 9)
        check_rejected(cluster.post("a"))
        until(lambda: "scheduler" not in cluster_troubles(cluster), "the scheduler is back")
        check_rejected(cluster.post("a"))
        give_up()
        until(lambda: cluster.post("a").status_code == 200, "a is served again")
        assert not refused(cluster)
    journal = "".join(path.read_text() for path in (tmp_path / "logs").rglob("*cluster*"))
    assert '"overload":true' in journal


def report(cluster: Cluster) -> dict[str, int] | None:
    agents = httpx.get(f"{cluster.url}/status").json()["agents"]
    return next((m for agent in agents for m in agent["models"] if m["model"] == "a"), None)


def cluster_troubles(cluster: Cluster) -> dict[str, str]:
    found: dict[str, str] = httpx.get(f"{cluster.url}/health").json().get("degraded", {})
    return found
