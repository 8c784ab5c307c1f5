"""Cluster on GPUs of the test libcuda, whose driver counts all processes.

Contexts are leased, engines that take more are replaced, and other processes that hold memory are
named.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import kvcached
from prism.config.checks.memory_needs import memory_need
from prism.config.resolved import read_resolved
from prism.config.schema.cluster_config import ClusterConfig
from prism.engines.fake import expected_tokens
from tests.kvcached.compiling import build_libcuda, build_libnvml, restart_libnvml
from tests.serve.conftest import Cluster, serving, until

MIB = 1 << 20
CONTEXT = 4 * MIB
LEAK = 24 * MIB
ENGINE = {"adapter": "fake", "static": "6MiB", "drain_timeout": "10s"}
TOKENS = 200

HOLD = """
import sys
import kvcached
device = kvcached.Device.open(
    "cuda:0", capacity_bytes=128 << 20, page_bytes=64 << 10, namespace=sys.argv[1]
)
client = device.client("holder")
tensor = client.alloc_virtual_tensor(int(sys.argv[2]))
tensor.map(0, int(sys.argv[2]))
print("holds", flush=True)
sys.stdin.read()
client.close()
device.destroy()
"""


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets up two GPUs of 128 MiB, with contexts of 4 MiB.

    Memory of dead processes is freed after a moment.
    """
    monkeypatch.setenv("KVCACHED_LIBCUDA", str(build_libcuda()))
    monkeypatch.setenv("KVCACHED_LIBNVML", str(build_libnvml()))
    monkeypatch.setenv("KVCACHED_TEST_CUDA_BYTES", str(128 * MIB))
    monkeypatch.setenv("KVCACHED_TEST_CUDA_CONTEXT_BYTES", str(CONTEXT))
    monkeypatch.setenv("KVCACHED_TEST_CUDA_TEARDOWN_MS", "300")
    restart_libnvml()


@contextmanager
def gpu_cluster(
    folder: Path, temporary: Path, gpus: int = 1, tp: int = 1, slack: str = "2MiB", **options: Any
) -> Iterator[Cluster]:
    fake = {"cpu_reads_gpu": True, "context_bytes": CONTEXT, **options}
    devices = [
        {"name": f"cuda:{n}", "capacity": "64MiB", "page": "64KiB", "engines": 2}
        for n in range(gpus)
    ]
    models = [{"name": "a", "path": "a", "tp": tp}, {"name": "b", "path": "b"}]
    engine, text = {**ENGINE, "memory_slack": slack}, json.dumps(fake)
    with serving(folder, temporary, text, devices=devices, models=models, engine=engine) as made:
        yield made


def resolved(cluster: Cluster) -> ClusterConfig:
    return read_resolved(cluster.run_dir / "cluster.json")


def ledger(cluster: Cluster, device: str = "cuda:0") -> kvcached.Device:
    return kvcached.Device.open(device, namespace=resolved(cluster).namespace)


def metric(cluster: Cluster, name: str) -> float:
    text = httpx.get(f"{cluster.url}/metrics").text
    found = re.search(rf'^{name}{{device="cuda:0"}} (\S+)$', text, re.MULTILINE)
    return float(found[1]) if found else float("nan")


def answer(cluster: Cluster, number: int, model: str = "a") -> bool:
    """Returns whether one answer is right. Its request outlasts the tolerance for an overdraft."""
    prompt = [20 + number] * 8
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True}
    more = {"return_token_ids": True, "temperature": 0}
    response = httpx.post(f"{cluster.url}/v1/completions", json={**body, **more}, timeout=120)
    assert response.status_code == 200, response.text
    ids: list[int] = response.json()["choices"][0]["token_ids"]
    return ids == expected_tokens(prompt, TOKENS)


def test_an_engine_that_takes_too_much_is_replaced_and_its_requests_go_on(
    tmp_path: Path, short_dir: Path
) -> None:
    faults = {"leak_bytes": LEAK, "once_file": str(tmp_path / "once"), "decode_step_ms": 100}
    with gpu_cluster(tmp_path, short_dir, **faults) as cluster, ThreadPoolExecutor(4) as pool:
        # The first engine to be activated, of a or of b, takes too much.
        answers = [pool.submit(answer, cluster, number, "abab"[number]) for number in range(4)]
        until(lambda: metric(cluster, "prism_engine_overdrafts_total") == 1, "replacement", 60)
        assert all(future.result() for future in answers)
        [agent] = json.loads(cluster.operate("status", "--json").stdout)["agents"]
        for model in agent["models"]:
            assert (model["state"], model.get("failed_total", 0)) == ("active", 0)
        assert agent["engine_restarts_total"] == agent["gpu"]["replaced_total"] == 1
        until(lambda: metric(cluster, "prism_device_memory_drift_bytes") <= 0, "no drift")
        assert "engines replaced" in cluster.operate("status").stdout
        run_dir_logs = tmp_path / "logs"
        assert cluster.stop() == 0
        logs = "".join(path.read_text() for path in run_dir_logs.rglob("*.log"))
        assert "is replaced: it holds " in logs
        [trace] = run_dir_logs.rglob("activations-cuda0.trace.json")
        noted = [e for e in json.loads(trace.read_text().rstrip(",\n") + "]") if e["ph"] == "i"]
        assert [e["name"] for e in noted] == ["replaced"]
        assert noted[0]["args"]["model"] in {"a", "b"}
        assert re.match(
            r"it holds 2\d(\.\d+)?MiB of cuda:0 beyond its lease", noted[0]["args"]["why"]
        )


