"""Greedy output through the HTTP endpoint equals transformers on the same weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.acceptance.harness import (
    Cluster,
    cluster_yaml,
    complete_all,
    model_yaml,
    serving,
)
from tests.acceptance.reference import judge, prompts

pytestmark = pytest.mark.sglang

PROMPTS, TOKENS = 8, 64


@pytest.fixture(scope="module")
def one_engine(
    tiny_models: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Yields one device with one engine: a request for the other model must reuse its process."""
    config = cluster_yaml(
        [model_yaml(name) for name in tiny_models],
        [{"name": "host:0", "capacity": "192MiB", "page": "64KiB", "engines": 1}],
    )
    with serving(config, tmp_path_factory.mktemp("greedy")) as cluster:
        yield cluster


def check_equal(cluster: Cluster, model: str, concurrent: bool) -> None:
    jobs = [(model, prompt, TOKENS) for prompt in prompts(model, PROMPTS)]
    batches = [jobs] if concurrent else [[job] for job in jobs]
    answers = [answer for batch in batches for answer in complete_all(cluster, batch)]
    assert not judge(jobs, answers)


def engine_of(cluster: Cluster, model: str) -> str:
    report = cluster.model_report(model)
    assert report is not None
    return str(report["engine_id"])


def test_one_process_serves_both_architectures_in_turn(
    one_engine: Cluster, tiny_models: tuple[str, str]
) -> None:
    llama, qwen = tiny_models
    engines = []
    for model in (llama, qwen, llama):
        check_equal(one_engine, model, concurrent=True)
        engines.append(engine_of(one_engine, model))
    assert len(set(engines)) == 1
    restarts = sum(agent["engine_restarts_total"] for agent in one_engine.agents())
    assert restarts == 0


def test_one_stream_at_a_time(one_engine: Cluster, tiny_models: tuple[str, str]) -> None:
    for model in tiny_models:
        check_equal(one_engine, model, concurrent=False)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_every_demo_model(
    demo_models: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Serves all by one engine process: alone, then with 8 streams after the others."""
    config = cluster_yaml(
        [model_yaml(name) for name in demo_models],
        [{"name": "host:0", "capacity": "1GiB", "page": "64KiB", "engines": 1}],
    )
    with serving(config, tmp_path_factory.mktemp("demo_models")) as cluster:
        for concurrent in (False, True):
            for model in demo_models:
                check_equal(cluster, model, concurrent)
        assert sum(agent["engine_restarts_total"] for agent in cluster.agents()) == 0
