"""`policy: qlm` with real engines: models take turns on one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.harness import cluster_yaml, complete_all, model_yaml, serving
from tests.acceptance.reference import judge, prompts

pytestmark = [pytest.mark.sglang, pytest.mark.long]

TOKENS = 24
ROUNDS = 3


def test_models_of_one_device_take_turns(tiny_models: tuple[str, str], tmp_path: Path) -> None:
    """Restarts the engine at each swap. All answers are right."""
    config = cluster_yaml(
        [model_yaml(name) for name in tiny_models],
        [{"name": "host:0", "capacity": "128MiB", "page": "64KiB", "engines": 1}],
        policy="qlm",
    )
    with serving(config, tmp_path) as cluster:
        first = cluster.agents()[0]["models"][0]["engine_pid"]
        for _ in range(ROUNDS):
            jobs = [(name, p, TOKENS) for name in tiny_models for p in prompts(name, 8)]
            assert not judge(jobs, complete_all(cluster, jobs))
        status = cluster.status()
        assert status["actions_total"]["evict"] >= ROUNDS
        assert len(status["placement"]) == 1
        assert cluster.agents()[0]["models"][0]["engine_pid"] != first
