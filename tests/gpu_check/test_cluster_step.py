"""Step "cluster" of scripts/gpu-check: its load on fake engines, start and end of the cluster, and
the step's requirements. The whole step runs in test_whole.py."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvcached
from lab.gpu_check.driver import Driver
from lab.gpu_check.memory.models import FAMILIES
from lab.gpu_check.processes import is_alive
from lab.gpu_check.report import Skip
from lab.gpu_check.serving import cluster, cluster_load, engine
from lab.gpu_check.serving.cluster_found import Burst, Scale, Shape, judge
from lab.gpu_check.sizes import Sizes, short_folder
from tests.frontend.tiny_model import make_model
from tests.gpu_check.steps import report_in
from tests.gpu_check.test_cluster_found import BURST, KILL, measured
from tests.kvcached.compiling import ROOT
from tests.serve.conftest import Cluster, serving, until

MIB = 1 << 20
VOCABULARY = 300  # of the tiny tokenizer
HOLD = """
import sys, kvcached
client = kvcached.Device.open("host:0", namespace=sys.argv[1]).client("engine")
tensor = client.alloc_virtual_tensor(1 << 20)
tensor.map(0, 1 << 20)
print("holds", flush=True)
sys.stdin.read()
"""


# --- the load, on a cluster ------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the measurements of the load on a cluster of fake engines."""
    folder = tmp_path_factory.mktemp("load")
    for name in FAMILIES:
        make_model(folder / name)
    models = [{"name": name, "path": name, "never_evict": True} for name in FAMILIES]
    short = Path(tmp_path_factory.mktemp("t"))
    with serving(folder, short, json.dumps({"decode_step_ms": 20}), models=models) as served:
        asyncio.run(cluster_load.main(plan_of(served), folder / "load.json"))
        found: dict[str, Any] = json.loads((folder / "load.json").read_text())
        assert served.stop() == 0
    return found


def plan_of(served: Cluster) -> dict[str, Any]:
    resolved = json.loads((served.run_dir / "cluster.json").read_text())
    return {
        "url": served.url,
        "namespace": resolved["namespace"],
        "device": "host:0",
        "models": dict.fromkeys(FAMILIES, VOCABULARY),
        "burst": asdict(BURST),
        "kill": asdict(KILL),
        "undisturbed": True,
        "alternate_s": 0.0,
        "settle_s": 0.1,
        "request_s": 60.0,
        "trace": str(served.run_dir / "logs" / "activations-host0.trace.json"),
    }


def test_the_load_is_judged_whole(loaded: dict[str, Any], tmp_path: Path) -> None:
    report = report_in(tmp_path, "cluster")
    judge(report, loaded, BURST, KILL, fills_pages=False)
    skipped = "skipped: tiny models do not fill pages of this size"
    assert report.checks == {"bursts": "passed", "memory_moves": skipped, "kill": "passed"}
    assert loaded["finished"]
    phases = [(burst["phase"], burst["model"]) for burst in loaded["bursts"]]
    alone = [(phase, family) for family in FAMILIES for phase in ("first", "alone")]
    assert phases == [*alone, *(("turn", family) for family in FAMILIES)]


def test_the_death_of_an_engine_is_measured(loaded: dict[str, Any], tmp_path: Path) -> None:
    report = report_in(tmp_path, "cluster")
    judge(report, loaded, BURST, KILL, fills_pages=False)
    kill, figures = report.facts["kill"], report.facts["figures"]
    assert kill["equal_tokens"] == [KILL.output_tokens] * 2 * KILL.streams
    assert all(10 <= tokens < KILL.output_tokens for tokens in kill["tokens_at_kill"])
    assert kill["held_bytes"] > 0
    assert {"llama_tokens_per_s", "ttft_p99", "killed_ledger", "first_token"} <= set(figures)
    assert figures["first_token"]["value"] >= figures["killed_ledger"]["value"]
    assert kill["activation_s"]["total"] > 0


# --- memory of a dead engine -----------------------------------------------------------------


@contextmanager
def held(namespace: str) -> Iterator[tuple[kvcached.Device, subprocess.Popen[bytes]]]:
    """Yields a host device and a process that holds some of it."""
    sizes = {"capacity_bytes": 8 * MIB, "page_bytes": 64 << 10}
    device = kvcached.Device.open("host:0", **sizes, namespace=namespace)
    command = [sys.executable, "-c", HOLD, namespace]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"holds\n"
        yield device, process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
        device.destroy(force=True)


def test_memory_of_a_dead_process_is_seen_to_come_back(namespace: str) -> None:
    with held(namespace) as (device, process):
        watch = cluster_load.Watch(device, process.pid)
        assert watch.held_bytes == MIB
        process.kill()
        process.wait()
        found = watch.run(time.monotonic())
    assert found["is_named"]
    assert None not in found.values()


def test_memory_that_does_not_come_back_is_reported(
    namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_load, "GONE_S", 0.1)
    with held(namespace) as (device, process):
        found = cluster_load.Watch(device, process.pid).run(time.monotonic())
    assert (found["ledger_s"], found["driver_s"]) == (None, None)


