"""The wheel: built from the source distribution, installed where nothing else is, and tested."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from .environment import Environment

pytestmark = pytest.mark.timeout(900)  # it compiles, perhaps beside other work

ROOT = Path(__file__).parent.parent.parent
# The backends find their driver at run time: nothing of CUDA, torch or Python is linked.
LIBRARIES = {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "libpthread.so.0"}
LIBRARIES |= {"libdl.so.2", "librt.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
CORE = ["test_device", "test_kvcache", "test_layout", "test_sharing", "test_tensors", "test_admin"]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Through the hook that every build frontend calls."""
    folder = tmp_path_factory.mktemp("sdist")
    code = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, check=True)
    (made,) = folder.glob("*.tar.gz")
    return made


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without the CUDA toolkit and torch in sight: their usual variables are unset."""
    folder = tmp_path_factory.mktemp("wheel")
    env = {key: value for key, value in os.environ.items() if "CUDA" not in key}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    command += ["--no-index"]
    subprocess.run([*command, "-w", str(folder), str(sdist)], env=env, check=True)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheel and nothing else, not even numpy."""
    environment = Environment(tmp_path_factory.mktemp("bare"))
    environment.install(wheel)
    return environment


def test_the_wheel_holds_the_packages_and_no_more(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    info = "prism_serving-"
    assert {name.split("/")[0] for name in names if not name.startswith(info)} == {
        "kvcached",
        "kvcached_plugins",
        "prism",
    }
    assert {"kvcached/py.typed", "kvcached/_core.pyi", "prism/py.typed"} <= set(names)
    assert [name for name in names if re.fullmatch(r"kvcached/_core\..*so", name)]
    assert [name for name in names if name.endswith("licenses/LICENSE")]
    assert not [name for name in names if re.search(r"tests?[/_]|\.(cpp|h|a)$", name)]
    sources = {str(path.relative_to(ROOT)) for path in tracked_package_files()}
    assert sources <= set(names)


def tracked_package_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "kvcached", "kvcached_plugins", "prism"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).exists()]


def test_entry_points_and_requirements(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    commands = re.findall(r"^([\w-]+) ?=", archive.read(points).decode(), re.MULTILINE)
    ours = ["kvcached", "kvctl", "prism-models", "prism-replay", "prism-serve", "prism-sim"]
    ours += ["prism_cpu", "prism_cuda"]
    assert sorted(commands) == ours
    (described,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    required = re.findall(r"^Requires-Dist: (.*)", archive.read(described).decode(), re.MULTILINE)
    assert [line for line in required if "extra ==" not in line] == ["numpy>=1.26"]


def test_the_extension_links_the_c_and_cpp_libraries_alone(bare: Environment) -> None:
    """What PEP 600 lets a manylinux wheel expect of a system."""
    if shutil.which("objdump") is None:
        pytest.skip("objdump, of binutils, is not installed")
    (extension,) = (bare.packages / "kvcached").glob("_core*.so")
    shown = subprocess.run(
        ["objdump", "-p", str(extension)], capture_output=True, text=True, check=True
    )
    needed = set(re.findall(r"NEEDED +(\S+)", shown.stdout))
    assert needed <= LIBRARIES
    assert "RUNPATH" not in shown.stdout


def test_a_bare_environment_imports_and_shares_memory(bare: Environment, tmp_path: Path) -> None:
    """All but the arrays of ids works without numpy; neither torch nor a CUDA toolkit is there."""
    code = (
        "import kvcached, sys\n"
        "device = kvcached.Device.open('host:0', capacity_bytes=1 << 20, page_bytes=1 << 16,"
        " namespace=sys.argv[1])\n"
        "with device.client('bare') as client:\n"
        "    tensor = client.alloc_virtual_tensor(1 << 20)\n"
        "    tensor.map(0, 1 << 16)\n"
        "    print(device.usage().committed_bytes, kvcached.__file__)\n"
        "device.destroy()\n"
    )
    done = bare.run("python", "-c", code, f"bare{os.getpid()}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["65536", str(bare.packages / "kvcached" / "__init__.py")]


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("kvctl", ".[tools]"),
        ("prism-serve", ".[serve]"),
        ("prism-replay", ".[serve]"),
        ("prism-models", ".[serve]"),
        ("prism-sim", ".[serve]"),
    ],
)
def test_a_command_without_its_extra_names_it(
    bare: Environment, tmp_path: Path, command: str, extra: str
) -> None:
    done = bare.run(command, "--help", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert f"'{extra}'" in done.stderr


def test_kvctl_works_with_the_extra_tools_alone(wheel: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "tools")
    environment.install(wheel)
    environment.lend("typer", "rich")
    done = environment.run("kvctl", "--version", cwd=tmp_path)
    assert re.fullmatch(r"kvctl \d+\.\d+\.\d+\n", done.stdout), done.stderr
    done = environment.run("kvctl", "list", "--namespace", f"none{os.getpid()}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_kvcached_passes_its_tests_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """On a copy of the tests, beside which there is no folder `kvcached` or `prism` to import."""
    environment = Environment(tmp_path / "environment")
    environment.install(wheel)
    environment.lend("numpy", "hypothesis", "pytest", "pytest-timeout", "pytest-asyncio")
    copy = tmp_path / "copy"
    for folder in ("tests/kvcached", "tests/libcuda", "csrc"):
        shutil.copytree(ROOT / folder, copy / folder)
    (copy / "tests" / "__init__.py").touch()
    shutil.copy(ROOT / "tests" / "packaging" / "outside.py", copy / "tests" / "conftest.py")
    shutil.copy(ROOT / "pyproject.toml", copy)
    (copy / "build").symlink_to(ROOT / "build")
    files = [f"tests/kvcached/{name}.py" for name in CORE]
    done = environment.run("python", "-m", "pytest", *files, cwd=copy)
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"on {environment.packages / 'kvcached'}" in done.stdout
