"""Step 2: builds kvcached and prism from this checkout and installs them into a folder.

Installed, not imported from the checkout, because SGLang finds the platform by its entry point.
Without an index and without build isolation. Where warnings of this compiler stop the build it is
done again without -Werror, so that the other steps have something to run on; the step still fails.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

from scripts.gpu_check.report import ROOT, Report, run_as_step

LENIENT_NAME = "c++-without-werror"
LENIENT = """#!/bin/sh
# The compiler without -Werror.
for argument do
  shift
  [ "$argument" = -Werror ] || set -- "$@" "$argument"
done
exec {compiler} "$@"
"""
UNHIDE = '''"""Lets this folder's kvcached be found where an editable install would come first."""

import os
import runpy
import sys

sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "ScikitBuildRedirectingFinder"]
_here = os.path.dirname(os.path.abspath(__file__))
for _path in sys.path:
    _next = os.path.join(_path, "sitecustomize.py")
    if os.path.abspath(_path) != _here and os.path.isfile(_next):
        runpy.run_path(_next)  # the one that this file hides
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
    site = report.work / "site"
    (report.work / LENIENT_NAME).unlink(missing_ok=True)  # an earlier run's
    with report.check("warning-free"):
        began_s = time.monotonic()
        log = install(site, report.work / "cmake")
        report.fact(build_s=round(time.monotonic() - began_s, 1), cores=cores())
        if log and "[-Werror" not in log:
            raise RuntimeError(f"the build failed: {'; '.join(errors_of(log))}")
        if log:
            report.fact(warnings=errors_of(log))
            log = install(site, report.work / "cmake-lenient", lenient_compiler(report.work))
            if log:
                report.fact(errors=errors_of(log))
                raise RuntimeError("the build fails without -Werror as well: see the log")
            raise RuntimeError("warnings: built without -Werror, the other steps run on that")
    if not site.exists():
        return
    with report.check("importable"):
        (site / "sitecustomize.py").unlink(missing_ok=True)
        if imported_from(site) != "":
            (site / "sitecustomize.py").write_text(UNHIDE)
            if elsewhere := imported_from(site):
                raise RuntimeError(elsewhere)


def cores() -> int:
    return len(os.sched_getaffinity(0))


def install(site: Path, build: Path, compiler: Path | None = None) -> str:
    """Empty, or the log of a build that failed."""
    shutil.rmtree(site, ignore_errors=True)
    env = {**os.environ, "CMAKE_BUILD_PARALLEL_LEVEL": str(cores())}
    env.update({"CXX": str(compiler)} if compiler else {})
    # Its scripts (cmake, ninja) are this Python's, wherever the shell's PATH points to.
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-v"),
            *("--no-index", "--no-build-isolation", "--no-deps", "--no-compile"),
            *(
                f"--config-settings=build-dir={build}",
                "--target",
                str(site),
                str(ROOT),
                str(ROOT / "prism"),
            ),
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


def errors_of(log: str) -> list[str]:
    """The compiler's first complaints, or the last lines where it has none."""
    lines = log.splitlines()
    return [line.strip() for line in lines if "error:" in line.lower()][:5] or lines[-5:]


def lenient_compiler(work: Path) -> Path:
    found = os.environ.get("CXX") or shutil.which("c++") or "c++"
    program = work / LENIENT_NAME
    program.write_text(LENIENT.format(compiler=found))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def imported_from(site: Path) -> str:
    """Empty if a process of the other steps imports what was installed; else what it imports."""
    done = subprocess.run(
        [sys.executable, "-c", WHERE],
        cwd=site.parent,
        env={**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.split()
    if done.returncode or len(lines) != 3:
        return f"what was built cannot be imported: {done.stderr.strip()[-300:]}"
    strays = [path for path in lines[:2] if site not in Path(path).parents]
    if strays:
        return f"{', '.join(strays)} hides what was built"
    missing = {"prism_cpu", "prism_cuda"} - set(lines[2].split(","))
    return f"the installation lacks the entry points {sorted(missing)}" if missing else ""


if __name__ == "__main__":
    sys.exit(main())
