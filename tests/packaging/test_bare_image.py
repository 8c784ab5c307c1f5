"""scripts/gpu-check with the Python and the build tools of the reference GPU image, and no more.

The image lacks hatchling, which builds prism and comes with the carried wheels. The driver is the
test libcuda. torch is left out, so that the steps which need it say so.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lab.gpu_check.machine.build import BACKEND
from scripts.gpu_wheels import fetch
from scripts.gpu_wheels.strip import strip
from tests.kvcached.compiling import build_libcuda, build_libnvml

from .pythons import interpreter

pytestmark = pytest.mark.timeout(1200)  # most of it is compiling

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TOOLS = {"cmake", "ninja", "nanobind", "scikit_build_core", "setuptools", "packaging", "pathspec"}
TOOLS |= {"pluggy", "numpy", "pytest", "hypothesis", "iniconfig", "Pygments", "sortedcontainers"}
STEPS = "facts,build,probe,conformance,fork,faults"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Returns the result of each step, by name."""
    folder = tmp_path_factory.mktemp("bare")
    python = folder / "image" / "bin" / "python"
    subprocess.run([interpreter("3.12"), "-m", "venv", str(folder / "image")], check=True)
    pins = fetch.read_pins(HERE / "gpu-image.txt")
    wanted = [pin for pin in pins if pin.partition("==")[0] in TOOLS]
    assert len(wanted) == len(TOOLS)
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", *wanted], check=True)
    options = ["--steps", STEPS, "--wheels", str(carried(folder)), "--time-factor", "8"]
    places = ["--out", str(folder / "out"), "--work", str(folder / "work")]
    subprocess.run(
        [ROOT / "scripts/gpu-check", *options, *places],
        env=bare_environment(python),
        check=False,
        stdout=subprocess.DEVNULL,
    )
    steps = json.loads((folder / "out" / "gpu-check.json").read_text())["steps"]
    return {step["name"]: step for step in steps}


def carried(folder: Path) -> Path:
    """Returns a folder with the wheels that build prism, as scripts/gpu-wheels strips them."""
    pins = fetch.read_pins(ROOT / "requirements" / "gpu-box.txt")
    backend = {name.replace("_", "-") for name in BACKEND}
    wanted = [pin for pin in pins if pin.partition("==")[0] in backend]
    (folder / "fetched").mkdir()
    (folder / "wheels").mkdir()
    for wheel in fetch.download(wanted, "3.12", folder / "fetched"):
        strip(wheel, folder / "wheels")
    return folder / "wheels"


def bare_environment(python: Path) -> dict[str, str]:
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("PYTHON", "KVCACHED_LIB"))}
    libraries = build_libcuda().parent
    assert build_libnvml().parent == libraries
    return kept | {
        "PYTHON": str(python),
        "LD_LIBRARY_PATH": str(libraries),
        "KVCACHED_TEST_CUDA_GRANULARITY": str(2 << 20),
        "KVCACHED_TEST_CUDA_CONTEXT_BYTES": str(16 << 20),
        "KVCACHED_TEST_SANITIZERS": "address,undefined",
    }


def test_what_the_image_lacks_for_the_build_is_carried(
    results: dict[str, dict[str, Any]],
) -> None:
    assert results["build"]["status"] == "passed", results["build"]["reason"]
    assert set(results["build"]["checks"]) == {"warning-free", "prism", "importable"}


@pytest.mark.parametrize("step", ["facts", "probe", "conformance", "faults"])
def test_a_step_passes_on_what_was_built(step: str, results: dict[str, dict[str, Any]]) -> None:
    assert results[step]["status"] == "passed", results[step]["reason"]


def test_steps_that_need_torch_say_so(results: dict[str, dict[str, Any]]) -> None:
    assert results["facts"]["checks"]["torch"] == "skipped: torch is not installed"
    assert results["fork"]["checks"] == {"fork": "skipped: torch is not installed"}
