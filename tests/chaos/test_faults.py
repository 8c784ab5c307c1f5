"""Whatever is killed, stopped, cut off, filled or corrupted: no stream is lost, doubled or changed,
and everything is afterwards as it was before.

PRISM_CHAOS_SEED chooses the schedule and the requests; PRISM_CHAOS_KILLS and PRISM_CHAOS_STOPS how
many there are of each kind in the long form.
"""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path

import pytest

from tests.chaos.campaign import MODELS, SEED, Campaign, chaos_cluster, told
from tests.chaos.faults import may_mount, schedule
from tests.chaos.load import Load, varied

KILLS = int(os.environ.get("PRISM_CHAOS_KILLS", "60"))
STOPS = int(os.environ.get("PRISM_CHAOS_STOPS", "40"))
PARTS = ("engine", "forkserver", "agent", "scheduler", "frontend", "redis")

FEW = {
    ("kill", "engine", 0.0): 2,
    ("kill", "agent", 0.0): 1,
    ("kill", "frontend", 0.0): 1,
    ("kill", "redis", 0.0): 1,
    ("flush", "redis", 0.0): 1,
    ("corrupt", "sockets", 0.0): 1,
}
OTHERS = {
    ("flush", "redis", 0.0): KILLS,
    ("partition", "redis", 0.0): KILLS,
    ("partition", "redis", 5.0): STOPS // 2,
    ("partition", "sockets", 0.0): KILLS,
    ("fill", "redis", 0.0): STOPS // 2,
    ("corrupt", "sockets", 0.0): KILLS,
    ("corrupt", "entries", 0.0): KILLS,
}
FILLS = {("fill", "shm", 0.0): STOPS // 2, ("fill", "logs", 0.0): STOPS // 2}


def run(folder: Path, counts: dict[tuple[str, str, float], int], clients: int) -> None:
    with chaos_cluster(folder) as cluster:
        load = Load(cluster.url, clients, partial(varied, SEED, MODELS))
        campaign = Campaign(cluster, load)
        with told(campaign):
            asyncio.run(campaign.run(schedule(SEED, counts)))
            campaign.check()
        assert cluster.stop() == 0
        assert not list(cluster.temporary.iterdir())


def test_a_few_faults(tmp_path: Path) -> None:
    run(tmp_path, FEW, clients=9)


@pytest.mark.long
@pytest.mark.timeout(6 * 3600)
def test_every_kind_of_fault(tmp_path: Path) -> None:
    kills = {("kill", part, 0.0): KILLS for part in PARTS}
    stops = {
        ("stop", part, length_s): STOPS // 2
        for part in ("launcher", *PARTS)
        for length_s in (5.0, 30.0)
    }
    run(tmp_path, kills | stops | OTHERS | (FILLS if may_mount() else {}), clients=12)
