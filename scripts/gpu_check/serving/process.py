"""SGLang and the GPU, for the steps that serve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scripts.gpu_check.driver import open_or_skip
from scripts.gpu_check.kv import require_kvcached
from scripts.gpu_check.machine.build import path_of
from scripts.gpu_check.machine.unpack import SGLANG
from scripts.gpu_check.report import Report, Skip
from scripts.gpu_check.sizes import GIB, MIB, SHM, Sizes, store_name

FREE_MIN_BYTES = 3 * GIB
LARGE_BYTES = 8 * GIB  # of both families' files
WRITTEN = "written"


def sizes_and_environment(report: Report) -> tuple[Sizes, dict[str, str]]:
    """Returns the sizes for this GPU, and the environment of processes that import SGLang.

    Raises Skip where kvcached, SGLang, the GPU or its memory is missing.
    """
    require_kvcached()
    site = report.work / SGLANG
    is_carried = report.options.wheels is not None and site.is_dir()
    if not is_carried and find_spec("sglang") is None:
        raise Skip("SGLang is not installed, and the step unpack installed none from --wheels")
    sizes = Sizes.of(open_or_skip().free_bytes())
    if sizes.free_bytes < FREE_MIN_BYTES:
        raise Skip(f"{sizes.free_bytes} bytes are free; an engine needs {FREE_MIN_BYTES}")
    env = {**os.environ, "PRISM_ENGINE_WARNINGS": "sglang"}
    if is_carried:
        env["PYTHONPATH"] = path_of(site, env.get("PYTHONPATH", ""))
        env["SGLANG_FORCE_FUSED_OP_BACKEND"] = "torch"  # the stand-in for sgl-kernel has none
    return sizes, env


def model_folder(report: Report, sizes: Sizes, env: dict[str, str], family: str) -> Path:
    """Returns the folder of a random model, written by the first step of a run that asks for it:
    in memory where its files and a store of them fit there."""
    name = store_name(report.work)
    written = [folder / name / family for folder in (SHM, report.work)]
    for folder in written:
        if (folder / WRITTEN).exists():
            return folder
    need_bytes = LARGE_BYTES if sizes.is_large else MIB
    folder = sizes.store_folder(report.work, need_bytes) / name / family
    size = "large" if sizes.is_large else "small"
    report.fact(**{f"written_{family}": helper(env, "engine_models", "write", size, str(folder))})
    (folder / WRITTEN).touch()
    return folder


def helper(env: dict[str, str], module: str, *arguments: str) -> Any:
    """Returns what a module of this folder prints last, as JSON. Its GPU memory ends with its
    process."""
    command = [sys.executable, "-m", f"scripts.gpu_check.serving.{module}", *arguments]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{module} ended with {done.returncode}: see the log")
    return json.loads(done.stdout.strip().splitlines()[-1])
