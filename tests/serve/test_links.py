"""Cluster on four GPUs of the test libcuda.

Engines load weights over all their links and compare every byte.
"""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from tests.kvcached.compiling import build_libcuda
from tests.serve.conftest import serving

GPUS = [f"cuda:{n}" for n in range(4)]
SERVING = '{"load_weights": true, "cpu_reads_gpu": true}'


def test_a_cluster_on_four_gpus(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCACHED_LIBCUDA", str(build_libcuda()))
    monkeypatch.setenv("KVCACHED_TEST_CUDA_DEVICES", "4")
    monkeypatch.setenv("PRISM_FAKE", SERVING)
    temporary = tmp_path_factory.mktemp("t")
    devices = [{"name": n, "capacity": "16MiB", "page": "64KiB", "engines": 1} for n in GPUS]
    engine = {"adapter": "fake", "static": "1MiB", "link_memory": "1MiB", "links_from": "1KiB"}
    with serving(tmp_path, temporary, SERVING, devices=devices, engine=engine) as cluster:
        namespace = json.loads((cluster.run_dir / "cluster.json").read_text())["namespace"]
        assert cluster.operate("evict", "a").returncode == 0  # up before all GPUs were, perhaps
        done = cluster.operate("activate", "a", "--device", GPUS[0], "--json")
        assert done.returncode == 0, done.stderr
        known = json.loads(done.stdout)["link_bytes"]
        assert cluster.post("a").status_code == 200
        assert sorted(known) == GPUS
        assert f"over {GPUS[3]}" in cluster.operate("activate", "a", "--profile").stdout
        metrics = httpx.get(f"{cluster.url}/metrics").text
        for link, size_bytes in known.items():
            line = (
                f'prism_model_activation_link_bytes{{device="{GPUS[0]}",link="{link}",model="a"}}'
            )
            assert f"{line} {float(size_bytes)}" in metrics
        assert cluster.stop() == 0
        logs = "".join(path.read_text() for path in (tmp_path / "logs").rglob("*.log"))
        assert "serves a after" in logs
        assert "stays" not in logs  # a ledger, for what engines of other GPUs had borrowed
        assert not list(Path("/dev/shm").glob(f"*{namespace}*"))
