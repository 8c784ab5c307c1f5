"""A disk that is full for seconds around a rewrite of Redis's append-only file, and then a death of
Redis: whatever it can load afterwards, no stream is lost, doubled or changed.

PRISM_CHAOS_SEED chooses when the disk is full; PRISM_CHAOS_FULL how often.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import redis

from tests.chaos.campaign import DEVICE, MODELS, SEED, Campaign, reported
from tests.chaos.faults import Fault, Striker, parts
from tests.chaos.load import Load, varied
from tests.disks import small_disk
from tests.frontend.tiny_model import make_model
from tests.serve.conftest import Cluster, serving, until

ROUNDS = int(os.environ.get("PRISM_CHAOS_FULL", "20"))
DISK_BYTES = 24 << 20
_FULL_S = 2.0
# A rewrite before the disk is full, while it is, or none; Redis dies while it is full, or later.
KINDS = (("before", "later"), ("before", "full"), ("during", "later"), ("never", "later"))


class FullDisk(Striker):
    """Striker of the file system in which the run directory is."""

    def _fill(self, fault: Fault) -> str:
        rewrite, death = KINDS[int(fault.pick * len(KINDS))]
        with self.redis() as client:
            if rewrite == "before":
                self._rewrite(client)
            filler = self.cluster.temporary / "filler"
            with filler.open("wb", buffering=0) as file:
                _fill_up(file.fileno(), _FULL_S / 2)
                if rewrite == "during":
                    self._rewrite(client)
                _fill_up(file.fileno(), _FULL_S / 2)
            if death == "full":
                self._end_redis()
                time.sleep(1.0)
            filler.unlink()
        if death == "later":
            time.sleep(fault.length_s)  # later writes follow the failed ones
            self._end_redis()
        return f"rewrite {rewrite}, death {death}"

    def _rewrite(self, client: redis.Redis) -> None:
        with suppress(redis.RedisError):
            client.bgrewriteaof()
            until_s = time.monotonic() + 3
            while client.info("persistence")["aof_rewrite_in_progress"]:
                assert time.monotonic() < until_s
                time.sleep(0.02)

    def _end_redis(self) -> None:
        for pid in [pid for pid, part in parts(self.cluster).items() if part == "redis"]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _fill_up(fd: int, seconds: float) -> None:
    """Leaves no room for `length_s`, whatever other processes remove. Writes single bytes at the
    end, as any short write of other processes would."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        for size in (1 << 16, 1 << 9):
            with suppress(OSError):
                while time.monotonic() < until_s:
                    os.write(fd, bytes(size))
        time.sleep(0.005)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_full_disk_and_a_death_of_redis(tmp_path: Path) -> None:
    rng = Random(SEED)
    # Each kind in turn, at random moments.
    faults = [
        Fault("fill", "disk", (number % len(KINDS)) / len(KINDS), 0.5, rng.uniform(0.2, 2.0))
        for number in range(ROUNDS)
    ]
    with full_disk_cluster(tmp_path) as cluster:
        load = Load(cluster.url, 9, partial(varied, SEED, MODELS))
        campaign = Campaign(cluster, load)
        campaign.striker = FullDisk(cluster)
        with reported(campaign):
            asyncio.run(campaign.run_in_turn(faults))
            assert not load.bad
            assert not campaign.unexplained()
            assert {name.removesuffix(" within") for name in load.named} <= {"queue_unavailable"}
            _check_served_and_bounded(cluster)
        print(cluster.output())
        assert "started empty" in cluster.output()


@contextmanager
def full_disk_cluster(folder: Path) -> Iterator[Cluster]:
    """Starts a cluster whose logs are on another disk, so that they stay complete."""
    for name in MODELS:
        make_model(folder / name)
    data: dict[str, Any] = {
        "models": [{"name": name, "path": name} for name in MODELS],
        "devices": [{"name": f"host:{number}", **DEVICE} for number in range(2)],
        "fake": '{"decode_step_ms": 5, "prefill_tokens_per_s": 20000}',
    }
    with (
        TemporaryDirectory(prefix="prism-") as temporary,
        small_disk(Path(temporary), DISK_BYTES),
        serving(folder, Path(temporary), **data) as cluster,
    ):
        yield cluster


def _check_served_and_bounded(cluster: Cluster) -> None:
    for model in MODELS:
        assert cluster.post(model).status_code == 200
    folder = cluster.run_dir / "redis"
    until(lambda: len(list(folder.glob("damaged-*"))) <= 3, "few damaged files")
    assert len(list(folder.glob("temp-*"))) <= 1
