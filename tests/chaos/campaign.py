"""A schedule of faults under load, and its results.

Prints each fault when the cluster has recovered from it. With the seed, that is the journal.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from tests.chaos.faults import Fault, Striker, census, may_mount, setup_for
from tests.chaos.load import Load, Stream, verdict
from tests.frontend.tiny_model import make_model
from tests.serve.conftest import Cluster, serving, until

MODELS = ("a", "b", "c")
SEED = int(os.environ.get("PRISM_CHAOS_SEED", "1"))
DEVICE = {"capacity": "16MiB", "page": "64KiB", "engines": 2}
# The first model is served by two engines at once, one on each device.
COPIES: dict[str, Any] = {
    "models": [
        {"name": "a", "path": "a", "replicas": {"min": 2}},
        *({"name": name, "path": name} for name in MODELS[1:]),
    ],
    "devices": [{"name": f"host:{number}", **DEVICE, "engines": 3} for number in range(2)],
}
RECOVERED_S = 240.0
SETTLED_S = 120.0
# Fraction of the faults that the next one follows at once.
_OVERLAPPING = 0.15
# Delay after which a client may notice a frontend's death.
_CUT_LATE_S = 5.0
# The errors by which a stream may end when faults have struck. An "internal_error" is none.
NAMES = {
    "agent_stopped", "engine_died", "frontend_silent", "malformed_request", "model_unavailable",
    "output_lost", "queue_unavailable", "request_killed_engines", "timeout", "unavailable",
}  # fmt: skip


@dataclass
class Struck:
    """A fault as it happened. Times are monotonic. The cluster may have recovered before it was
    over."""

    fault: Fault
    began_s: float
    alone: bool  # the one before was over
    what: str = ""
    over_s: float = 0.0
    recovered_s: float = 0.0

    def __str__(self) -> str:
        end = f"recovered in {self.took_s:.1f} s" if self.recovered_s else "not recovered"
        return f"{self.began_s:10.1f} {self.fault}: {self.what}; {end}"

    @property
    def took_s(self) -> float:
        return self.recovered_s - self.began_s

    def explains(self, cut: Stream) -> bool:
        by_frontend = self.fault.target == "frontend"
        return by_frontend and self.began_s <= cut.end_s <= self.over_s + _CUT_LATE_S


@contextmanager
def chaos_cluster(folder: Path, **changes: Any) -> Iterator[Cluster]:
    """Starts two devices, three models and slow fake engines. Mounts separate file systems for the
    cluster if this user may."""
    fake = '{"decode_step_ms": 5, "prefill_tokens_per_s": 20000}'
    for name in MODELS:
        make_model(folder / name)
    data = {
        "models": [{"name": name, "path": name} for name in MODELS],
        "devices": [{"name": f"host:{number}", **DEVICE} for number in range(2)],
        **changes,
    }
    setup = setup_for(folder) if may_mount() else ""
    with (
        TemporaryDirectory(prefix="prism-") as temporary,
        serving(folder, Path(temporary), data.pop("fake", fake), setup, **data) as cluster,
    ):
        yield cluster


class Campaign:
    """Schedule of faults that `run` applies one after another. The journal and the tally have the
    results."""

    def __init__(self, cluster: Cluster, load: Load, models: Sequence[str] = MODELS) -> None:
        self.cluster, self.load, self.models = cluster, load, models
        self.striker = Striker(cluster)
        self.journal: list[Struck] = []
        for model in models:
            assert cluster.post(model).status_code == 200
        until(self._has_its_copies, "all copies")
        self._before = census(cluster, self.striker)
        self.changed: dict[str, Any] = {}  # by the last look: what -> before, now

    async def run(self, faults: Sequence[Fault]) -> None:
        self.load.start()
        await self._answered_since(time.monotonic())
        watches: list[asyncio.Task[None]] = []
        for fault in faults:
            await asyncio.sleep(fault.pause_s)
            alone = all(watch.done() for watch in watches)
            watches.append(asyncio.create_task(self.strike(fault, alone)))
            if fault.pick >= _OVERLAPPING:
                await asyncio.gather(*watches)
        await asyncio.gather(*watches)
        await self.load.stop()

    async def run_in_turn(self, faults: Sequence[Fault]) -> None:
        """Strikes the next fault only when all models have answered after the last one."""
        self.load.start()
        for fault in faults:
            await asyncio.sleep(fault.pause_s)
            await self.strike(fault, True)
        await self.load.stop()

    async def strike(self, fault: Fault, alone: bool) -> None:
        struck = Struck(fault, time.monotonic(), alone)
        self.journal.append(struck)
        moving_on = asyncio.create_task(self._answered_since(struck.began_s))
        try:
            struck.what = await asyncio.to_thread(self.striker.strike, fault)
            struck.over_s = time.monotonic()
            struck.recovered_s = await moving_on
            await self._answered_since(struck.over_s)
        finally:
            print(struck, flush=True)

    def _has_its_copies(self) -> bool:
        config, served = self.striker.config, census(self.cluster, self.striker)["models"]
        assert isinstance(served, list)
        return all(served.count(m.name) >= m.replicas_min for m in config.models)

    async def _answered_since(self, since_s: float) -> float:
        """Waits until each model has given a token to a request that was sent after that moment."""
        async with asyncio.timeout(RECOVERED_S):
            while min(self.load.answered_s.get(model, 0.0) for model in self.models) < since_s:
                await asyncio.sleep(0.02)
        return time.monotonic()

    def check(self) -> None:
        """Checks that no stream was lost, doubled or changed, that each cut is the frontend's, and
        that the cluster is as before."""
        assert not self.load.bad
        assert not self.unexplained()
        assert {name.removesuffix(" within") for name in self.load.named} <= NAMES
        self.check_peace()

    def check_peace(self) -> None:
        """Checks that evicted models come back with a request, and that the cluster is then as
        before."""

        def is_as_before() -> bool:
            for model in self.models:
                with suppress(httpx.TransportError):
                    self.cluster.post(model)
            now = census(self.cluster, self.striker)
            self.changed = {k: (v, now.get(k)) for k, v in self._before.items() if now.get(k) != v}
            return not self.changed

        until(is_as_before, "everything as before", SETTLED_S)

    def unexplained(self) -> list[Stream]:
        """Streams that were cut while no frontend was in trouble."""
        return [c for c in self.load.cuts if not any(s.explains(c) for s in self.journal)]

    def resumed(self) -> int:
        """Returns the number of whole streams that paused and were sent again, by the frontends'
        logs."""
        sent_again: set[str] = set()
        for path in self.striker.logs().glob("frontend-*"):
            sent_again |= set(
                re.findall(r"(?:retrying|resending) (cmpl-\w+)-\d+: ", path.read_text())
            )
        return len(sent_again & self.load.paused)

    def report(self) -> str:
        by_kind: dict[str, list[float]] = defaultdict(list)
        for struck in self.journal:
            if struck.alone and struck.recovered_s:
                by_kind[str(struck.fault)].append(struck.took_s)
        lines = [f"seed {SEED}: {len(self.journal)} faults, {self.load.ended} streams"]
        lines += [f"  {what}: {count}" for what, count in self.load.tally.most_common()]
        lines += [f"  named {what}: {count}" for what, count in self.load.named.most_common()]
        lines += [f"  of the whole ones resumed within: {self.resumed()}"]
        lines += [
            f"  {kind}: {len(times)}, recovered in {median(times):.1f} s, at worst {max(times):.1f}"
            for kind, times in sorted(by_kind.items())
        ]
        return "\n".join(lines)


@contextmanager
def reported(campaign: Campaign) -> Iterator[None]:
    """Prints the seed and the figures in any case; if the campaign fails, keeps the logs next to
    the launcher's."""
    try:
        yield
    except BaseException:
        kept = campaign.cluster.log.parent / "kept"
        shutil.copytree(campaign.striker.logs(), kept)
        print(f"logs: {kept}")
        raise
    finally:
        print(f"PRISM_CHAOS_SEED={SEED}")
        for stream in [*campaign.load.bad, *campaign.unexplained()][:20]:
            print(verdict(stream), stream, "expected", stream.asked.expected)
        print(campaign.report(), f"changed: {campaign.changed}", sep="\n")
