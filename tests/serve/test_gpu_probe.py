"""GPUs asked before anything starts: each mistake is one line, and exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from msgspec import structs

from kvcached import DriverMemory
from prism.serve.node.gpu_probe import GpuFound, _occupied, warnings
from tests.frontend.tiny_model import make_model
from tests.kvcached.compiling import build_libcuda, build_libnvml
from tests.serve.test_gpu_memory import holder

FAKE = '{"cpu_reads_gpu": true}'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model(tmp_path / "a")
    return tmp_path


def prism_serve(
    folder: Path, tmp: Path, command: str, device: str = "cuda:0", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command with the test libcuda: two GPUs of 1 GiB, unless `environment` differs."""
    data = {
        "devices": [{"name": device, "capacity": "64MiB", "page": "64KiB"}],
        "models": [{"name": "a", "path": "a"}],
        "engine": {"adapter": "fake", "static": "5MiB"},
        "frontend": {"port": 0},
    }
    (folder / "prism.yaml").write_text(yaml.safe_dump(data))
    return subprocess.run(
        [sys.executable, "-c", "from prism.cli.serve import main; main()", command],
        cwd=folder,
        env={
            "PATH": os.environ["PATH"],
            "TMPDIR": str(tmp),
            "HOME": str(folder),
            "PRISM_FAKE": FAKE,
            "KVCACHED_LIBCUDA": str(build_libcuda()),
            "KVCACHED_LIBNVML": str(build_libnvml()),
            "KVCACHED_TEST_CUDA_BOOK": os.environ["KVCACHED_TEST_CUDA_BOOK"],
            "KVCACHED_TEST_CUDA_CONTEXT_BYTES": str(3 << 20),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_check_shows_what_is_beside_models(folder: Path, short_dir: Path) -> None:
    done = prism_serve(folder, short_dir, "check")
    assert done.returncode == 0, done.stderr
    assert "engines without a model" in done.stdout
    assert "models on GPUs" in done.stdout
    assert "2 x 3MiB" in done.stdout  # the context, measured; 0 was planned
    assert "58MiB" in done.stdout  # of 64 is left for models
    assert not list(Path("/dev/shm").glob("prism-kvcached.prism-check-*"))


def test_without_nvml_the_plan_counts(folder: Path, short_dir: Path) -> None:
    done = prism_serve(folder, short_dir, "check", KVCACHED_LIBNVML="/nowhere")
    assert done.returncode == 0, done.stderr
    assert "2 x 0B" in done.stdout
    assert "unknown" in done.stdout
    assert done.stderr.startswith("warning: NVML does not answer for cuda:0: ")


def test_a_driver_that_names_no_process_is_reported() -> None:
    seen = GpuFound("H200", "580", total_bytes=8, free_bytes=8, context_bytes=1)
    [said] = warnings({"cuda:0": seen, "cuda:1": structs.replace(seen, context_bytes=0)})
    assert said.startswith("warning: the driver does not report processes on cuda:1: ")
    assert not warnings({"cuda:0": seen})


def test_check_beside_those_that_hold_the_memory_warns(
    folder: Path, short_dir: Path, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warns only, as the processes may belong to the cluster that is checked."""
    size = {"KVCACHED_TEST_CUDA_BYTES": str(128 << 20)}
    libraries = {"KVCACHED_LIBCUDA": build_libcuda(), "KVCACHED_LIBNVML": build_libnvml()}
    for name, value in {**size, **libraries}.items():
        monkeypatch.setenv(name, str(value))
    with holder(namespace, 100 << 20) as pid:
        done = prism_serve(folder, short_dir, "check", **size)
    assert done.returncode == 0, done.stderr
    assert "models on GPUs" in done.stdout
    [line] = [line for line in done.stderr.splitlines() if "cuda:0" in line]
    assert line.startswith("warning: device 'cuda:0' has 128 MiB, of which ")
    assert f"pid {pid}" in line


@pytest.mark.parametrize(
    ("capacity", "may_be_occupied", "wait_s"), [(8, False, 10.0), (8, True, 0.0), (9, False, 0.0)]
)
def test_the_start_waits_for_the_memory_of_those_that_were_killed(
    capacity: int, may_be_occupied: bool, wait_s: float
) -> None:
    """Does not wait for memory that the GPU never had."""
    waited: list[float] = []
    memory = DriverMemory(8, 8, "nvml", ())
    device: Any = SimpleNamespace(check_capacity=waited.append)
    assert _occupied(device, memory, capacity, may_be_occupied) == ""
    assert waited == [wait_s]


def check_refused(done: subprocess.CompletedProcess[str], said: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("error: devices[0]: ")
    assert said in line


MISTAKES = [
    ("cuda:0", {"KVCACHED_LIBCUDA": "/nowhere/libcuda.so.1"}, "install"),
    ("cuda:7", {}, "'cuda:7' does not exist"),
    ("cuda:1", {"CUDA_VISIBLE_DEVICES": "0"}, "CUDA_VISIBLE_DEVICES"),
    ("cuda:0", {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES"),
    ("cuda:0", {"KVCACHED_TEST_CUDA_VMM": "0"}, "virtual memory"),
    ("cuda:0", {"KVCACHED_TEST_CUDA_GRANULARITY": "2097152"}, "2097152"),
    ("cuda:0", {"KVCACHED_TEST_CUDA_MIG": "1"}, "disable MIG (nvidia-smi -mig 0)"),
    ("cuda:0", {"CUDA_VISIBLE_DEVICES": "MIG-1234"}, "MIG"),
    ("cuda:0", {"KVCACHED_TEST_CUDA_VERSION": "10010"}, "driver is too old"),
    ("cuda:0", {"KVCACHED_TEST_CUDA_INIT_ERROR": "803"}, "803"),
    ("cuda:0", {"KVCACHED_TEST_CUDA_BYTES": "33554432"}, "capacity of 64 MiB is not available"),
    # Without NVML, CUDA answers as far as it can.
    ("cuda:0", {"KVCACHED_LIBNVML": "/nowhere", "KVCACHED_TEST_CUDA_VMM": "0"}, "virtual memory"),
]


@pytest.mark.parametrize(("device", "environment", "said"), MISTAKES)
def test_a_gpu_that_cannot_be_used(
    folder: Path, short_dir: Path, device: str, environment: dict[str, str], said: str
) -> None:
    check_refused(prism_serve(folder, short_dir, "check", device, **environment), said)


def test_nothing_is_started_on_a_gpu_that_cannot_be_used(folder: Path, short_dir: Path) -> None:
    check_refused(prism_serve(folder, short_dir, "up", "cuda:7"), "'cuda:7' does not exist")
    assert not list(short_dir.iterdir())
