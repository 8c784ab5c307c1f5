"""The cluster's clock is Redis's, whatever the wall clocks of its machines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prism import clock
from prism.queueing import BundledRedis, RequestQueue


@pytest.fixture
def minutes_ahead() -> Iterator[None]:
    """Runs as on a machine whose wall clock was 5 minutes ahead when the process began."""
    before_s = clock.ahead_s()
    clock._clock.offset_s = before_s + 300
    yield
    clock._clock.offset_s = before_s


@pytest.mark.usefixtures("minutes_ahead")
@pytest.mark.parametrize("how", ["beat", "acquire", "renew"])
async def test_who_asks_redis_knows_its_time(tmp_path: Path, how: str) -> None:
    with BundledRedis(tmp_path) as server:
        queue = RequestQueue.connect(server.url, "prism-x")
        if how == "beat":
            await queue.beat("f", 10)
        else:
            epoch = await queue.acquire("host:0", "agent", 10)
        if how == "renew":
            clock._clock.offset_s += 300
            await queue.renew("host:0", "agent", epoch, 10)
        await queue.close()
    assert abs(clock.unix_s() - time.time()) < 10


@pytest.mark.usefixtures("minutes_ahead")
def test_what_may_be_the_same_time_changes_nothing() -> None:
    known_s = clock.ahead_s()
    for error_s in (0.4, -0.4):
        clock.synchronize(known_s + 100.5 + error_s, 100.0, 101.0)
        assert clock.ahead_s() == known_s
    clock.synchronize(known_s + 100.5 + 0.6, 100.0, 101.0)
    assert clock.ahead_s() == pytest.approx(known_s + 0.6)


def test_processes_that_talk_have_no_other_wall_clock() -> None:
    """Leaves out clocks whose values stay on the machine: traces of activations and process
    starts."""
    package = Path(clock.__file__).parent
    folders = ("frontend", "agent", "cluster", "queueing", "messages", "policies")
    found = {
        str(path.relative_to(package))
        for folder in folders
        for path in (package / folder).rglob("*.py")
        if "time.time(" in path.read_text()
    }
    assert found == {"agent/engines/trace_file.py", "frontend/requests/model_catalog.py"}
