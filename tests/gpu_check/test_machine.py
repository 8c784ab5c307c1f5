"""Machines that lack something, or whose GPU is in use. Each fault is a named line, and all other
steps run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lab.gpu_check.machine import build, facts, unpack
from lab.gpu_check.rehearsal import environment
from lab.gpu_check.sizes import GIB, Sizes, shm_free_bytes
from scripts.gpu_wheels.archive import write_wheel
from tests.gpu_check.steps import run, without_driver
from tests.kvcached.compiling import ROOT

pytestmark = pytest.mark.timeout(600)  # the doubles are compiled once

NO_LOCKS = """
import errno, fcntl
real = fcntl.fcntl
def refuse(file, call, *given):
    if call == 37:
        raise OSError(errno.EINVAL, "Invalid argument")
    return real(file, call, *given)
fcntl.fcntl = refuse
"""
NO_SHM = """
from pathlib import Path
from lab.gpu_check import sizes
from lab.gpu_check.machine import facts
sizes.SHM = facts.SHM = Path("/nowhere/shm")
"""
FULL_SHM = "from lab.gpu_check.machine import facts; facts.shm_free_bytes = lambda: 64 << 20"
# Another test imports SGLang, which takes 10 s of a CPU.
NO_IMPORTS = """
from lab.gpu_check.machine import unpack
unpack.imported_once = lambda work: (0.0, False)
"""

MACHINES = [
    pytest.param("whole_gpu", {"KVCACHED_TEST_CUDA_MIG": "1"}, "", "nvidia-smi -mig 0", id="MIG"),
    pytest.param("locks", {}, NO_LOCKS, "run on a Linux kernel", id="gVisor"),
    pytest.param("shared_memory", {}, NO_SHM, "mount -t tmpfs", id="no /dev/shm"),
    pytest.param("shared_memory", {}, FULL_SHM, "64 MiB free", id="small /dev/shm"),
    pytest.param(
        "idle_gpu",
        {
            "KVCACHED_TEST_CUDA_CONTEXT_BYTES": str(1280 << 20),
            "KVCACHED_TEST_CUDA_BYTES": str(4 * GIB),
        },
        "",
        "1280 MiB of the GPU are taken",
        id="another process's memory",
    ),
]


@pytest.mark.parametrize(("check", "settings", "before", "says"), MACHINES)
def test_facts_name_what_is_in_the_way(
    check: str, settings: dict[str, str], before: str, says: str, tmp_path: Path
) -> None:
    found = run("facts", {**environment(GIB), **settings}, tmp_path, before)
    assert found["checks"][check].startswith("failed")
    assert says in found["checks"][check]
    others = {name: end for name, end in found["checks"].items() if name != check}
    assert set(others.values()) == {"passed"}


def test_steps_that_need_locks_are_skipped_by_name(tmp_path: Path) -> None:
    found = run("graphs", environment(GIB), tmp_path, NO_LOCKS)
    assert (found["status"], "kernel refuses locks" in found["reason"]) == ("skipped", True)
    assert run("probe", environment(GIB), tmp_path, NO_LOCKS)["status"] == "passed"


def test_a_driver_that_is_older_than_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said = json.dumps({"version": "2.11.0+cu130", "cuda": "13.0", "available": False})
    done = SimpleNamespace(returncode=0, stdout=said, stderr="")
    monkeypatch.setattr(facts, "subprocess", SimpleNamespace(run=lambda *_, **__: done))
    with pytest.raises(RuntimeError, match=r"supports CUDA 12\.4, .* update the driver"):
        facts.torch_facts({"cuda": "12.4"})
    with pytest.raises(RuntimeError, match="sees no GPU"):
        facts.torch_facts({"cuda": "13.0"})


def test_sizes_without_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("lab.gpu_check.sizes.SHM", tmp_path / "missing")
    assert shm_free_bytes() == 0
    sizes = Sizes.of(80 * GIB)
    assert (sizes.store_bytes, sizes.store_folder(tmp_path, 1)) == (0, tmp_path)


def test_prism_is_built_by_carried_hatchling_or_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "find_spec", lambda _: None)
    for folder in (None, tmp_path):
        with pytest.raises(RuntimeError, match="hatchling, which builds prism, is not installed"):
            build.hatchling(folder, tmp_path / "unpacked")


def test_carried_wheels_of_other_sources_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    found = run("unpack", environment(GIB), tmp_path, NO_IMPORTS, "--wheels", str(folder))
    assert "run scripts/gpu-wheels" in found["checks"]["sglang"]
    info = "carried-1.0.dist-info"
    files = {"carried.py": b"", f"{info}/METADATA": b"Metadata-Version: 2.1\nName: carried\n"}
    files[f"{info}/METADATA"] += b"Version: 1.0\n"
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    write_wheel(folder / "carried-1.0-py3-none-any.whl", files, info)
    found = run("unpack", environment(GIB), tmp_path, NO_IMPORTS, "--wheels", str(folder))
    assert found["checks"]["sglang"] == "passed"
    assert "this checkout is built instead" in found["checks"]["kvcached"]
    assert (tmp_path / "work" / "sglang" / "carried.py").exists()
    assert not (tmp_path / "work" / "site").exists()


@pytest.mark.sglang
def test_the_kernel_that_writes_kv_is_compiled_with_the_imports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Kernels of the models that later steps serve are compiled. Doubles cannot compile, which does
    not fail the imports."""
    for name, value in environment(GIB).items():
        monkeypatch.setenv(name, value)
    assert unpack.rows_of_kv() == {512}
    _, has_kernel = unpack.imported_once(tmp_path)
    assert not has_kernel
    monkeypatch.setattr(unpack, "IMPORTS", "import no_such_module")
    with pytest.raises(RuntimeError, match=r"(?s)SGLang cannot be imported: .*no_such_module"):
        unpack.imported_once(tmp_path)


def test_gpu_check_ends_with_a_line_for_each_step_without_a_gpu(tmp_path: Path) -> None:
    """Steps that need no driver run. The line of any other step reports the missing driver."""
    steps = "facts,probe,graphs"
    options = ["--steps", steps, "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    done = subprocess.run(
        [ROOT / "scripts/gpu-check", *options],
        env={**without_driver(), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line.split() for line in done.stdout.splitlines()[-3:]]
    assert (done.returncode, [line[0] for line in lines]) == (1, steps.split(","))
    assert [line[1] for line in lines] == ["failed", "skipped", "skipped"]
    assert "the NVIDIA driver is missing" in done.stdout
