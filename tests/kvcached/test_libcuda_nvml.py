"""NVML double: the same GPUs and memory as the test libcuda's, without CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .compiling import ROOT, build_libnvml
from .driver import MEGABYTE, PAGE, start_with
from .libcuda import LibCuda

ASK = """
import ctypes, json, sys
nvml = ctypes.CDLL(sys.argv[1])
text, number, other = ctypes.create_string_buffer(96), ctypes.c_uint(), ctypes.c_uint()
gpu = ctypes.c_void_p()

def said(name, *arguments):
    result = getattr(nvml, name)(*arguments, text, 96)
    return text.value.decode() if result == 0 else result

def counted(name, *arguments):
    result = getattr(nvml, name)(*arguments, ctypes.byref(number), ctypes.byref(other))
    return [number.value, other.value] if result == 0 else result

class Process(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("gpu", ctypes.c_uint),
                ("compute", ctypes.c_uint)]

def memory():
    info = (ctypes.c_ulonglong * 3)()
    assert nvml.nvmlDeviceGetMemoryInfo(gpu, info) == 0
    newer = (ctypes.c_ulonglong * 5)(40 | 2 << 24)
    assert nvml.nvmlDeviceGetMemoryInfo_v2(gpu, newer) == 0
    assert [newer[1], newer[3], newer[4], newer[2]] == [*info, 0]
    return list(info)

def processes():
    size = ctypes.c_uint()
    result = nvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu, ctypes.byref(size), None)
    assert result == (7 if size.value else 0)
    found = (Process * size.value)()
    assert nvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu, ctypes.byref(size), found) == 0
    return [[one.pid, one.used] for one in found]
"""


def ask(*questions: str, start: str = "assert nvml.nvmlInitWithFlags(0) == 0", **env: str) -> Any:
    """Returns NVML's answers in a fresh process, which never loads libcuda."""
    questions_code = ", ".join(questions)
    code = f"{ASK}\n{start}\nprint(json.dumps([{questions_code}]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(build_libnvml())],
        env={**os.environ, "KVCACHED_TEST_CUDA_BYTES": str(64 * MEGABYTE), **env},
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


FIRST = "nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(gpu))"


def test_nothing_is_said_before_init() -> None:
    assert (
        ask(FIRST, "counted('nvmlDeviceGetCount_v2')", "nvml.nvmlShutdown()", start="") == [1] * 3
    )
    rest = ["nvml.nvmlInit_v2()", "nvml.nvmlShutdown()", FIRST, "nvml.nvmlShutdown()", FIRST]
    assert ask(*rest) == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("visible", ["", "1", None])
def test_what_a_gpu_is(visible: str | None) -> None:
    """Ignores CUDA_VISIBLE_DEVICES."""
    questions = {
        "counted('nvmlDeviceGetCount_v2')": [2, 0],
        FIRST: 0,
        "said('nvmlDeviceGetUUID', gpu)": "GPU-7e57c0da-0000-4000-8000-000000000001",
        "said('nvmlDeviceGetName', gpu)": "NVIDIA H200",
        "counted('nvmlDeviceGetCudaComputeCapability', gpu)": [9, 0],
        "counted('nvmlDeviceGetNumGpuCores', gpu)": [132 * 128, 0],
        "counted('nvmlDeviceGetMigMode', gpu)": [0, 0],
        "said('nvmlSystemGetDriverVersion')": "580.65.06",
        "counted('nvmlSystemGetCudaDriverVersion_v2')": [13000, 0],
        "memory()": [64 * MEGABYTE, 64 * MEGABYTE, 0],
        "processes()": [],
        "nvml.nvmlDeviceGetHandleByIndex_v2(2, ctypes.byref(gpu))": 2,
        "nvml.nvmlDeviceGetHandleByUUID(b'GPU-1', ctypes.byref(gpu))": 6,
        "nvml.nvmlDeviceGetHandleByUUID(b'GPU-7e57c0da-0000-4000-8000-000000000002',"
        " ctypes.byref(gpu))": 0,
        "counted('nvmlDeviceGetIndex', gpu)": [1, 0],
        "nvml.nvmlDeviceGetUUID(gpu, text, 4)": 7,
        "nvml.nvmlDeviceGetUUID(None, text, 96)": 2,
    }
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    answers = ask(*questions, KVCACHED_TEST_CUDA_BOOK=f"/dev/shm/test-nvml-{os.getpid()}", **env)
    os.unlink(f"/dev/shm/test-nvml-{os.getpid()}")
    assert dict(zip(questions, answers, strict=True)) == questions


