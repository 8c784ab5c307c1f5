"""Step "cluster": prism-serve on one GPU, two engines with a model each, one ledger.

The capacity is below the sum of both models' KV peaks, so that memory has to move between them.
Each model answers bursts alone, then both answer in turn. Then the first model's engine is killed
under load. Every stream must have as many tokens as were requested, and transformers judges each
token by those before it. Tokens may differ from those of an undisturbed run, since rounding in
bfloat16 decides near ties by the other requests of a batch. The step reports how many are equal.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lab.gpu_check.driver import Driver
from lab.gpu_check.kv import CUDA
from lab.gpu_check.memory.models import FAMILIES
from lab.gpu_check.memory.peers import Peer
from lab.gpu_check.processes import abort, descendants, is_alive
from lab.gpu_check.report import (
    Report,
    Skip,
    end_of,
    is_quick,
    on_doubles,
    run_as_step,
    stretched,
)
from lab.gpu_check.serving.cluster_found import (
    SLO_TPOT_S,
    SLO_TTFT_S,
    Scale,
    Shape,
    judge,
)
from lab.gpu_check.serving.engine import judge_tokens
from lab.gpu_check.serving.process import (
    log_file,
    logged,
    model_folders,
    read,
    sizes_and_environment,
)
from lab.gpu_check.sizes import GIB, MIB, PAGE_BYTES, SHM, Sizes, short_folder, store_name

LIMIT_S = 170.0  # without a runner, which sets it otherwise
OTHER_S = 45.0  # of the load's time: for all but the bursts in turn
END_S, JUDGE_S = 15.0, 20.0
START_S, AGAIN_S, REQUEST_S, GONE_S = 90.0, 15.0, 60.0, 20.0
SLACK_BYTES = 256 * MIB
STORE_BYTES = 7 * GIB
LOG_LINES = 200
LOAD = "cluster-load"  # name of its log
LAUNCH = (sys.executable, "-c", "from prism.cli.commands import serve; serve()")


def main(arguments: list[str] | None = None) -> int:
    return run_as_step("cluster", __doc__, body, arguments)


def body(report: Report) -> None:
    sizes, env = sizes_and_environment(report)
    scale = Scale.of(sizes)
    if on_doubles():
        env["KVCACHED_TEST_CUDA_GRANULARITY"] = str(scale.page_bytes)
    written = model_folders(report, sizes, env, FAMILIES)
    folders = dict(zip(FAMILIES, written, strict=True))
    driver = Driver.open()
    free_bytes = driver.free_bytes()
    cluster = Cluster(report, env, scale, folders, sizes)
    if (capacity_bytes := cluster.capacity_bytes()) > free_bytes:
        raise Skip(f"{free_bytes} bytes are free; two engines need {capacity_bytes}")
    try:
        with report.check("started"):
            report.fact(activations=cluster.start())
        if cluster.url:
            with report.check("load"):
                cluster.load(report.left_s(LIMIT_S) - END_S - JUDGE_S)
            fills_pages = sizes.is_large or on_doubles()
            judge(report, cluster.found(), scale.burst, scale.kill, fills_pages=fills_pages)
        with report.check("ended"):
            report.fact(down_s=cluster.down())
            ended(cluster, driver, free_bytes)
    finally:
        cluster.remove()
    reference(report, driver, cluster.found())
    tokens(report, env, cluster)


class Cluster:
    """Cluster of prism-serve and its files, from `start` to `remove`."""

    def __init__(
        self,
        report: Report,
        env: dict[str, str],
        scale: Scale,
        folders: dict[str, Path],
        sizes: Sizes,
    ) -> None:
        self.folders, self.scale, self.env = folders, scale, env
        self.work = report.work / "cluster"
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        self.run = short_folder(report.work, "cluster-run")
        need_bytes = STORE_BYTES if sizes.is_large else 64 * MIB
        stores = sizes.store_folder(report.work, need_bytes) / store_name(report.work)
        self.store = stores / "cluster-store"
        self.store_bytes = need_bytes
        self.report, self.url, self.namespace = report, "", ""
        self.process: subprocess.Popen[bytes] | None = None
        self.pids: set[int] = set()
        self._log = self.work / "serve.log"

    def capacity_bytes(self) -> int:
        """Returns the engines' memory, the KV of one model's burst, and the guaranteed KV of the
        other model. That is less than both bursts take."""
        shapes = [Shape.of(folder) for folder in self.folders.values()]
        scale, page_bytes = self.scale, self.scale.page_bytes
        burst = max(shape.kv_bytes(scale.burst.tokens, page_bytes) for shape in shapes)
        loss = max(shape.kv_bytes(1, page_bytes) for shape in shapes)  # slabs that are not full
        least = sum(shape.kv_bytes(scale.context_length + 16, page_bytes) for shape in shapes)
        weights = sum(-(-shape.weight_bytes // page_bytes) * page_bytes for shape in shapes)
        return len(shapes) * scale.static_bytes + weights + burst + loss + least

    def start(self) -> dict[str, Any]:
        """Starts the cluster. Returns the stages of each activation. Raises RuntimeError if a model
        is not served."""
        file = self.work / "prism.yaml"
        file.write_text(json.dumps(configuration(self), indent=1))  # JSON is YAML
        self.run.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.store, ignore_errors=True)
        options = ("--config", str(file), "--run-dir", str(self.run))
        began_s = time.monotonic()
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*LAUNCH, *options, "--log-dir", str(self.work / "logs")],
                env=self.env,
                stdout=log,
                stderr=log,
            )
        try:
            self._await_ready(began_s)
        finally:
            self.pids = descendants(self.process.pid)
        self.report.fact(start_s=round(time.monotonic() - began_s, 1))
        return self._activations()

    def load(self, limit_s: float) -> None:
        """Runs the load in a separate process. Raises RuntimeError unless it finishes."""
        plan = self.work / "plan.json"
        alternate_s = max(0.0, min(self.scale.alternate_s, limit_s - OTHER_S))
        plan.write_text(json.dumps(self._plan(alternate_s)))
        module = "lab.gpu_check.serving.cluster_load"
        command = ["-m", module, str(plan), str(self.work / "load.json")]
        if code := logged(self.report, self.env, LOAD, command, limit_s):
            said = end_of(log_file(self.report, LOAD))
            raise RuntimeError(f"the load ended with {code}: {said}")

    def found(self) -> dict[str, Any]:
        """Returns the measurements of the load so far."""
        return read(self.work / "load.json")

    def down(self) -> float:
        """Runs `prism-serve down`. Returns seconds. Raises RuntimeError if it fails."""
        process = self.process
        if process is None or process.poll() is not None:
            raise RuntimeError(f"prism-serve ended before: {end_of(self._log)}")
        began_s = time.monotonic()
        self.pids |= descendants(process.pid)
        command = [*LAUNCH, "down", "--run-dir", str(self.run)]
        limit_s = stretched(END_S)
        done = subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=limit_s, check=False
        )
        if done.returncode:
            raise RuntimeError(f"prism-serve down: {done.stderr.strip()[-300:]}")
        if code := process.wait(limit_s):
            raise RuntimeError(f"prism-serve ended with {code}: {end_of(self._log)}")
        return round(time.monotonic() - began_s, 2)

    def remove(self) -> None:
        """Ends what still runs, shows the logs, with the stacks of what hung, and removes what a
        killed prism-serve leaves."""
        process = self.process
        if process is not None and process.poll() is None:
            abort({process.pid, *descendants(process.pid)})
            process.wait()
        self._show()
        shutil.rmtree(self.store, ignore_errors=True)
        shutil.rmtree(self.run, ignore_errors=True)
        for path in self.shared():
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def shared(self) -> list[Path]:
        """Returns the files of this cluster in /dev/shm."""
        found = SHM.glob(f"*{self.namespace}*") if self.namespace and SHM.is_dir() else ()
        return sorted(found)

    def _await_ready(self, began_s: float) -> None:
        assert self.process is not None
        limit_s = min(stretched(START_S), self.report.left_s(LIMIT_S) - END_S)
        while "ready in " not in self._log.read_text(errors="replace"):
            if self.process.poll() is not None:
                raise RuntimeError(f"prism-serve ended: {end_of(self._log)}")
            if time.monotonic() - began_s > limit_s:
                raise RuntimeError(
                    f"prism-serve is not ready after {limit_s:.0f} s: {end_of(self._log)}"
                )
            time.sleep(0.1)
        resolved = json.loads((self.run / "cluster.json").read_text())
        self.namespace = resolved["namespace"]
        self.url = f"http://127.0.0.1:{resolved['port']}"

    def _activations(self) -> dict[str, Any]:
        """Returns each model's stages. Raises RuntimeError for one that does not become active."""
        until_s = time.monotonic() + stretched(AGAIN_S)
        while absent := [m for m in self.models().values() if m["state"] != "active"]:
            if time.monotonic() > until_s:
                self.url = ""
                why = "; ".join(f"{m['model']} is {m['state']}: {m['error']}" for m in absent)
                raise RuntimeError(f"not all models are served: {why}")
            time.sleep(0.5)
        return {name: model["stages_s"] for name, model in self.models().items()}

    def models(self) -> dict[str, dict[str, Any]]:
        import httpx

        answer = httpx.get(f"{self.url}/status", timeout=10.0, trust_env=False)
        [agent] = answer.raise_for_status().json()["agents"]
        return {report["model"]: report for report in agent["models"]}

    def _plan(self, alternate_s: float) -> dict[str, Any]:
        vocabularies = {
            name: json.loads((folder / "config.json").read_text())["vocab_size"]
            for name, folder in self.folders.items()
        }
        return {
            "url": self.url,
            "namespace": self.namespace,
            "device": CUDA,
            "models": vocabularies,
            "burst": asdict(self.scale.burst),
            "kill": asdict(self.scale.kill),
            "undisturbed": not is_quick(),
            "alternate_s": alternate_s,
            "settle_s": self.scale.settle_s,
            "request_s": stretched(REQUEST_S),
            "trace": str(self.work / "logs" / "activations-cuda0.trace.json"),
        }

    def _show(self) -> None:
        for path in [self._log, *sorted((self.work / "logs").glob("*.log"))]:
            if path.exists():
                lines = path.read_text(errors="replace").splitlines()[-LOG_LINES:]
                print(f"---- {path.name}", *lines, sep="\n", flush=True)


