"""`policy: muxserve++` in a real cluster of fake engines."""

from __future__ import annotations

import os
from pathlib import Path

import httpx

from tests.serve.conftest import Cluster, serving, until

DEVICES = [
    {"name": f"host:{i}", "capacity": "16MiB", "page": "64KiB", "engines": 3} for i in range(2)
]
BUSY = {"rate": 500, "prompt_tokens": 400, "output_tokens": 100}
CALM = {"rate": 0.01, "prompt_tokens": 20, "output_tokens": 20}
MODELS = [
    {"name": "a", "path": "a", "expected": BUSY},
    {"name": "b", "path": "b", "expected": BUSY},
    {"name": "c", "path": "a", "expected": CALM},
]


def placed(cluster: Cluster) -> dict[str, str]:
    placement: dict[str, str] = httpx.get(f"{cluster.url}/status").json()["placement"]
    return placement


def said(folder: Path) -> str:
    """Returns the scheduler's log."""
    return "".join(path.read_text() for path in (folder / "logs").glob("*scheduler*"))


def test_models_stay_where_their_expected_traffic_placed_them(
    tmp_path: Path, short_dir: Path
) -> None:
    """Across a restart of the scheduler, too."""
    with serving(
        tmp_path, short_dir, policy="muxserve++", devices=DEVICES, models=MODELS
    ) as cluster:
        homes = placed(cluster)
        assert homes.keys() == {"a", "b", "c"}
        assert homes["a"] != homes["b"]
        assert all(cluster.post(model).status_code == 200 for model in homes)
        os.kill(cluster.child("prism.cluster"), 9)
        until(lambda: said(tmp_path).count("new placement") == 2, "the scheduler is back")
        assert all(cluster.post(model).status_code == 200 for model in homes)
        assert placed(cluster) == homes
    assert said(tmp_path).count("activate ") == 3
    assert "evict" not in said(tmp_path)