def test_leases_are_what_check_claims_and_what_the_driver_counts(
    tmp_path: Path, short_dir: Path
) -> None:
    with gpu_cluster(tmp_path, short_dir) as cluster:
        config, device = resolved(cluster), ledger(cluster)
        place, [a, b] = config.devices[0], config.models  # of one shape
        for name in ("a", "b"):
            cluster.operate("evict", name)
        until(lambda: device.usage().static_bytes == place.engines_bytes, "contexts alone")
        assert place.engines_bytes == 2 * CONTEXT
        assert driver_bytes(device) == 2 * CONTEXT
        for model in (a, b):
            assert cluster.operate("activate", model.name).returncode == 0
        for client in device.usage().clients:
            # Pages beyond the guaranteed ones are spares, which any client may have.
            claim = memory_need(a, place, config.engine)
            assert client.min_bytes == claim.kv_bytes
            assert client.static_bytes == CONTEXT + claim.static_bytes + a.weight_bytes
            assert a.weight_bytes <= claim.weight_bytes < a.weight_bytes + place.page_bytes
        assert cluster.post("a").status_code == 200
        for name in ("a", "b"):
            assert cluster.operate("evict", name).returncode == 0
        until(lambda: driver_bytes(device) == 2 * CONTEXT, "all given back")
        until(lambda: metric(cluster, "prism_device_memory_drift_bytes") == 0, "no drift")
        assert device.usage().reserved_bytes == 2 * CONTEXT
        device.close()
        assert cluster.stop() == 0


def driver_bytes(device: kvcached.Device) -> int:
    memory = device.driver_memory()
    assert memory is not None
    return memory.used_bytes


@contextmanager
def holder(namespace: str, size_bytes: int) -> Iterator[int]:
    """Runs another user of the GPU and yields its pid."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, namespace, str(size_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"holds\n"
        yield process.pid
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def test_a_capacity_that_others_hold_is_refused_with_their_names(
    tmp_path: Path, short_dir: Path, namespace: str
) -> None:
    with (
        holder(namespace, 80 * MIB) as pid,
        pytest.raises(AssertionError, match=rf"error: devices\[0\]: .*pid {pid} .*84 MiB"),
        gpu_cluster(tmp_path, short_dir),
    ):
        pass


def test_a_neighbour_is_named(tmp_path: Path, short_dir: Path, namespace: str) -> None:
    """Reports the excess of an engine that is within the slack, and keeps the engine."""
    faults = {"leak_bytes": 8 * MIB, "once_file": str(tmp_path / "once")}
    with (
        gpu_cluster(tmp_path, short_dir, slack="64MiB", **faults) as cluster,
        holder(namespace, 80 * MIB) as pid,
    ):
        until(lambda: metric(cluster, "prism_device_foreign_bytes") == 84 * MIB, "it is seen")
        until(lambda: metric(cluster, "prism_device_memory_drift_bytes") > 2 * MIB, "drift")
        assert metric(cluster, "prism_device_memory_short_bytes") > 0
        assert f"{pid} (" in cluster.operate("status").stdout
        logs = tmp_path / "logs"
        until(lambda: f"process {pid} (" in _text(logs), "it is told")
        assert "; end the process or lower capacity" in _text(logs)
        assert cluster.post("a").status_code == 200
        assert metric(cluster, "prism_engine_overdrafts_total") == 0


def _text(logs: Path) -> str:
    return "".join(path.read_text() for path in logs.rglob("*.log"))


def test_each_rank_leases_a_context_on_its_own_gpu(tmp_path: Path, short_dir: Path) -> None:
    """Leases one context in addition to those of the device's own engines.

    The claim of a spread model includes it.
    """
    with gpu_cluster(tmp_path, short_dir, gpus=2, tp=2) as cluster:
        until(lambda: cluster.post("a").status_code == 200, "it answers")
        config = resolved(cluster)
        claim = memory_need(config.models[0], config.devices[0], config.engine)
        [rank] = [
            client
            for device in ("cuda:0", "cuda:1")
            for client in ledger(cluster, device).usage().clients
            if client.name.endswith(".1")
        ]
        assert rank.min_bytes == claim.kv_bytes
        assert 0 <= claim.weight_bytes + claim.static_bytes - rank.static_bytes < 64 << 10
        assert cluster.stop() == 0


def test_an_idle_engine_that_takes_too_much_is_replaced(tmp_path: Path, short_dir: Path) -> None:
    faults = {"leak_idle_bytes": LEAK, "once_file": str(tmp_path / "once")}
    with gpu_cluster(tmp_path, short_dir, **faults) as cluster:
        until(lambda: metric(cluster, "prism_engine_overdrafts_total") == 1, "replacement", 60)
        until(lambda: metric(cluster, "prism_device_memory_drift_bytes") <= 0, "no drift")
        assert cluster.post("a").status_code == 200
        assert os.path.exists(tmp_path / "once")
