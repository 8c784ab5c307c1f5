"""Processes that hang, files that vanish, a model that cannot be read: the cluster serves on."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import httpx

from prism.cluster.state.timing import timing_of
from prism.config.resolved import read_resolved
from tests.serve.conftest import Cluster, alive, serving, until

PARTS = ["prism.cluster", "prism.agent", "prism.frontend"]
# Less than users may set: nothing here waits for a ledger.
HANG = {
    "hang_timeout": "4s",
    "setup": "import prism.config.resolve\nprism.config.resolve.HANG_LEAST_S = 2",
}


def served(cluster: Cluster, model: str) -> bool:
    try:
        return cluster.post(model).status_code == 200
    except httpx.TransportError:
        return False


def killed_and_replaced(cluster: Cluster, name: str, number: signal.Signals) -> None:
    before = cluster.child(name)
    os.kill(before, number)
    until(lambda: not alive(before), f"the end of {name}", 60)

    def replaced() -> bool:
        try:
            return cluster.child(name) != before
        except (LookupError, OSError):
            return False

    until(replaced, f"another {name}", 60)


def test_parts_that_hang_are_replaced_and_the_launcher_stays(
    tmp_path: Path, short_dir: Path
) -> None:
    with serving(tmp_path, short_dir, **HANG) as cluster:
        for name in PARTS:
            killed_and_replaced(cluster, name, signal.SIGSTOP)
        until(lambda: served(cluster, "a") and served(cluster, "b"), "serving", 90)
        for part in ("scheduler", "agent-host0", "frontend-f0"):
            said = rf"{part} did not answer for \d+ s and was killed"
            assert re.search(said, cluster.output())
        assert cluster.process.poll() is None


def test_one_unreadable_model_and_removed_files_leave_the_rest(
    tmp_path: Path, short_dir: Path
) -> None:
    with serving(tmp_path, short_dir) as cluster:
        run_dir = cluster.run_dir
        (run_dir / "cluster.json").unlink()
        (tmp_path / "b" / "tokenizer.json").write_text("{")
        killed_and_replaced(cluster, "prism.frontend", signal.SIGKILL)
        killed_and_replaced(cluster, "prism.cluster", signal.SIGKILL)
        until(lambda: served(cluster, "a"), "serving", 60)
        refused = cluster.post("b")
        assert refused.status_code == 503
        assert refused.json()["error"]["message"].startswith("b cannot be served now: cannot load")
        assert (run_dir / "cluster.json").exists()
        assert cluster.operate("status").returncode == 0
        assert f"files of {run_dir} were removed and have been restored" in cluster.output()


def test_deaths_in_a_row_leave_the_cluster_running(tmp_path: Path, short_dir: Path) -> None:
    with serving(tmp_path, short_dir) as cluster:
        for _ in range(6):
            killed_and_replaced(cluster, "prism.cluster", signal.SIGKILL)
        assert "restarting in 16 s" in cluster.output()
        assert cluster.process.poll() is None
        assert served(cluster, "a")
        until(lambda: "scheduler: ended" in cluster.operate("status").stdout, "the report", 60)


def test_the_configuration_bounds_an_activation(tmp_path: Path, short_dir: Path) -> None:
    engine = {"adapter": "fake", "static": "1MiB", "activation_timeout": "2s"}
    with serving(tmp_path, short_dir, '{"activation_s": 600}', engine=engine) as cluster:
        config = read_resolved(cluster.run_dir / "cluster.json")
        assert timing_of(config).activation_s == 32
        until(lambda: "it has been silent for" in agent_log(cluster), "the end of the engine", 60)


def agent_log(cluster: Cluster) -> str:
    return (cluster.run_dir / "logs" / "agent-host0.log").read_text()