def test_a_gpu_of_a_tests_wish() -> None:
    wish = {"MIG": "1", "NAME": "NVIDIA A100", "CAPABILITY": "8.0", "SMS": "108", "DEVICES": "8"}
    assert ask(
        "counted('nvmlDeviceGetCount_v2')[0]",
        FIRST,
        "said('nvmlDeviceGetName', gpu)",
        "counted('nvmlDeviceGetMigMode', gpu)",
        "counted('nvmlDeviceGetCudaComputeCapability', gpu)",
        **{f"KVCACHED_TEST_CUDA_{name}": value for name, value in wish.items()},
    ) == [8, 0, "NVIDIA A100", [1, 1], [8, 0]]


HOLD = """
driver = Driver(libcuda, 0)
assert driver.create(PAGE)[0] == driver.allocate(PAGE)[0] == 0
print("held", flush=True)
sys.stdin.read()
"""


def test_processes_and_what_they_hold(libcuda: LibCuda) -> None:
    """Counts as the driver does: with the context, and for both GPUs, visible or not."""
    second = {"CUDA_VISIBLE_DEVICES": "1", "KVCACHED_TEST_CUDA_CONTEXT_BYTES": str(MEGABYTE)}
    process = start_with(libcuda, HOLD, **second)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    bytes_held = 2 * PAGE + MEGABYTE
    other = "nvml.nvmlDeviceGetHandleByIndex_v2(1, ctypes.byref(gpu))"
    questions = [FIRST, "processes()", other, "processes()", "memory()[2]"]
    name = f"said('nvmlSystemGetProcessName', {process.pid})"
    assert ask(*questions, name)[:5] == [0, [], 0, [[process.pid, bytes_held]], bytes_held]
    assert "python" in ask(name)[0]
    process.kill()
    process.communicate()
    assert ask(*questions, name) == [0, [], 0, [], 0, 6]
    assert ask(other, "memory()[2]", KVCACHED_TEST_CUDA_TEARDOWN_MS="1")[1] == 0


def test_cuda_is_not_initialised_by_it(libcuda: LibCuda) -> None:
    code = """
nvml = ctypes.CDLL(sys.stdin.readline().strip())
assert nvml.nvmlInit_v2() == 0
gpu = ctypes.c_void_p()
assert nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(gpu)) == 0
print(cu.cuDeviceGetCount(ctypes.byref(count)), flush=True)
if os.fork() == 0:
    memory = (ctypes.c_ulonglong * 3)()
    print(nvml.nvmlDeviceGetMemoryInfo(gpu, memory), cu.cuInit(0), flush=True)
    os._exit(0)
print(os.wait()[1])
"""
    process = start_with(libcuda, code)
    output, errors = process.communicate(f"{build_libnvml()}\n")
    assert output.split() == ["3", "0", "0", "0"], errors


def test_nvidias_bindings_take_it(tmp_path: Path) -> None:
    """Accepts the structures that pynvml defines, where it is installed."""
    pytest.importorskip("pynvml")
    (tmp_path / "libnvidia-ml.so.1").symlink_to(build_libnvml())
    code = """
import pynvml
pynvml.nvmlInit()
gpu = pynvml.nvmlDeviceGetHandleByIndex(pynvml.nvmlDeviceGetCount() - 1)
again = pynvml.nvmlDeviceGetHandleByUUID(pynvml.nvmlDeviceGetUUID(gpu))
assert pynvml.nvmlDeviceGetIndex(again) == pynvml.nvmlDeviceGetIndex(gpu) == 1
assert pynvml.nvmlDeviceGetMemoryInfo(gpu, version=pynvml.nvmlMemory_v2).total == 1 << 26
assert pynvml.nvmlDeviceGetComputeRunningProcesses(gpu) == []
assert pynvml.nvmlDeviceGetMigMode(gpu) == [0, 0]
assert pynvml.nvmlDeviceGetCudaComputeCapability(gpu) == (9, 0)
pynvml.nvmlShutdown()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "KVCACHED_TEST_CUDA_BYTES": str(64 * MEGABYTE),
            "LD_LIBRARY_PATH": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