def configuration(cluster: Cluster) -> dict[str, Any]:
    """Returns the content of the cluster's YAML."""
    scale = cluster.scale
    slo = {"ttft": f"{SLO_TTFT_S:g}s", "tpot": f"{SLO_TPOT_S:g}s"}
    common = {"context_length": scale.context_length, "never_evict": True, "slo": slo}
    device = {"name": CUDA, "page": kib(scale.page_bytes), "engines": len(FAMILIES)}
    return {
        "devices": [{**device, "capacity": kib(cluster.capacity_bytes())}],
        "models": [
            {"name": name, "path": str(folder), **common}
            for name, folder in cluster.folders.items()
        ],
        "frontend": {"port": 0},
        "engine": {
            "static": kib(scale.static_bytes),
            "max_running": scale.burst.streams,
            "prefill_chunk_tokens": 2048,
            "drain_timeout": "5s",
            "weight_store": str(cluster.store),
            "weight_store_max": kib(cluster.store_bytes),
        },
    }


def kib(size_bytes: int) -> str:
    return f"{-(-size_bytes // 1024)}KiB"


# --- after the cluster -------------------------------------------------------------------------


def ended(cluster: Cluster, driver: Driver, free_bytes: int) -> None:
    """Raises RuntimeError if processes, files or memory of the cluster are left."""
    deadline_s = time.monotonic() + stretched(GONE_S)
    while left := left_behind(cluster, driver, free_bytes):
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"prism-serve left: {'; '.join(left)}")
        time.sleep(0.05)


