"""Step "facts": machine, driver, GPU, packages, and what prevents other steps from running."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lab.gpu_check import driver as cuda
from lab.gpu_check.driver import Driver, DriverError
from lab.gpu_check.kv import why_no_locks
from lab.gpu_check.report import ROOT, Report, Skip, run_as_step, stretched
from lab.gpu_check.sizes import GIB, SHM, shm_free_bytes
from prism.engines import cuda_toolkit
from scripts.gpu_wheels.manifest import digest_of_sources

PACKAGES = (
    "torch", "triton", "transformers", "numpy", "cuda-bindings", "nanobind", "scikit-build-core",
    "cmake", "ninja", "pytest", "pytest-timeout", "hypothesis", "safetensors", "sglang",
    "sgl-kernel", "flashinfer-python", "msgspec", "pyzmq", "redis", "psutil", "fastapi",
)  # fmt: skip
NVML_UNSUPPORTED = "not supported"
SHM_MIN_BYTES = GIB  # models' files and stores; a ledger takes a few MiB
TAKEN_MAX_BYTES = GIB  # this process has a context, too
TORCH = """
import json, torch
cuda = torch.cuda
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "available": cuda.is_available(),
    "devices": cuda.device_count() if cuda.is_available() else 0,
    "bf16": cuda.is_available() and cuda.is_bf16_supported(),
    "nccl": torch.distributed.is_available() and torch.distributed.is_nccl_available(),
}))
"""


def main(arguments: list[str] | None = None) -> int:
    return run_as_step("facts", __doc__, body, arguments)


def body(report: Report) -> None:
    with report.check("machine"):
        report.fact(machine=machine(), limits=limits(), compilers=compilers(), packages=packages())
        report.fact(cuda_home=str(cuda_toolkit.find() or "none with libcudart"))
        report.fact(commit=commit(), sources=digest_of_sources(ROOT))
    with report.check("driver"):
        report.fact(gpu=gpu())
    with report.check("nvml"):
        report.fact(nvml=nvml())
    with report.check("whole_gpu"):
        is_whole(report.facts.get("nvml", {}))
    with report.check("idle_gpu"):
        is_idle(report.facts.get("gpu", {}), report.facts.get("nvml", {}))
    with report.check("shared_memory"):
        has_shared_memory()
    with report.check("locks"):
        if why := why_no_locks():
            raise RuntimeError(why)
    with report.check("torch"):
        report.fact(torch=torch_facts(report.facts.get("gpu", {})))


def is_whole(found: dict[str, Any]) -> None:
    if not found:
        raise Skip("NVML is missing")
    if found["mig"] == 1:
        raise RuntimeError(
            "MIG is on, and Prism shares whole GPUs: disable it (nvidia-smi -mig 0) or choose"
            " another GPU by CUDA_VISIBLE_DEVICES"
        )


def is_idle(gpu: dict[str, Any], found: dict[str, Any]) -> None:
    if not gpu:
        raise Skip("the check driver found no GPU")
    taken_bytes = gpu["total_bytes"] - gpu["free_bytes"]
    if taken_bytes > TAKEN_MAX_BYTES:
        raise RuntimeError(
            f"{taken_bytes >> 20} MiB of the GPU are taken, by {found.get('processes', 'unknown')}"
            " processes: sizes follow from free memory, and these processes distort times; end them"
        )


def has_shared_memory() -> None:
    if not SHM.is_dir():
        raise RuntimeError(
            f"{SHM} is missing, and kvcached stores its ledger there: mount -t tmpfs tmpfs {SHM}"
        )
    if shm_free_bytes() < SHM_MIN_BYTES:
        raise RuntimeError(
            f"{SHM} has {shm_free_bytes() >> 20} MiB free, and weights are stored there:"
            f" mount -o remount,size=64G {SHM}, or start the container with a larger --shm-size"
        )


def machine() -> dict[str, Any]:
    memory = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return {
        "python": platform.python_version(),
        "python_headers": (Path(sysconfig.get_path("include")) / "Python.h").exists(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": memory["MemTotal"].strip(),
        "memory_available": memory["MemAvailable"].strip(),
        "shm_bytes": shutil.disk_usage(SHM).total if SHM.is_dir() else 0,
        "shm_free_bytes": shm_free_bytes(),
        "disk_free_bytes": shutil.disk_usage(ROOT).free,
    }


def limits() -> dict[str, int]:
    """Returns soft limits; -1 is unlimited."""
    names = ("RLIMIT_MEMLOCK", "RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_AS", "RLIMIT_STACK")
    return {name[7:].lower(): resource.getrlimit(getattr(resource, name))[0] for name in names}


def compilers() -> dict[str, str]:
    return {name: first_line([name, "--version"]) for name in ("c++", "nvcc", "cmake", "ninja")}


def first_line(command: list[str]) -> str:
    """Returns the first line of a program's output. nvcc prints its version in the last line."""
    if shutil.which(command[0]) is None:
        return "not installed"
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    lines = (done.stdout or done.stderr).strip().splitlines() or [f"status {done.returncode}"]
    return lines[-1] if command[0] == "nvcc" else lines[0]


def packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found


def commit() -> str:
    """Returns the commit of the checkout, or "" if it came without its history."""
    if shutil.which("git") is None:
        return ""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.strip()


def gpu() -> dict[str, Any]:
    """Returns facts of device 0 by the driver. Raises RuntimeError that says what to do."""
    try:
        opened = Driver.open()
    except OSError as error:
        raise RuntimeError(f"the NVIDIA driver is missing: {error}; install it") from error
    except DriverError as error:
        raise RuntimeError(
            f"no usable GPU: {error}; check nvidia-smi and CUDA_VISIBLE_DEVICES"
        ) from error
    if opened.attribute(cuda.VIRTUAL_MEMORY_SUPPORTED) != 1:
        raise RuntimeError("this GPU or driver lacks virtual memory management (VMM)")
    free, total = opened.memory()
    return {
        "devices": opened.count(),
        "cuda": opened.version(),
        "name": opened.device_name(),
        "total_bytes": total,
        "free_bytes": free,
        "posix_files": opened.attribute(cuda.POSIX_FILES_SUPPORTED),
        "capability": [opened.attribute(cuda.CAPABILITY_MAJOR + n) for n in (0, 1)],
        "granularity_bytes": [opened.granularity(0), opened.granularity(1)],
    }


def nvml() -> dict[str, Any]:
    """Returns facts that only NVML tells: driver, MIG, processes, the host link."""
    try:
        library = ctypes.CDLL(os.environ.get("KVCACHED_LIBNVML", "libnvidia-ml.so.1"))
    except OSError as error:
        raise Skip(f"NVML is missing: {error}") from error
    if code := library.nvmlInit_v2():
        raise RuntimeError(f"nvmlInit answers {code}")
    device = ctypes.c_void_p()
    if code := library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)):
        raise RuntimeError(f"nvmlDeviceGetHandleByIndex answers {code}")
    text = ctypes.create_string_buffer(96)
    library.nvmlSystemGetDriverVersion(text, 96)
    facts: dict[str, Any] = {"driver": text.value.decode()}
    numbers = {
        "pcie_generation": "nvmlDeviceGetCurrPcieLinkGeneration",
        "pcie_generation_max": "nvmlDeviceGetMaxPcieLinkGeneration",
        "pcie_width": "nvmlDeviceGetCurrPcieLinkWidth",
        "compute_mode": "nvmlDeviceGetComputeMode",
        "persistence": "nvmlDeviceGetPersistenceMode",
    }
    for name, call in numbers.items():
        facts[name] = _number(library, call, device)
    facts["mig"] = _mig(library, device)
    facts["processes"] = _processes(library, device)
    return facts


def _number(library: ctypes.CDLL, call: str, device: ctypes.c_void_p) -> int | str:
    value = ctypes.c_uint()
    function = getattr(library, call, None)
    if function is None or function(device, ctypes.byref(value)):
        return NVML_UNSUPPORTED
    return value.value


def _mig(library: ctypes.CDLL, device: ctypes.c_void_p) -> int | str:
    current, pending = ctypes.c_uint(), ctypes.c_uint()
    function = getattr(library, "nvmlDeviceGetMigMode", None)
    if function is None or function(device, ctypes.byref(current), ctypes.byref(pending)):
        return NVML_UNSUPPORTED
    return current.value


def _processes(library: ctypes.CDLL, device: ctypes.c_void_p) -> int | str:
    """Returns how many processes compute on the GPU, including this one once it has a context."""
    count = ctypes.c_uint(0)
    function = getattr(library, "nvmlDeviceGetComputeRunningProcesses_v3", None)
    if function is None:
        return NVML_UNSUPPORTED
    function(device, ctypes.byref(count), None)  # fails with "insufficient size", sets the count
    return count.value


def torch_facts(gpu: dict[str, Any]) -> dict[str, Any]:
    """Asks torch in a separate process, since its import takes seconds and much memory."""
    import json

    limit_s = stretched(90)
    done = subprocess.run(
        [sys.executable, "-c", TORCH], capture_output=True, text=True, timeout=limit_s, check=False
    )
    if "No module named 'torch'" in done.stderr:
        raise Skip("torch is not installed")
    if done.returncode:
        raise RuntimeError(f"torch: {done.stderr.strip()[-300:]}")
    facts: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    if facts["cuda"] and gpu and _version(gpu["cuda"]) < _version(facts["cuda"]):
        raise RuntimeError(
            f"the driver supports CUDA {gpu['cuda']}, and torch {facts['version']} is built for"
            f" {facts['cuda']}: update the driver, or install a torch for CUDA {gpu['cuda']}"
        )
    if not facts["available"]:
        raise RuntimeError(f"torch {facts['version']} sees no GPU: a build for CUDA is needed")
    return facts


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


if __name__ == "__main__":
    sys.exit(main())
