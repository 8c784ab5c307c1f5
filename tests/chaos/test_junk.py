"""Junk in every key of Redis and every file of the run directory affects only its subject.

Running streams finish, new requests are served, and the console lives. PRISM_CHAOS_SEED chooses.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from functools import partial
from pathlib import Path
from random import Random

import pytest

from tests.chaos.campaign import MODELS, SEED, Campaign, chaos_cluster, reported
from tests.chaos.faults import Fault, Striker, parts
from tests.chaos.load import Load, varied
from tests.junk import JUNK, junk_into
from tests.serve.conftest import until

pytestmark = pytest.mark.slow

# Also where they are not there at the moment.
KEYS = (
    "queue:host:0", "queue:host:1", "queue:unplaced", "left:host:0", "running:host:0",
    "admitted:host:0", "open", "load", "placement", "lease:host:0", "epoch:host:0", "frontends",
    "incarnation", "server", "acquired:host:0", "answers", "answers_bytes", "malformed", "status",
    "writable",
)  # fmt: skip
_BETWEEN_S = 0.5


class Vandal(Striker):
    """Striker whose target is a kind of junk, for one key after another, or files."""

    def _junk(self, fault: Fault) -> str:
        rng, prefix = Random(fault.pick), f"{self.config.namespace}:"
        with self.redis() as client:
            found = {key.decode(errors="replace") for key in client.scan_iter(f"{prefix}*")}
            keys = sorted(found | {prefix + key for key in KEYS})
            rng.shuffle(keys)
            for key in keys:
                junk_into(client, key, fault.target, rng)
                time.sleep(fault.length_s / len(keys))
        return f"{len(keys)} keys"

    def _files(self, fault: Fault) -> str:
        """Damages all regular files, then restarts the parts that read them."""
        rng, struck = Random(fault.pick), []
        for path in sorted(self.cluster.run_dir.iterdir()):
            if path.is_file() and path.name != "lock":
                body = path.read_bytes()
                path.write_bytes(rng.choice((b"", body[: len(body) // 2], rng.randbytes(400))))
                struck.append(path.name)
        for pid, part in parts(self.cluster).items():
            if part in {"agent", "scheduler"}:
                os.kill(pid, signal.SIGKILL)
        return ", ".join(struck)


def strikes(rounds: int) -> list[Fault]:
    rng = Random(SEED)
    junk = [
        Fault("junk", kind, rng.random(), _BETWEEN_S, length_s)
        for kind in JUNK
        for length_s in (0.0, 4.0)
        for _ in range(rounds)
    ]
    files = [Fault("files", "run directory", rng.random(), _BETWEEN_S) for _ in range(2 * rounds)]
    faults = junk + files
    rng.shuffle(faults)
    return faults


def run(folder: Path, rounds: int) -> None:
    with chaos_cluster(folder) as cluster:
        load = Load(cluster.url, 9, partial(varied, SEED, MODELS))
        campaign = Campaign(cluster, load)
        campaign.striker = Vandal(cluster)
        with reported(campaign):
            asyncio.run(campaign.run_in_turn(strikes(rounds)))
            assert not load.bad
            assert not load.cuts
            assert not load.named, "a stream ended with an error"
            for model in MODELS:
                assert cluster.post(model).status_code == 200
            said = cluster.output().count("ended; replacements are starting")
            engine = next(pid for pid, part in parts(cluster).items() if part == "engine")
            os.kill(engine, signal.SIGKILL)
            until(
                lambda: cluster.output().count("ended; replacements are starting") > said,
                "the console's line",
            )
        assert cluster.stop() == 0


def test_junk_everywhere(tmp_path: Path) -> None:
    run(tmp_path, 1)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_junk_everywhere_again_and_again(tmp_path: Path) -> None:
    run(tmp_path, 10)
