"""A model that one device cannot serve gets copies on others, and gives them back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event

import msgspec
import pytest

from prism.messages.agent import ModelReport
from prism.messages.cluster import ClusterStatus, OperatorCommand
from prism.serve import operator
from prism.serve.node.run_dir import find
from tests.serve.conftest import Cluster, serving, until

DEVICES = [
    {"name": f"host:{i}", "capacity": "16MiB", "page": "64KiB", "engines": 2} for i in range(4)
]
SLO = {"ttft": "500ms", "tpot": "200ms"}
MODELS = [{"name": "a", "path": "a", "slo": SLO}, {"name": "b", "path": "b", "slo": SLO}]
SCHEDULER = {"interval": "500ms", "rate_window": "5s", "contended_requests": 1}
# An engine runs 4 requests at a time, a second each: 12 clients are three devices' work.
FAKE, MAX_RUNNING, TOKENS, CLIENTS = '{"decode_step_ms": 50}', 4, 20, 12


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("replicas")
    engine = {
        "adapter": "fake",
        "static": "1MiB",
        "drain_timeout": "10s",
        "max_running": MAX_RUNNING,
    }
    with (
        TemporaryDirectory(prefix="prism-") as temporary,
        serving(
            folder,
            Path(temporary),
            FAKE,
            devices=DEVICES,
            models=MODELS,
            scheduler=SCHEDULER,
            engine=engine,
        ) as made,
    ):
        yield made


def status(cluster: Cluster) -> ClusterStatus:
    result = operator.ask(find(cluster.run_dir), OperatorCommand("status"), 60.0)
    assert result.ok, result.message
    return msgspec.json.decode(result.message, type=ClusterStatus)


def serving_copies(cluster: Cluster, model: str) -> list[ModelReport]:
    """Returns the reports of the devices that requests are sent to."""
    now = status(cluster)
    devices = now.copies.get(model, (now.placement[model],))
    reports = {a.device: m for a in now.agents for m in a.models if m.model == model}
    return [reports[d] for d in devices if d in reports]


def asks(cluster: Cluster, enough: Event) -> int:
    """Sends a request as soon as the last one is answered. Returns their number."""
    asked = 0
    while not enough.is_set():
        answer = cluster.post("a", max_tokens=TOKENS, ignore_eos=True)
        assert answer.status_code == 200, answer.text
        asked += 1
    return asked


def test_a_model_at_three_devices_load_gets_copies_and_gives_them_back(cluster: Cluster) -> None:
    """Answers every request although a copy's engine is killed meanwhile."""
    enough = Event()

    def kept_up() -> bool:
        """Returns whether no request waits and more run than two devices can."""
        copies = serving_copies(cluster, "a")
        running = sum(copy.running for copy in copies)
        return running > 2 * MAX_RUNNING and not any(copy.waiting for copy in copies)

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(asks, cluster, enough) for _ in range(CLIENTS)]
        try:
            until(kept_up, "copies that keep up", 60)
            assert len(serving_copies(cluster, "a")) >= 3
            os.kill(serving_copies(cluster, "a")[0].engine_pid, signal.SIGKILL)
            until(lambda: not kept_up(), "what the kill changes")
            until(kept_up, "copies that keep up again", 60)
        finally:
            enough.set()
        assert all(client.result() for client in clients)
    until(lambda: len(serving_copies(cluster, "a")) == 1, "one copy less after the other", 60)
    until(lambda: not status(cluster).copies, "the status says so, too")
    assert cluster.post("b").status_code == cluster.post("a").status_code == 200
