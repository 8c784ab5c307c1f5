"""Models of two adapters in one cluster, which share a device and even its only engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from prism.engines.fake import expected_tokens
from tests.acceptance.harness import Cluster, cluster_yaml, complete_all, model_yaml, serving
from tests.acceptance.reference import judge, prompts

pytestmark = pytest.mark.sglang

TOKENS = 24


@pytest.fixture(scope="module")
def cluster(
    tiny_models: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    real, fake = tiny_models
    config = cluster_yaml(
        [model_yaml(real), model_yaml(fake, adapter="fake")],
        [{"name": "host:0", "capacity": "192MiB", "page": "64KiB", "engines": 1}],
    )
    with serving(config, tmp_path_factory.mktemp("adapters")) as made:
        yield made


def test_each_model_is_served_by_its_own_adapter(
    cluster: Cluster, tiny_models: tuple[str, str]
) -> None:
    """Replaces the only engine by one of the other adapter each time."""
    real, fake = tiny_models
    jobs = [(real, prompt, TOKENS) for prompt in prompts(real, 3)]
    asked = [(fake, prompt, TOKENS) for prompt in prompts(fake, 3)]
    assert not judge(jobs, complete_all(cluster, jobs))
    for (_, prompt, count), answer in zip(asked, complete_all(cluster, asked), strict=True):
        assert answer.ids == expected_tokens(list(prompt), count)
    assert not judge(jobs, complete_all(cluster, jobs))
    assert sum(agent["engine_restarts_total"] for agent in cluster.agents()) == 0
    logs = {path.name for path in (cluster.run_dir / "logs").iterdir()}
    assert {"preloaded-host0.log", "preloaded-host0-fake.log"} <= logs
