"""Search for the CUDA toolkit that compiles kernels, among fake ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prism.engines import cuda_toolkit


def toolkit(folder: Path, library: str | None = "lib64") -> Path:
    """Makes a toolkit with its nvcc, and with libcudart in `library`."""
    (folder / "bin").mkdir(parents=True)
    nvcc = folder / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    if library is not None:
        (folder / library).mkdir()
        (folder / library / "libcudart.so").touch()
    return folder


@pytest.fixture(autouse=True)
def usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replaces /usr/local/cuda by a folder that does not exist yet."""
    monkeypatch.setattr(cuda_toolkit, "_USUAL", tmp_path / "usual")
    return tmp_path / "usual"


def path_of(*toolkits: Path) -> str:
    return os.pathsep.join(str(folder / "bin") for folder in toolkits)


def test_a_wrapper_of_nvcc_is_not_in_a_toolkit(tmp_path: Path, usual: Path) -> None:
    wrapped = {"PATH": path_of(toolkit(tmp_path / "local", library=None))}
    assert cuda_toolkit.find(wrapped) is None
    assert cuda_toolkit.variables(wrapped) == {}
    toolkit(usual)
    assert cuda_toolkit.variables(wrapped) == {"CUDA_HOME": str(usual)}


def test_the_first_of_them_is_taken(tmp_path: Path, usual: Path) -> None:
    home, path, on_path = (toolkit(tmp_path / name) for name in ("home", "path", "on"))
    environment = {"CUDA_HOME": str(home), "CUDA_PATH": str(path), "PATH": path_of(on_path)}
    toolkit(usual)
    for expected in (home, path, usual, on_path):
        assert cuda_toolkit.find(environment) == expected
        (expected / "lib64" / "libcudart.so").unlink()
    assert cuda_toolkit.find(environment) is None


def test_one_without_a_compiler_is_passed_over(tmp_path: Path, usual: Path) -> None:
    runtime = toolkit(tmp_path / "runtime")
    (runtime / "bin" / "nvcc").unlink()
    assert cuda_toolkit.find({"CUDA_HOME": str(runtime), "PATH": ""}) is None
    toolkit(usual)
    assert cuda_toolkit.find({"CUDA_HOME": str(runtime), "PATH": ""}) == usual


def test_links_to_nvcc_are_followed(tmp_path: Path) -> None:
    real, local = toolkit(tmp_path / "cuda-13.0"), tmp_path / "local" / "bin"
    local.mkdir(parents=True)
    (local / "nvcc").symlink_to(real / "bin" / "nvcc")
    assert cuda_toolkit.find({"PATH": str(local)}) == real


def test_condas_lib_is_named_to_the_linker(tmp_path: Path) -> None:
    conda = toolkit(tmp_path / "conda", library="lib")
    found = cuda_toolkit.variables({"PATH": path_of(conda)})
    assert found == {"CUDA_HOME": str(conda), "LIBRARY_PATH": str(conda / "lib")}
    again = cuda_toolkit.variables({"PATH": path_of(conda), "LIBRARY_PATH": f"/a:{conda}/lib"})
    assert again["LIBRARY_PATH"] == f"{conda}/lib:/a"


def test_it_runs_by_its_path_alone(tmp_path: Path) -> None:
    """Runs this way in scripts/install, before anything is installed."""
    command = [sys.executable, "-I", "-S", cuda_toolkit.__file__]
    made = toolkit(tmp_path / "made")
    done = subprocess.run(
        command, env={"CUDA_HOME": str(made)}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{made}\n")
