"""Endless requests with a fault every ten seconds: none is lost, and memory is flat.

PRISM_CHAOS_SOAK_S is the duration: an hour by default.
"""

from __future__ import annotations

import asyncio
import os
import time
from functools import partial
from pathlib import Path

import pytest

from tests.chaos.campaign import COPIES, MODELS, SEED, Campaign, chaos_cluster, reported
from tests.chaos.faults import Fault, schedule
from tests.chaos.load import Load, brief
from tests.chaos.memory import MemoryWatch

pytestmark = pytest.mark.slow

SOAK_S = float(os.environ.get("PRISM_CHAOS_SOAK_S", "3600"))
FAULT_EVERY_S = 10.0
# Faults that kill no long-lived process: the test measures their memory.
FAULTS = {
    ("kill", "engine", 0.0): 4,
    ("stop", "engine", 5.0): 1,
    ("stop", "scheduler", 5.0): 1,
    ("flush", "redis", 0.0): 1,
    ("partition", "redis", 0.0): 1,
    ("corrupt", "sockets", 0.0): 1,
    ("corrupt", "entries", 0.0): 1,
}
# Over an hour. A part that keeps something of every request grows by more.
GROWTH_MAX_MIB_PER_HOUR = 32.0
_MEASURED_FROM_S = 600.0


async def soak(campaign: Campaign, memory: MemoryWatch) -> float:
    """Requests per second."""
    watching = asyncio.create_task(memory.run())
    began_s, ended, faults = time.monotonic(), campaign.load.ended, list[Fault]()
    campaign.load.start()
    for number in range(1, int(SOAK_S / FAULT_EVERY_S) + 1):
        faults = faults or schedule(SEED + number, FAULTS)
        await asyncio.sleep(began_s + number * FAULT_EVERY_S - time.monotonic())
        await campaign.strike(faults.pop(), alone=True)
        if number % 6 == 0:
            said = f"{campaign.load.ended} requests after {number * FAULT_EVERY_S:.0f} s"
            print(said, flush=True)
    await campaign.load.stop()
    watching.cancel()
    return (campaign.load.ended - ended) / (time.monotonic() - began_s)


@pytest.mark.long
@pytest.mark.timeout(2 * SOAK_S + 600)
def test_memory_is_flat_under_faults(tmp_path: Path) -> None:
    with chaos_cluster(tmp_path, fake="{}", **COPIES) as cluster:
        campaign = Campaign(cluster, Load(cluster.url, 24, partial(brief, SEED, MODELS)))
        memory = MemoryWatch(campaign.striker, min(5.0, SOAK_S / 100))
        with reported(campaign):
            rate = asyncio.run(soak(campaign, memory))
            growth = memory.growth()
            print(f"{rate:.0f} requests/s: a million in {1e6 / rate / 3600:.1f} h; MiB per hour:")
            for part, (slope, error) in growth.items():
                print(f"  {part}: {slope:.2f} +- {error:.2f}")
            campaign.check()
        if SOAK_S >= _MEASURED_FROM_S:
            assert all(s - 3 * e < GROWTH_MAX_MIB_PER_HOUR for s, e in growth.values())
