"""A whole cluster under `prism-serve`: requests, operators, a frontend that dies."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import Any

import httpx
import pytest

from prism.engines.fake import expected_tokens
from tests.serve.conftest import Cluster, until

pytestmark = pytest.mark.quick

PROMPT = [9, 8, 7]


def test_completions_of_both_models(cluster: Cluster) -> None:
    for model in ("a", "b"):
        answer = cluster.post(model, return_token_ids=True, ignore_eos=True).json()
        assert answer["choices"][0]["token_ids"] == expected_tokens(PROMPT, 12)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == 15


def test_health_and_metrics(cluster: Cluster) -> None:
    assert httpx.get(f"{cluster.url}/health").json() == {"status": "ready"}
    metrics = httpx.get(f"{cluster.url}/metrics").text
    assert "prism_cluster_ready 1.0" in metrics
    assert 'prism_device_capacity_bytes{device="host:0"} 1.6777216e+07' in metrics


def state(cluster: Cluster) -> dict[str, Any]:
    done = cluster.operate("status", "--json")
    assert done.returncode == 0, done.stderr
    models = [m for agent in json.loads(done.stdout)["agents"] for m in agent["models"]]
    return {m["model"]: m["state"] for m in models}


def test_operators_evict_and_activate(cluster: Cluster) -> None:
    done = cluster.operate("evict", "b")
    assert done.returncode == 0, done.stderr
    assert "b" not in state(cluster)
    done = cluster.operate("activate", "b", "--device", "host:0")
    assert done.returncode == 0, done.stderr
    assert state(cluster)["b"] == "active"
    cluster.operate("evict", "b")
    assert cluster.post("b").status_code == 200


def test_operators_profile_an_activation(cluster: Cluster) -> None:
    assert cluster.operate("evict", "b").returncode == 0
    done = cluster.operate("activate", "b", "--gpu", "0", "--profile")
    assert done.returncode == 0, done.stderr
    for stage in ("engine", "shrink", "reserve", "weights", "build", "ready", "total"):
        assert stage in done.stdout
    known = json.loads(cluster.operate("activate", "b", "--json").stdout)["stages_s"]
    assert sum(known.values()) == pytest.approx(2 * known["total"], rel=0.1)
    metrics = httpx.get(f"{cluster.url}/metrics").text
    stage = 'prism_model_activation_stage_seconds{device="host:0",model="b",stage="weights"}'
    assert stage in metrics


def test_a_gpu_that_is_not_there_is_named(cluster: Cluster) -> None:
    done = cluster.operate("activate", "b", "--gpu", "7")
    assert done.returncode == 2
    assert done.stderr == "error: --gpu: 7 is not a device; devices: host:0\n"
    done = cluster.operate("activate", "b", "--gpu", "0", "--device", "host:0")
    assert "cannot be combined with --device" in done.stderr


def test_operators_flush(cluster: Cluster) -> None:
    done = cluster.operate("flush", "--json")
    assert json.loads(done.stdout)["ok"] is True


def test_operators_mistakes_are_named(cluster: Cluster) -> None:
    done = cluster.operate("activate", "zzz")
    assert done.returncode == 2
    assert done.stderr == "error: unknown model 'zzz'; models: a, b\n"
    done = cluster.operate("prefetch", "a", "--device", "host:9")
    assert (done.returncode, done.stderr[:25]) == (2, "error: unknown device 'ho")


def test_status_for_people(cluster: Cluster) -> None:
    table = cluster.operate("status").stdout
    assert "host:0" in table
    assert "policy prism, ready" in table


def test_the_cluster_as_it_changes(cluster: Cluster) -> None:
    done = cluster.operate("top", "--once")
    assert done.returncode == 0, done.stderr
    assert json.loads(cluster.operate("top", "--once", "--json").stdout)["models"] == ["a", "b"]
    assert "# weights" in done.stdout
    assert re.search(r"[#|:.]{40}", done.stdout)
    done = cluster.operate("logs", "scheduler", "-n", "3")
    assert (done.returncode, done.stdout.count("\n")) == (0, 3)
    everything = cluster.operate("logs").stdout
    assert all(f"{part}.log <==" in everything for part in ("frontend-f0", "agent-host0"))
    done = cluster.operate("logs", "nobody")
    assert (done.returncode, done.stderr[:31]) == (2, "error: PART: unknown log 'nobod")
    moved = cluster.operate("migrate", "a", "host:0")
    assert (moved.returncode, moved.stdout) == (0, "a is active on host:0\n")


def test_a_frontend_that_dies_is_replaced_on_the_same_port(cluster: Cluster) -> None:
    os.kill(cluster.child("prism.frontend"), signal.SIGKILL)
    until(lambda: "frontend-f0 ended (signal SIGKILL)" in cluster.output(), "notice")
    assert cluster.post().status_code == 200


def test_an_engine_that_dies_is_on_the_console(cluster: Cluster) -> None:
    assert cluster.post().status_code == 200
    [agent] = json.loads(cluster.operate("status", "--json").stdout)["agents"]
    os.kill(next(m["engine_pid"] for m in agent["models"] if m["model"] == "a"), signal.SIGKILL)
    until(lambda: "host:0: an engine has ended" in cluster.output(), "notice")
    assert cluster.post().status_code == 200


def test_a_redis_that_dies_comes_back_with_its_data(cluster: Cluster) -> None:
    os.kill(cluster.child("valkey-server"), signal.SIGKILL)
    until(lambda: "redis ended (signal SIGKILL); restarting" in cluster.output(), "notice")
    until(lambda: httpx.get(f"{cluster.url}/health").status_code == 200, "health")
    assert cluster.post().status_code == 200
