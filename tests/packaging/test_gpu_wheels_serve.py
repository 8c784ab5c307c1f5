"""The carried wheels with the packages of the reference GPU image, and nothing else.

Run by scripts/test --long: needs Python 3.12, a package index and 8 GB of disk, or in
PRISM_GPU_IMAGE a Python 3.12 that has `gpu-image.txt` already. Without a GPU it shows that the set
is complete, that SGLang's CUDA path can be imported with the stand-in for its kernels, and that
SGLang serves with the image's torch, on its CPU platform.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from prism.models import tiny
from scripts.gpu_wheels import __main__ as gpu_wheels

from .pythons import interpreter

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SERVED = ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"]
SERVED += ["MistralForCausalLM", "Gemma3ForCausalLM", "GPT2LMHeadModel", "DeepseekV2ForCausalLM"]
REDIS = """
from pathlib import Path
from tempfile import TemporaryDirectory
from prism.queueing.server import BundledRedis
with TemporaryDirectory() as folder, BundledRedis(Path(folder)):
    pass
"""


@dataclass(frozen=True)
class Machine:
    """Python with the image's packages and ours."""

    python: str
    sites: tuple[Path, ...]

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("SGLANG_")}
        path = os.pathsep.join(map(str, self.sites))
        return subprocess.run(
            [self.python, *arguments],
            cwd=self.sites[0],
            env=kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environment,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    python = os.environ.get("PRISM_GPU_IMAGE") or image(tmp_path_factory.mktemp("image"))
    carried, ours = (tmp_path_factory.mktemp(name) for name in ("carried", "ours"))
    wheels = tmp_path_factory.mktemp("wheels")
    assert gpu_wheels.main(["--out", str(wheels)]) == 0
    pip(python, "--target", str(carried), *map(str, sorted(wheels.glob("*.whl"))))
    build = ["--no-build-isolation", f"--config-settings=build-dir={ours / 'build'}"]
    pip(python, "--target", str(ours / "site"), *build, str(ROOT))
    return Machine(python, (carried, ours / "site"))


def image(folder: Path) -> str:
    """Makes a virtual environment with the image's packages."""
    subprocess.run([interpreter("3.12"), "-m", "venv", str(folder)], check=True)
    made = str(folder / "bin" / "python")
    listed = ["-m", "pip", "install", "-q", "--no-deps", "-r", str(HERE / "gpu-image.txt")]
    subprocess.run([made, *listed], check=True)
    return made


def pip(python: str, *arguments: str) -> None:
    """Installs as on the GPU machine: from files alone."""
    command = ["-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-cache-dir"]
    path = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run([python, *command, *arguments], env=os.environ | {"PATH": path}, check=True)


def import_as_cuda(machine: Machine, modules: Sequence[str]) -> list[str]:
    """Lines printed."""
    script = str(HERE / "claimed_cuda.py")
    done = machine.run(script, *modules, SGLANG_PLATFORM="prism_cuda")
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_sglangs_cuda_path_can_be_imported(machine: Machine) -> None:
    modules = ["sglang.srt.managers.scheduler", "prism.engines.sglang.host"]
    *imported, models = import_as_cuda(machine, modules)
    assert imported == [f"imported {module}" for module in modules]
    assert set(SERVED) <= set(models.split())
    assert len(models.split()) > 280


def test_the_images_triton_compiles_the_attention_kernels(machine: Machine) -> None:
    """Compiles for an H200, to machine code: SGLang 0.5.23 is written for Triton 3.8, the image has
    3.6."""
    done = machine.run(str(HERE / "compiled_kernels.py"), SGLANG_PLATFORM="prism_cuda")
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = set(done.stdout.split()) - {"compiled"}
    assert compiled == {
        "_fwd_kernel",
        "_fwd_kernel_stage1",
        "_fwd_grouped_kernel_stage1",
        "_fwd_kernel_stage2",
    }


@pytest.mark.parametrize("model", [tiny.LLAMA, tiny.QWEN3], ids=lambda model: model.name)
def test_a_model_is_served_twice(machine: Machine, model: tiny.TinyModel, tmp_path: Path) -> None:
    """Activates, serves and deactivates on the CPU platform, and again in the same process."""
    directory = tmp_path / model.name
    directory.mkdir()
    model.make(directory, lambda _: None)
    options = ["--model", str(directory), "--streams", "2", "--tokens", "8", "--rounds", "2"]
    # Python finds the installed packages first, and the checkout only for what is not installed.
    path = os.pathsep.join(map(str, (*machine.sites, ROOT)))
    done = machine.run("-m", "lab.engine_check", *options, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("  16 tokens") == 2


def test_the_wheels_hold_all_that_a_cluster_needs(machine: Machine) -> None:
    """Imports, and the Redis server that it starts."""
    modules = ["prism.cli.serve", "prism.agent.main", "prism.frontend.__main__"]
    modules += [
        "prism.cluster.main",
        "prism.engines.processes.forkserver",
        "prism.serve.node.gpu_probe",
    ]
    modules += ["prism.serve.operator", "prism.models.tokenizer", "prism_replay.live.client"]
    code = f"import importlib\nfor name in {modules!r}: importlib.import_module(name)\n"
    path = os.pathsep.join(map(str, (*machine.sites, ROOT)))
    done = machine.run("-c", code + REDIS, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr[-3000:]
