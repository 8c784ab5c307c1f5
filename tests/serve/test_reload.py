"""A reload under load: models come and go, an SLO changes, and no request fails."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

import httpx
import pytest
import yaml

from tests.frontend.tiny_model import make_model
from tests.serve.conftest import Cluster, serving, until, write_yaml

SLOW = json.dumps({"decode_step_ms": 20})
TOKENS = 100  # two seconds
NEVER_MET = "1us"
FRONTEND = {"port": 0, "processes": 2}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    make_model(folder / "c")
    with (
        TemporaryDirectory(prefix="prism-") as temporary,
        serving(folder, Path(temporary), SLOW, frontend=FRONTEND) as made,
    ):
        yield made


def rewrite(cluster: Cluster, names: str, slo_ttft: str = "2s", **changes: Any) -> Path:
    path = write_yaml(cluster.log.parent, frontend=FRONTEND, **changes)
    data = yaml.safe_load(path.read_text())
    data["models"] = [{"name": name, "path": name} for name in names]
    data["models"][0]["slo"] = {"ttft": slo_ttft}
    path.write_text(yaml.safe_dump(data))
    return path


def there(cluster: Cluster) -> dict[str, int]:
    """Returns model -> number of its requests, of the models on devices."""
    agents = httpx.get(f"{cluster.url}/status").json()["agents"]
    return {m["model"]: m["waiting"] + m["running"] for agent in agents for m in agent["models"]}


def known(cluster: Cluster) -> set[str]:
    return {model["id"] for model in httpx.get(f"{cluster.url}/v1/models").json()["data"]}


def missed(cluster: Cluster, model: str) -> float:
    """Returns the number of requests with a late first token."""
    text = httpx.get(f"{cluster.url}/metrics").text
    pattern = rf'prism_slo_total{{frontend="[^"]*",met="false",model="{model}",slo="ttft"}} (\S+)'
    return sum(map(float, re.findall(pattern, text)))


@contextmanager
def asked(cluster: Cluster, clients: int = 4) -> Iterator[list[Future[int]]]:
    """Runs clients of the model `a` on persistent connections. All requests must be answered."""
    enough = Event()

    def ask() -> int:
        count = 0
        with httpx.Client(base_url=cluster.url, timeout=60) as client:
            while not enough.is_set():
                body = {"model": "a", "prompt": [9, 8, count % 200], "max_tokens": 4}
                answer = client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                count += 1
        return count

    with ThreadPoolExecutor(clients) as pool:
        made = [pool.submit(ask) for _ in range(clients)]
        try:
            yield made
        finally:
            enough.set()
        assert all(client.result() for client in made)


def test_models_come_and_go_and_no_request_fails(cluster: Cluster) -> None:
    with asked(cluster), ThreadPoolExecutor(3) as pool:
        long = {"max_tokens": TOKENS, "ignore_eos": True}
        leaving = [pool.submit(cluster.post, "b", **long) for _ in range(3)]
        until(lambda: there(cluster).get("b") == len(leaving), "b has its requests")
        rewrite(cluster, "ac", NEVER_MET)
        done = cluster.operate("reload")
        assert done.returncode == 0, done.stderr
        said = done.stdout
        assert {"added c", "removed b"} < set(said.removeprefix("reloaded: ").strip().split("; "))
        assert "a.slo.ttft 2.0 -> 1e-06" in said
        # Every frontend has the new configuration, whichever accepts the connection.
        for _ in range(8):
            refused = cluster.post("b")
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                404,
                "model_not_found",
            )
            assert known(cluster) == {"a", "c"}
        assert cluster.post("c").status_code == 200
        until(lambda: missed(cluster, "a") > 0, "requests of a that miss its new SLO")
        for answer in leaving:
            got = answer.result()
            assert got.status_code == 200, got.text
            assert got.json()["usage"]["completion_tokens"] == TOKENS
        until(lambda: "b" not in there(cluster), "b is evicted")
        until(lambda: "leaves" not in cluster.operate("status").stdout, "b is not shown as leaving")


def test_a_signal_reloads_too_and_a_mistake_changes_nothing(cluster: Cluster) -> None:
    rewrite(cluster, "abc")
    cluster.process.send_signal(signal.SIGHUP)
    until(lambda: known(cluster) == {"a", "b", "c"}, "b is there again")
    until(lambda: "reloaded: added b" in cluster.output(), "the console says so")
    assert cluster.post("b").status_code == 200
    before = (cluster.run_dir / "cluster.json").read_bytes()
    path = rewrite(cluster, "a", engine={"adapter": "fake", "static": "2MiB"}, redis="redis://x")
    refused = cluster.operate("reload")
    assert refused.returncode == 2
    assert refused.stderr == (
        "error: redis, engine.static, engine.drain_timeout: cannot be changed while the cluster"
        " runs; revert it, or restart prism-serve\n"
    )
    path.write_text("models: [")
    assert cluster.operate("reload").stderr.startswith(f"error: {path}: line 1, column 10: ")
    cluster.process.send_signal(signal.SIGHUP)
    until(lambda: f"reload: {path}: line 1" in cluster.output(), "the console names the mistake")
    assert (cluster.run_dir / "cluster.json").read_bytes() == before
    assert known(cluster) == {"a", "b", "c"}
    assert [cluster.post(model).status_code for model in "abc"] == [200] * 3


WAITS = """
import sys, time
from prism.serve.launcher import Signals
said = open(sys.argv[1], "w", buffering=1)
with Signals().caught() as signals:
    print("waits", file=said)
    while not signals.count:
        if signals.wants_reload():
            print("reload", file=said)
        time.sleep(0.01)
print("ends", file=said)
"""


def test_a_terminal_that_is_closed_ends_the_cluster(tmp_path: Path) -> None:
    said = tmp_path / "said"
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
        os.execv(sys.executable, [sys.executable, "-c", WAITS, str(said)])
    until(lambda: said.exists() and said.read_text() == "waits\n", "the signals are caught")
    os.kill(pid, signal.SIGHUP)
    until(lambda: said.read_text() == "waits\nreload\n", "a reload is asked for")
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0
    assert said.read_text() == "waits\nreload\nends\n"


def test_another_file_may_be_named(cluster: Cluster) -> None:
    """Reads the named file again in later reloads."""
    other = rewrite(cluster, "ab").rename(cluster.log.parent / "other.yaml")
    assert cluster.operate("reload", str(other)).stdout == "reloaded: removed c\n"
    assert cluster.operate("reload").stdout == "reloaded: nothing has changed\n"
    assert known(cluster) == {"a", "b"}
