"""`policy: aegaeon` with real engines: models take turns, their KV waits in host memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.harness import cluster_yaml, complete_all, model_yaml, serving
from tests.acceptance.reference import judge, prompts

pytestmark = [pytest.mark.sglang, pytest.mark.long]

# The first turn of a round without other models has four seconds; these take about eight.
TOKENS = 960
CONTEXT = {"context_length": 1024, "slo": {"ttft": "5s", "tpot": "40ms"}}


@pytest.mark.parametrize("engines", [1, 2])
def test_requests_continue_after_turns_of_other_models(
    tiny_models: tuple[str, str], tmp_path: Path, engines: int
) -> None:
    """Sends requests that last for several turns. All answers are right, and no KV of those that
    moved is computed again. With a second engine the next model is loaded during a turn."""
    config = cluster_yaml(
        [model_yaml(name, **CONTEXT) for name in tiny_models],
        [
            {"name": f"host:{n}", "capacity": "128MiB", "page": "64KiB", "engines": engines}
            for n in range(2)
        ],
        policy="aegaeon",
    )
    with serving(config, tmp_path) as cluster:
        jobs = [(name, p, TOKENS) for name in tiny_models for p in prompts(name, 8)]
        assert not judge(jobs, complete_all(cluster, jobs))
        totals = cluster.status()["actions_total"]
        assert totals["evict"] > 4, totals
        logs = {path.stem: path.read_text() for path in (cluster.run_dir / "logs").glob("*.log")}
        assert not [name for name, text in logs.items() if "computed again" in text]
        assert ("the next turn" in logs["scheduler"]) == (engines == 2)