@pytest.mark.parametrize(("names", "free_mib"), [(True, 0), (False, 4)])
def test_a_death_is_seen_by_process_or_by_free_memory(names: bool, free_mib: int) -> None:
    """Falls back to free memory, since a driver may name no processes in a container."""
    usages = [SimpleNamespace(clients=[client(7, 12 * MIB)]), SimpleNamespace(clients=[])]
    there = SimpleNamespace(pid=7, used_bytes=9 * MIB)
    before = SimpleNamespace(processes=[there] if names else [], free_bytes=MIB)
    almost = SimpleNamespace(processes=before.processes, free_bytes=5 * MIB - 1)
    after = SimpleNamespace(processes=[], free_bytes=(1 + free_mib) * MIB)
    memories = iter([before, almost, after])
    device: Any = SimpleNamespace(
        usage=lambda: usages.pop(0) if len(usages) > 1 else usages[0],
        driver_memory=lambda: next(memories),
    )
    watch = cluster_load.Watch(device, 7)
    found = watch.run(time.monotonic())
    assert (found["is_named"], found["held_bytes"]) == (names, (9 if names else 12) * MIB)
    assert 0 <= found["ledger_s"] <= found["driver_s"]
    assert next(memories, None) is None


def client(pid: int, static_bytes: int) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, committed_bytes=0, static_bytes=static_bytes)


def test_peaks_are_kept_by_phase_and_model(namespace: str) -> None:
    with held(namespace) as (device, _):
        memory = cluster_load.KvMemory(device, {"engine": "llama"}, phase="turn llama")
        memory.start()
        until(lambda: memory.facts()["series"], "a sample")
        memory.stop()
    peaks = {"held_bytes": MIB, "used_bytes": MIB}
    assert memory.facts()["peaks"] == {"turn llama": {"llama": peaks}}


# --- start and end of the cluster ------------------------------------------------------------


