"""Step "unpack": installs the carried wheels, kvcached and prism separately from the others.

Modules are compiled, SGLang is imported once, and nvcc compiles its kernel that writes KV. The
first import takes half a minute, which must not be part of a measured time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from lab.gpu_check import wheels
from lab.gpu_check.machine.build import cores, importable, path_of
from lab.gpu_check.memory.models import LARGE
from lab.gpu_check.report import Report, Skip, run_as_step

SGLANG = "sglang"  # folder of all but kvcached and prism, in the folder of work
# Whether the kernel can be used is answered by compiling it, and a failure is a warning.
IMPORTS = """
import sys
from prism.engines.sglang import adapter
from prism.engines.sglang.platform import gpu
adapter.preload("cuda:0")
from sglang.kernels.ops.kvcache.kvcache import can_use_store_cache
with gpu.importing("cuda:0"):  # makes no CUDA context, which another step's figures would show
    print(all([can_use_store_cache(int(row_bytes)) for row_bytes in sys.argv[1:]]))
"""


def main(arguments: list[str] | None = None) -> int:
    return run_as_step("unpack", __doc__, body, arguments)


def body(report: Report) -> None:
    folder = report.options.wheels
    if folder is None:
        raise Skip("--wheels is missing: it names the folder that scripts/gpu-wheels makes")
    own, others = wheels.of(folder)
    with report.check("kvcached"):  # first: the first steps of a quick run need it
        if not wheels.hold_this_checkout(folder):
            raise Skip("the carried kvcached has other sources, so this checkout is built instead")
        site = report.work / "site"
        report.fact(install_own_s=install(own, site))
        importable(site)
    with report.check("sglang"):
        if not others:
            raise RuntimeError(f"{folder} does not have wheels: run scripts/gpu-wheels")
        report.fact(install_s=install(others, report.work / SGLANG))
    with report.check("imports"):
        imports_s, has_kernel = imported_once(report.work)
        report.fact(imports_s=imports_s, kv_kernel=has_kernel)


def install(files: list[Path], site: Path) -> float:
    """Installs wheels into a folder and compiles their modules. Returns seconds."""
    began_s, jobs = time.monotonic(), max(1, cores() // 2)  # the probe's times want cores, too
    shutil.rmtree(site, ignore_errors=True)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q")
    options = ("--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade")
    subprocess.run([*pip, *options, "--target", str(site), *map(str, files)], check=True)
    subprocess.run(
        [sys.executable, "-m", "compileall", "-q", "-j", str(jobs), str(site)], check=False
    )
    return round(time.monotonic() - began_s, 1)


def imported_once(work: Path) -> tuple[float, bool]:
    """Imports SGLang as an engine does, so that later imports find its files in memory. Returns
    seconds, and whether the kernel that writes KV was compiled."""
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, *map(str, sorted(rows_of_kv()))],
        env={**os.environ, "PYTHONPATH": path_of(work / SGLANG, os.environ.get("PYTHONPATH", ""))},
        cwd=work,
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout, done.stderr, flush=True)
    if done.returncode:
        raise RuntimeError(f"SGLang cannot be imported: {done.stderr.strip()[-300:]}")
    return round(time.monotonic() - began_s, 1), done.stdout.split()[-1:] == ["True"]


def rows_of_kv() -> set[int]:
    """Returns the bytes of a token's K in a layer of the models that later steps serve, for each of
    which the kernel is another one."""
    return {
        2
        * sizes["num_key_value_heads"]
        * sizes.get("head_dim", sizes["hidden_size"] // sizes["num_attention_heads"])
        for sizes in LARGE.values()
    }


if __name__ == "__main__":
    sys.exit(main())
