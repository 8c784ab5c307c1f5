"""`policy: serverlessllm` scales out, and knows how long starts take."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event

import msgspec

from prism.messages.cluster import ClusterStatus, OperatorCommand
from prism.serve import operator
from prism.serve.node.run_dir import find
from tests.serve.conftest import Cluster, serving, until

DEVICES = [
    {"name": f"host:{i}", "capacity": "16MiB", "page": "64KiB", "engines": 1} for i in range(3)
]
MODELS = [{"name": name, "path": name} for name in "ab"]
ENGINE = {"adapter": "fake", "static": "1MiB", "drain_timeout": "10s", "max_running": 2}
ACTIVATION_S = 0.5
FAKE = f'{{"decode_step_ms": 50, "activation_s": {ACTIVATION_S}}}'
CLIENTS = 8


def status(cluster: Cluster) -> ClusterStatus:
    result = operator.ask(find(cluster.run_dir), OperatorCommand("status"), 60.0)
    assert result.ok, result.message
    return msgspec.json.decode(result.message, type=ClusterStatus)


def asks(cluster: Cluster, enough: Event) -> int:
    """Sends a request as soon as the last one is answered. Returns their number."""
    asked = 0
    while not enough.is_set():
        answer = cluster.post("a", max_tokens=20, ignore_eos=True)
        assert answer.status_code == 200, answer.text
        asked += 1
    return asked


def test_a_backlog_gets_a_copy_that_leaves_for_another_model(tmp_path: Path) -> None:
    """Serves "b" on the device of a copy once that has been idle for its load time."""
    with (
        TemporaryDirectory(prefix="prism-") as temporary,
        serving(
            tmp_path,
            Path(temporary),
            FAKE,
            policy="serverlessllm",
            devices=DEVICES,
            models=MODELS,
            engine=ENGINE,
        ) as cluster,
    ):
        enough = Event()
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(asks, cluster, enough) for _ in range(CLIENTS)]
            try:
                until(lambda: len(status(cluster).copies.get("a", ())) == 2, "a copy of a", 60)
            finally:
                enough.set()
            assert all(client.result() for client in clients)
        assert cluster.post("b").status_code == 200
    log = "".join(path.read_text() for path in (tmp_path / "logs").iterdir())
    estimates_s = re.findall(r"activate a on host:\d: .*starts soonest here: ([\d.]+) s", log)
    assert [float(s) >= ACTIVATION_S for s in estimates_s] == [False, True], "the first is unknown"
