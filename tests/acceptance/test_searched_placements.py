"""MuxServe, SeaLLM and AlpaServe with real engines: their placement, and their steps in turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.harness import cluster_yaml, complete_all, model_yaml, serving
from tests.acceptance.reference import judge, prompts

pytestmark = [pytest.mark.sglang, pytest.mark.long]

TOKENS = 24
BUSY = {"rate": 500, "prompt_tokens": 400, "output_tokens": 100}


@pytest.mark.parametrize("policy", ["muxserve++", "muxserve"])
def test_each_busy_model_has_a_device_and_stays(
    tiny_models: tuple[str, str], tmp_path: Path, policy: str
) -> None:
    """Searches a few times while requests run. Their answers are right, and no model moves."""
    config = cluster_yaml(
        [model_yaml(name, expected=BUSY) for name in tiny_models],
        [
            {"name": f"host:{i}", "capacity": "128MiB", "page": "64KiB", "engines": 2}
            for i in range(2)
        ],
        policy=policy,
        scheduler={"search_interval": "2s"},
    )
    with serving(config, tmp_path) as cluster:
        homes = [{m["model"] for m in agent["models"]} for agent in cluster.agents()]
        assert sorted(map(len, homes)) == [1, 1]
        for _ in range(4):
            jobs = [(name, p, TOKENS) for name in tiny_models for p in prompts(name, 8)]
            assert not judge(jobs, complete_all(cluster, jobs))
        assert [{m["model"] for m in agent["models"]} for agent in cluster.agents()] == homes
        for name in tiny_models:
            report = cluster.model_report(name)
            assert report is not None
            assert report["activations_total"] == 1
            assert report["step_s"] > 0


@pytest.mark.parametrize("policy", ["muxserve", "seallm", "alpaserve"])
def test_models_of_one_device_take_turns_step_by_step(
    tiny_models: tuple[str, str], tmp_path: Path, policy: str
) -> None:
    """Sends more requests of two models than run at a time."""
    config = cluster_yaml(
        [model_yaml(name) for name in tiny_models],
        [{"name": "host:0", "capacity": "128MiB", "page": "64KiB", "engines": 2}],
        policy=policy,
    )
    with serving(config, tmp_path) as cluster:
        jobs = [(name, p, TOKENS) for name in tiny_models for p in prompts(name, 24)]
        assert not judge(jobs, complete_all(cluster, jobs))
