"""Step "build": builds kvcached and prism from this checkout and installs them into a folder.

SGLang finds the platform by its entry point, so that importing the checkout would not suffice. pip
uses no index and no build isolation. hatchling, which builds prism, comes from the carried wheels
where the machine lacks it. If warnings of this compiler stop the build, it is repeated without
-Werror for the other steps, and this step fails. Where the carried wheels have this checkout's
state, the build goes to a folder that no step uses.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import time
import zipfile
from importlib.util import find_spec
from pathlib import Path

from lab.gpu_check import wheels
from lab.gpu_check.report import ROOT, Report, run_as_step

# Distributions that build prism, and that a bare machine may lack.
BACKEND = ("hatchling", "trove_classifiers")

LENIENT_NAME = "c++-without-werror"
LENIENT = """#!/bin/sh
# The compiler without -Werror.
for argument do
  shift
  [ "$argument" = -Werror ] || set -- "$@" "$argument"
done
exec {compiler} "$@"
"""
UNHIDE = '''"""Makes this folder's kvcached come before an editable installation."""

import os
import runpy
import sys

sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "ScikitBuildRedirectingFinder"]
_here = os.path.dirname(os.path.abspath(__file__))
for _path in sys.path:
    _next = os.path.join(_path, "sitecustomize.py")
    if os.path.abspath(_path) != _here and os.path.isfile(_next):
        runpy.run_path(_next)  # which this file hides
        break
'''
WHERE = """
import kvcached._core, prism
from importlib.metadata import entry_points
print(kvcached._core.__file__)
print(prism.__file__)
print(",".join(sorted(e.name for e in entry_points(group="sglang.srt.platforms"))))
"""


def main(arguments: list[str] | None = None) -> int:
    return run_as_step("build", __doc__, body, arguments)


def body(report: Report) -> None:
    folder = report.options.wheels
    site = report.work / ("built" if wheels.hold_this_checkout(folder) else "site")
    shutil.rmtree(site, ignore_errors=True)
    (report.work / LENIENT_NAME).unlink(missing_ok=True)  # an earlier run's
    with report.check("warning-free"):
        began_s = time.monotonic()
        log = install(ROOT, site, report.work / "cmake")
        report.fact(build_s=round(time.monotonic() - began_s, 1), cores=cores())
        if log and "[-Werror" not in log:
            raise RuntimeError(f"the build failed: {'; '.join(errors_of(log))}")
        if log:
            report.fact(warnings=errors_of(log))
            log = install(ROOT, site, report.work / "cmake-lenient", lenient_compiler(report.work))
            if log:
                report.fact(errors=errors_of(log))
                raise RuntimeError("the build fails without -Werror as well: see the log")
            raise RuntimeError("warnings: the other steps use a build without -Werror")
    if not site.exists():
        return
    with report.check("prism"):
        backend = hatchling(folder, report.work / "hatchling")
        if log := install(ROOT / "prism", site, path=backend):
            raise RuntimeError(f"prism cannot be installed: {'; '.join(errors_of(log))}")
    with report.check("importable"):
        importable(site)
    if wheels.hold_this_checkout(folder):  # no step waits for this one
        with report.check("tests_compiled"):
            compile_tests(site)


def compile_tests(site: Path) -> None:
    """Compiles the C++ tests of the step "conformance"."""
    code = "import os; from tests.kvcached.compiling import build_tests as build;"
    code += " build(os.environ.get('KVCACHED_TEST_SANITIZERS', ''))"
    env = {**os.environ, "PYTHONPATH": path_of(site, ROOT)}
    lenient = site.parent / LENIENT_NAME
    env.update({"CXX": str(lenient)} if lenient.exists() else {})
    subprocess.run([sys.executable, "-c", code], cwd=site.parent, env=env, check=True)


def hatchling(folder: Path | None, unpacked: Path) -> str:
    """Returns the folder of prism's build backend, or "" where this Python has it installed."""
    if find_spec("hatchling") is not None:
        return ""
    found = [p for name in BACKEND for p in (folder.glob(f"{name}-*.whl") if folder else ())]
    if len(found) != len(BACKEND):
        raise RuntimeError(
            "hatchling, which builds prism, is not installed and not among the carried wheels:"
            " run scripts/gpu-wheels on a machine with a package index, and give --wheels"
        )
    for path in found:
        with zipfile.ZipFile(path) as archive:
            archive.extractall(unpacked)
    return str(unpacked)


def cores() -> int:
    return len(os.sched_getaffinity(0))


def install(
    project: Path,
    site: Path,
    build: Path | None = None,
    compiler: Path | None = None,
    path: str = "",
) -> str:
    """Builds and installs a project. Returns "", or the log of a build that failed.

    path: folder of further modules for the build.
    """
    env = {**os.environ, "CMAKE_BUILD_PARALLEL_LEVEL": str(cores())}
    env.update({"CXX": str(compiler)} if compiler else {})
    # cmake and ninja of this Python come before those of the shell's PATH.
    env["PATH"] = path_of(Path(sys.executable).parent, env["PATH"])
    env["PYTHONPATH"] = path_of(path, env.get("PYTHONPATH", ""))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-v"),
            *("--no-index", "--no-build-isolation", "--no-deps", "--no-compile", "--upgrade"),
            *([f"--config-settings=build-dir={build}"] if build else []),
            *("--target", str(site), str(project)),
        ],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    print(done.stdout, flush=True)
    return "" if done.returncode == 0 else done.stdout or "pip printed nothing"


def path_of(*parts: str | Path) -> str:
    """Returns a search path of those parts that are not empty."""
    return os.pathsep.join(str(part) for part in parts if str(part))


def errors_of(log: str) -> list[str]:
    """Returns the first errors of the compiler, or the last lines of the log."""
    lines = log.splitlines()
    return [line.strip() for line in lines if "error:" in line.lower()][:5] or lines[-5:]


def lenient_compiler(work: Path) -> Path:
    """Writes a program that calls the compiler without -Werror. Returns its path."""
    found = os.environ.get("CXX") or shutil.which("c++") or "c++"
    program = work / LENIENT_NAME
    program.write_text(LENIENT.format(compiler=found))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def importable(site: Path) -> None:
    """Raises RuntimeError unless the steps' processes import what is in `site`."""
    (site / "sitecustomize.py").unlink(missing_ok=True)
    if imported_from(site):
        (site / "sitecustomize.py").write_text(UNHIDE)
        if elsewhere := imported_from(site):
            raise RuntimeError(elsewhere)


def imported_from(site: Path) -> str:
    """Returns "" if the other steps import the installed packages, or says what they import."""
    done = subprocess.run(
        [sys.executable, "-c", WHERE],
        cwd=site.parent,
        env={**os.environ, "PYTHONPATH": path_of(site, ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.split()
    if done.returncode or len(lines) != 3:
        return f"the built packages cannot be imported: {done.stderr.strip()[-300:]}"
    strays = [path for path in lines[:2] if site not in Path(path).parents]
    if strays:
        return f"{', '.join(strays)} hides the built packages"
    missing = {"prism_cpu", "prism_cuda"} - set(lines[2].split(","))
    return f"the installation lacks the entry points {sorted(missing)}" if missing else ""


if __name__ == "__main__":
    sys.exit(main())
