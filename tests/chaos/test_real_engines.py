"""Faults on SGLang: engines are killed with streams in flight, and greedy answers stay greedy."""

from __future__ import annotations

import asyncio
import os
from functools import cached_property
from pathlib import Path

import pytest

from tests.acceptance.conftest import TINY, prepare
from tests.acceptance.harness import model_yaml
from tests.acceptance.reference import greedy, is_greedy, prompts
from tests.chaos.campaign import SEED, Campaign, chaos_cluster, reported
from tests.chaos.faults import schedule
from tests.chaos.load import Asked, Load

KILLS = int(os.environ.get("PRISM_CHAOS_REAL_KILLS", "20"))
TOKENS, IN_FLIGHT, PROMPTS = 120, 8, 16
pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.long, pytest.mark.timeout(3600)]


class AskedGreedily(Asked):
    """The oracle is Hugging Face's greedy decoding."""

    @cached_property
    def expected(self) -> tuple[list[int], str]:
        return list(greedy(self.model, self.prompt, self.count)), "length"


def test_kills_under_load(tmp_path: Path) -> None:
    prepare(*TINY)
    asked = [
        AskedGreedily(model, prompt, TOKENS)
        for model in TINY
        for prompt in prompts(model, PROMPTS // 2)
    ]
    for each in asked:
        assert len(each.expected[0]) == TOKENS
    with chaos_cluster(
        tmp_path,
        models=[model_yaml(name) for name in TINY],
        devices=[{"name": "host:0", "capacity": "192MiB", "page": "64KiB", "engines": 2}],
        engine={"adapter": "sglang"},
    ) as cluster:
        load = Load(cluster.url, IN_FLIGHT, lambda number: asked[number % PROMPTS])
        campaign = Campaign(cluster, load, TINY)
        with reported(campaign):
            asyncio.run(campaign.run(schedule(SEED, {("kill", "engine", 0.0): KILLS})))
            ties = [s for s in load.bad if is_greedy(s.asked.model, s.asked.prompt, tuple(s.ids))]
            load.bad = [stream for stream in load.bad if stream not in ties]
            campaign.check()