@pytest.fixture
def life(tmp_path: Path, short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> cluster.Cluster:
    """Returns a cluster that is not started. Its models are configurations and empty weights."""
    monkeypatch.setattr(cluster, "short_folder", lambda _, name: short_dir / name)
    folders = {}
    for name in FAMILIES:
        folders[name] = tmp_path / name
        folders[name].mkdir()
        config = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
        more = {"num_hidden_layers": 2, "vocab_size": 512}
        (folders[name] / "config.json").write_text(json.dumps(config | more))
        (folders[name] / "model.safetensors").write_bytes(bytes(5000))
    sizes = Sizes(4 << 30, 1 << 30)
    scale = Scale(4096, 64, 100 * MIB, Burst(8, 32, 8), KILL, 0.0, 0.0)
    return cluster.Cluster(report_in(tmp_path, "cluster"), dict(os.environ), scale, folders, sizes)


def test_the_capacity_is_below_what_both_bursts_take(life: cluster.Cluster) -> None:
    shape = Shape.of(life.folders["llama"])
    burst_bytes = shape.kv_bytes(life.scale.burst.tokens, 4096)
    assert burst_bytes == 5 * 4 * 4096  # slabs of 64 tokens, with a page for each of 4 buffers
    kv_bytes = life.capacity_bytes() - 2 * (100 * MIB + 2 * 4096)
    assert burst_bytes < kv_bytes <= 2 * burst_bytes


def launched_as(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(cluster, "LAUNCH", (sys.executable, "-c", program))


def test_a_cluster_that_does_not_start_says_why(
    life: cluster.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched_as(monkeypatch, "import sys; sys.exit('error: devices[0]: no room')")
    with pytest.raises(RuntimeError, match=r"prism-serve ended: error: devices\[0\]: no room"):
        life.start()
    with pytest.raises(RuntimeError, match="prism-serve ended before: error: "):
        life.down()
    life.remove()


def test_a_model_that_is_not_served_fails_the_start(
    life: cluster.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import json, pathlib, sys, time\n"
        "run = pathlib.Path(sys.argv[sys.argv.index('--run-dir') + 1]); run.mkdir()\n"
        "(run / 'cluster.json').write_text(json.dumps({'namespace': 'n0', 'port': 1}))\n"
        "print('ready in 1 s', flush=True); time.sleep(60)"
    )
    launched_as(monkeypatch, program)
    monkeypatch.setattr(cluster, "AGAIN_S", 0.1)
    failed = {"model": "llama", "state": "failed", "error": "out of memory"}
    monkeypatch.setattr(cluster.Cluster, "models", lambda _: {"llama": failed})
    with pytest.raises(RuntimeError, match="llama is failed: out of memory"):
        life.start()
    assert life.url == ""
    assert life.process is not None
    life.remove()
    assert life.process.poll() is not None
    assert not life.run.exists()


def test_a_cluster_that_hangs_says_where(
    life: cluster.Cluster, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Engines write their stacks too, although they run in separate sessions."""
    inner = "import time\ndef an_activation(): time.sleep(60)\nan_activation()"
    program = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {inner!r}], start_new_session=True)\n"
        "def a_supervisor(): child.wait()\n"
        "a_supervisor()"
    )
    launched_as(monkeypatch, program)
    life.env["PYTHONFAULTHANDLER"] = "1"
    monkeypatch.setattr(cluster, "START_S", 1.5)
    with pytest.raises(RuntimeError, match="prism-serve is not ready after"):
        life.start()
    life.remove()
    shown = capfd.readouterr().out
    assert "in an_activation" in shown
    assert "in a_supervisor" in shown
    assert not any(map(is_alive, life.pids))


@pytest.mark.parametrize(
    ("left", "says"),
    [
        ("process", r"process \d+"),
        ("ledger", "/prism-kvcached.left0.cuda:0"),
        ("run_dir", "cluster-run"),
        ("memory", "1073741824 bytes of GPU memory"),
    ],
)
def test_what_a_cluster_leaves_is_reported(
    left: str, says: str, life: cluster.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "GONE_S", 0.1)
    monkeypatch.setattr(cluster, "SHM", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    life.namespace = "left0"
    driver: Any = SimpleNamespace(free_bytes=lambda: 3 << 30)
    cluster.ended(life, driver, 3 << 30)
    if left == "process":
        life.pids = {os.getpid()}
    elif left == "ledger":
        (tmp_path / "shm" / "prism-kvcached.left0.cuda:0").touch()
    elif left == "run_dir":
        life.run.mkdir(parents=True)
    free_bytes = (4 if left == "memory" else 3) << 30
    with pytest.raises(RuntimeError, match=says):
        cluster.ended(life, driver, free_bytes)
    life.pids = set()
    life.remove()
    cluster.ended(life, driver, 3 << 30)


@pytest.mark.parametrize(("gap", "passes"), [(0.2, True), (0.3, False), (float("nan"), False)])
def test_streams_that_go_on_with_wrong_tokens_fail(
    gap: float, passes: bool, life: cluster.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measured()
    found["kill"]["prompts"] = [[1, 2]] * KILL.streams
    (life.work / "load.json").write_text(json.dumps(found))
    verdict = {"llama": {"largest_gap": gap, "spread": 1.0}}
    monkeypatch.setattr(engine, "helper", lambda *_: verdict)
    cluster.tokens(life.report, life.env, life)
    assert (life.report.checks["tokens"] == "passed") is passes
    [served] = json.loads((life.work / "killed.json").read_text())["rounds"]
    assert served["tokens"] == [list(range(KILL.output_tokens))] * KILL.streams


def test_a_run_directory_is_short_enough_for_sockets(tmp_path: Path) -> None:
    assert short_folder(Path("/w"), "cluster-run") == Path("/w/cluster-run")
    moved = short_folder(tmp_path / ("long" * 20), "cluster-run")
    assert re.fullmatch(r"/dev/shm/gpu-check-\w{8}/cluster-run", str(moved))


def test_a_gpu_that_is_too_small_is_named(
    life: cluster.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = SimpleNamespace(free_bytes=lambda: MIB)
    monkeypatch.setattr(cluster, "sizes_and_environment", lambda _: (Sizes(0, 0), {}))
    monkeypatch.setattr(cluster, "model_folders", lambda *_: list(life.folders.values()))
    monkeypatch.setattr(Driver, "open", lambda: driver)
    with pytest.raises(Skip, match="1048576 bytes are free; two engines need"):
        cluster.body(life.report)


BARE = """
import sys
from importlib.metadata import packages_distributions
allowed = set(sys.argv[1].split(","))
own = {"prism", "kvcached", "lab"}
top = {n: d for n, d in packages_distributions().items() if n not in own | {"opentelemetry"}}
missing = {n for n, d in top.items() if not {x.lower().replace("_", "-") for x in d} & allowed}

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"a bare machine lacks {name}", name=name)

sys.meta_path.insert(0, Refuse())
for name in sys.argv[2].split(","):
    __import__(name)
"""


def test_a_bare_machine_has_all_that_the_step_imports() -> None:
    """Considers the packages of the image and the carried ones."""
    files = (ROOT / "tests/packaging/gpu-image.txt", ROOT / "requirements/gpu-box.txt")
    pins = [line for file in files for line in file.read_text().splitlines() if "==" in line]
    allowed = {pin.partition("==")[0].lower().replace("_", "-") for pin in pins}
    allowed.add("async-timeout")  # redis needs it before Python 3.11.3, and the image has 3.12
    modules = (
        "prism.cli.serve,prism.cluster.main,prism.agent.main,prism.frontend.__main__,"
        "prism.engines.processes.forkserver,prism.engines.processes.preloaded,"
        "prism.serve.node.gpu_probe,prism.serve.operator,prism.models.tokenizer,"
        "lab.gpu_check.serving.cluster_load"
    )
    command = [sys.executable, "-c", BARE, ",".join(allowed), modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