def left_behind(cluster: Cluster, driver: Driver, free_bytes: int) -> list[str]:
    left = [f"process {pid}" for pid in sorted(cluster.pids) if is_alive(pid)]
    left += [str(path) for path in cluster.shared()]
    if cluster.run.exists():
        left.append(str(cluster.run))
    missing_bytes = free_bytes - driver.free_bytes()
    if missing_bytes > SLACK_BYTES:
        left.append(f"{missing_bytes} bytes of GPU memory")
    return left


def reference(report: Report, driver: Driver, found: dict[str, Any]) -> None:
    """Compares the time of the kill with that of a process that only holds as much memory."""
    kill = found.get("kill", {})
    if kill.get("driver_s") is None:
        return
    with report.check("killed_alone"):
        alone_s = killed_alone_s(driver, kill["held_bytes"])
        report.figure("killed_driver", kill["driver_s"], alone_s)


def killed_alone_s(driver: Driver, held_bytes: int) -> float:
    """Returns the seconds from the kill of a process that only holds memory until that is free."""
    piece_bytes = GIB if held_bytes > 2 * GIB else 8 * PAGE_BYTES
    size_bytes = max(1, held_bytes // piece_bytes) * piece_bytes
    before_bytes = driver.free_bytes()
    with Peer("hold", str(size_bytes), str(piece_bytes)) as peer:
        peer.answer()
        death = peer.kill_until(lambda: driver.free_bytes() >= before_bytes - SLACK_BYTES, GONE_S)
    return death.death_s + death.back_s


def tokens(report: Report, env: dict[str, str], cluster: Cluster) -> None:
    """Judges the tokens of the streams that resumed on another engine."""
    kill = cluster.found().get("kill")
    if kill is None:
        return
    with report.check("tokens"):
        victim = kill["victim"]
        said = [stream["token_ids"] for stream in kill["streams"][victim]]
        served = {"model": victim, "prompts": kill["prompts"], "tokens": said, "tokens_graphs": []}
        file = cluster.work / "killed.json"
        file.write_text(json.dumps({"rounds": [served]}))
        report.fact(tokens=judge_tokens(env, file, [cluster.folders[victim]]))


if __name__ == "__main__":
    sys.exit(main())
