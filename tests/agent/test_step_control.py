"""Agent under policies that control each step."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from lab.parity.checks import check_steps
from lab.parity.journals import Dated
from prism.policies import registry
from prism.policies.multiplexing.steps import Phase
from prism.queueing import BundledRedis
from prism.scheduler.decision_journal import (
    INPUTS,
    JournalConfig,
    StepsChosen,
    journal_path,
    read,
)
from tests.agent.conftest import FAST
from tests.agent.harness import DEVICE, World, make_config, world

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("policy", ["muxserve", "alpaserve", "seallm"])
async def test_models_share_a_device_step_by_step(
    redis_server: BundledRedis, short_dir: Path, namespace: str, policy: str
) -> None:
    """Sends requests of two models, more than run at a time. All have their tokens, and each start
    and step was chosen by the policy's control from the recorded views."""
    made = make_config(short_dir, namespace, redis_server.url, policy=policy)
    config = msgspec.structs.replace(made, journal=JournalConfig(INPUTS))
    (short_dir / "logs").mkdir(exist_ok=True)
    async with world(config, FAST) as this:
        await this.serve("a", "b")
        first = await this.frontend.send(9, "a", max_tokens=30)
        second = await this.frontend.send(9, "b", prompt_tokens=300, max_tokens=20)
        await this.frontend.finish([*first, *second])
    records = [Dated(0.0, 0.0, record) for record in read(journal_path(short_dir / "logs", DEVICE))]
    check = check_steps(DEVICE, tuple(records), registry.get(policy))
    assert check.equal == check.decisions > 0, check
    chosen = [each.record for each in records if isinstance(each.record, StepsChosen)]
    jobs = [job for record in chosen for job in record.jobs]
    assert {(job.model, job.phase) for job in jobs} == {(m, phase) for m in "ab" for phase in Phase}
    prefilled = [i for job in jobs if job.phase is Phase.PREFILL for i in job.requests]
    assert sorted(prefilled) == sorted(request.id for request in (*first, *second))


@pytest.mark.parametrize("policy", ["muxserve"])
async def test_quotas_limit_the_kv_of_engines(agent_world: World) -> None:
    this = agent_world
    await this.serve("a", "b")
    for _ in range(6):
        await this.frontend.finish(await this.frontend.send(4, "a", max_tokens=60))
        await this.frontend.finish(await this.frontend.send(1, "b", max_tokens=4))
    limits = {each.name: each.limit_bytes for each in this.device.usage().clients}
    assert all(limits.values()), limits
