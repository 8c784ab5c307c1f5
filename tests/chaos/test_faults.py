"""Processes are killed and stopped, connections cut, disks filled, data corrupted: no stream is
lost, doubled or changed, and the cluster is afterwards as before.

PRISM_CHAOS_SEED chooses the schedule and the requests; PRISM_CHAOS_KILLS and PRISM_CHAOS_STOPS the
number of each kind in the long form.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.campaign import COPIES, DEVICE, MODELS, SEED, Campaign, chaos_cluster, reported
from tests.chaos.faults import Fault, may_mount, schedule
from tests.chaos.load import Load, varied

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("PRISM_CHAOS_KILLS", "60"))
STOPS = int(os.environ.get("PRISM_CHAOS_STOPS", "40"))
PARTS = ("engine", "forkserver", "preloaded", "agent", "scheduler", "frontend", "redis")
STOPPED = ("launcher", "rank", *PARTS)
# In addition to the others a model of two ranks, so on both devices.
WITH_RANKS: dict[str, Any] = {
    "models": [*COPIES["models"], {"name": "t", "path": "a", "tp": 2}],
    "devices": [{"name": f"host:{number}", **DEVICE, "engines": 4} for number in range(2)],
}

FEW = {
    ("kill", "engine", 0.0): 2,
    ("kill", "agent", 0.0): 1,
    ("kill", "frontend", 0.0): 1,
    ("kill", "redis", 0.0): 1,
    ("flush", "redis", 0.0): 1,
    ("corrupt", "sockets", 0.0): 1,
    **{("stop", part, 1.0): 1 for part in STOPPED},
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


def run(
    folder: Path,
    faults: Sequence[Fault],
    clients: int,
    served: Sequence[str] = MODELS,
    **changes: Any,
) -> Campaign:
    with chaos_cluster(folder, **changes) as cluster:
        load = Load(cluster.url, clients, partial(varied, SEED, served))
        campaign = Campaign(cluster, load, served)
        with reported(campaign):
            asyncio.run(campaign.run(faults))
            campaign.check()
        assert cluster.stop() == 0
        assert not list(cluster.temporary.iterdir())
    return campaign


def test_a_few_faults(tmp_path: Path) -> None:
    run(tmp_path, schedule(SEED, FEW), 9, [*MODELS, "t"], **WITH_RANKS)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_work_has_moved_on_before_a_stopped_process_wakes(tmp_path: Path) -> None:
    """Processes that stop are replaced or are not needed; they change nothing when they wake."""
    stops = [Fault("stop", part, 0.2, 1.0, 30.0) for part in STOPPED]
    changes = {"hang_timeout": "15s", **WITH_RANKS}
    campaign = run(tmp_path, stops, 12, [*MODELS, "t"], **changes)
    assert [str(each) for each in campaign.journal if each.recovered_s >= each.over_s] == []


@pytest.mark.long
@pytest.mark.timeout(6 * 3600)
def test_every_kind_of_fault(tmp_path: Path) -> None:
    kills = {("kill", part, 0.0): KILLS for part in PARTS}
    stops = {
        ("stop", part, length_s): STOPS // 2
        for part in ("launcher", *PARTS)
        for length_s in (5.0, 30.0)
    }
    counts = kills | stops | OTHERS | (FILLS if may_mount() else {})
    run(tmp_path, schedule(SEED, counts), 12, **COPIES)
