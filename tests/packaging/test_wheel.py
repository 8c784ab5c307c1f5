"""The wheels: built from the source distributions, installed in an empty environment, and
tested."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from prism.config.checks.adapters import adapter_names
from prism.policies import registry

from .environment import Environment

pytestmark = pytest.mark.timeout(900)  # it compiles, perhaps during other work

ROOT = Path(__file__).parent.parent.parent
# The backends find their driver at run time: nothing of CUDA, torch or Python is linked.
LIBRARIES = {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "libpthread.so.0"}
LIBRARIES |= {"libdl.so.2", "librt.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
CORE = ["test_device", "test_kvcache", "test_layout", "test_sharing", "test_tensors", "test_admin"]


def built(project: Path, folder: Path) -> Path:
    """Builds the wheel of `project`'s source distribution, through the hook that every build
    frontend calls. Hides the CUDA toolkit and torch: their usual variables are unset."""
    backend = tomllib.loads((project / "pyproject.toml").read_text())["build-system"][
        "build-backend"
    ]
    code = f"import sys; from {backend} import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=project, check=True)
    (sdist,) = folder.glob("*.tar.gz")
    env = {key: value for key, value in os.environ.items() if "CUDA" not in key}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    command += ["--no-index"]
    subprocess.run([*command, "-w", str(folder), str(sdist)], env=env, check=True)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds kvcached's wheel."""
    return built(ROOT, tmp_path_factory.mktemp("kvcached"))


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds Prism's wheel."""
    return built(ROOT / "prism", tmp_path_factory.mktemp("prism"))


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns the wheels of prism-replay and prism-sim by package."""
    names = ("prism_replay", "prism_sim")
    return {name: built(ROOT / name, tmp_path_factory.mktemp(name)) for name in names}


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Makes an environment with the wheel and nothing else, not even numpy."""
    environment = Environment(tmp_path_factory.mktemp("bare"))
    environment.install(wheel)
    return environment


def test_the_wheels_hold_the_packages_and_no_more(
    wheel: Path, serving: Path, studies: dict[str, Path]
) -> None:
    names = contents(wheel, "kvcached", "kvcached_plugins")
    assert {"kvcached/py.typed", "kvcached/_core.pyi"} <= names
    assert [name for name in names if re.fullmatch(r"kvcached/_core\..*so", name)]
    for package, made in {"prism": serving, **studies}.items():
        assert f"{package}/py.typed" in contents(made, package)
        assert made.name.endswith("-py3-none-any.whl")


def contents(wheel: Path, *packages: str) -> set[str]:
    """Returns all names; they are those of the files in git, and what a build adds."""
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == set(packages)
    assert [name for name in names if name.endswith("licenses/LICENSE")]
    assert not [name for name in names if re.search(r"tests?[/_]|\.(cpp|h|a)$", name)]
    command = ["git", "ls-files", "-co", "--exclude-standard", *packages]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    own = ("LICENSE", "README.md", "pyproject.toml")
    assert tracked - {f"{package}/{name}" for package in packages for name in own} <= names
    return names


def test_entry_points_and_requirements(
    wheel: Path, serving: Path, studies: dict[str, Path]
) -> None:
    assert entry_points(wheel) == ["kvcached"] * 3 + ["kvctl"]  # SGLang's two, vLLM's
    added = {*registry.own_names(), *adapter_names()}
    commands = ["prism-models", "prism-serve", "prism_cpu", "prism_cuda"]
    assert sorted(set(entry_points(serving)) - added) == commands
    assert entry_points(studies["prism_replay"]) == ["prism-replay"]
    assert entry_points(studies["prism_sim"]) == ["prism-sim"] * 2  # command, simulator
    assert required(wheel) == ["numpy>=1.26"]
    version = wheel.name.split("-")[1]
    assert serving.name.split("-")[1] == version
    assert f"prism-kvcached[tools]=={version}" in required(serving)
    assert not [
        line for line in required(serving) if re.match("matplotlib|prism-(replay|sim)", line)
    ]
    assert f"prism-serving=={version}" in required(studies["prism_replay"])
    assert f"prism-replay=={version}" in required(studies["prism_sim"])


def entry_points(wheel: Path) -> list[str]:
    return sorted(re.findall(r"^([\w-]+) ?=", metadata(wheel, "entry_points.txt"), re.MULTILINE))


def required(wheel: Path) -> list[str]:
    """Returns the requirements that hold for any extras."""
    lines = re.findall(r"^Requires-Dist: (.*)", metadata(wheel, "METADATA"), re.MULTILINE)
    return [line for line in lines if "extra ==" not in line]


def metadata(wheel: Path, name: str) -> str:
    archive = zipfile.ZipFile(wheel)
    (found,) = (each for each in archive.namelist() if each.endswith(f".dist-info/{name}"))
    return archive.read(found).decode()


def test_the_extension_links_the_c_and_cpp_libraries_alone(bare: Environment) -> None:
    """Needs only libraries that PEP 600 lets a manylinux wheel expect of a system."""
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
    """Runs without numpy, torch and a CUDA toolkit; only the arrays of ids need numpy."""
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


def test_kvctl_without_its_extra_names_it(bare: Environment, tmp_path: Path) -> None:
    done = bare.run("kvctl", "--help", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "pip install '.[tools]' in a checkout" in done.stderr


def test_a_wheel_and_what_it_requires_make_its_commands(
    wheel: Path, serving: Path, studies: dict[str, Path], tmp_path: Path
) -> None:
    """Shows that a serving node needs none of the wheels of studies."""
    environment = Environment(tmp_path / "serving")
    install(environment, wheel, serving)
    check_commands(environment, serving, tmp_path, "prism-serve", "prism-models")
    install(environment, studies["prism_replay"])
    check_commands(environment, serving, tmp_path, "prism-replay")
    install(environment, studies["prism_sim"])
    check_commands(environment, serving, tmp_path, "prism-sim")


def install(environment: Environment, *wheels: Path) -> None:
    """Installs the wheels, and lends the third-party packages that they require."""
    for wheel in wheels:
        environment.install(wheel)
        named = [re.split(r"[\[<>=;]", line)[0] for line in required(wheel)]
        environment.lend(*(name for name in named if not name.startswith("prism-")))


def check_commands(environment: Environment, serving: Path, tmp_path: Path, *commands: str) -> None:
    for command in commands:
        done = environment.run(command, "--help", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert f"Usage: {command}" in done.stdout
        done = environment.run(command, "--version", cwd=tmp_path)
        assert done.stdout.split() == [command, serving.name.split("-")[1]]


def test_kvctl_works_with_the_extra_tools_alone(wheel: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "tools")
    environment.install(wheel)
    environment.lend("typer", "rich")
    done = environment.run("kvctl", "--version", cwd=tmp_path)
    assert re.fullmatch(r"kvctl \d+\.\d+\.\d+\n", done.stdout), done.stderr
    done = environment.run("kvctl", "list", "--namespace", f"none{os.getpid()}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_kvcached_passes_its_tests_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """Runs a copy of the tests, without the folders `kvcached` and `prism` next to it."""
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


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_release_works_on_every_python(tmp_path: Path) -> None:
    """Runs scripts/release-check on a clone of the last commit."""
    subprocess.run(["git", "clone", "-q", ROOT, tmp_path / "clone"], check=True)
    done = subprocess.run(
        ["scripts/release-check"],
        cwd=tmp_path / "clone",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
