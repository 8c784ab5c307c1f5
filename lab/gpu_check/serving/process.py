"""Processes, models and sizes of the steps that serve with SGLang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lab.gpu_check import processes
from lab.gpu_check.driver import open_or_skip
from lab.gpu_check.kv import CUDA, require_kvcached
from lab.gpu_check.machine.build import path_of
from lab.gpu_check.machine.unpack import SGLANG
from lab.gpu_check.report import ROOT, Report, Skip, end_of, on_doubles
from lab.gpu_check.sizes import GIB, MIB, PAGE_BYTES, SHM, Sizes, store_name

FREE_MIN_BYTES = 3 * GIB
LARGE_BYTES = 8 * GIB  # of both families' files
WRITTEN = "written"
NO_DYNAMO = "TORCHDYNAMO_DISABLE"
EAGER = "eager"  # name of a file that turns torch.compile off in engines of this run


def sizes_and_environment(report: Report) -> tuple[Sizes, dict[str, str]]:
    """Returns the sizes for this GPU, and the environment of processes that import SGLang.

    Raises Skip where kvcached, SGLang, the GPU or its memory is missing.
    """
    require_kvcached()
    site = report.work / SGLANG
    is_carried = report.options.wheels is not None and site.is_dir()
    if not is_carried and find_spec("sglang") is None:
        raise Skip("SGLang is not installed, and the step unpack did not install it from --wheels")
    sizes = Sizes.of(open_or_skip().free_bytes())
    if sizes.free_bytes < FREE_MIN_BYTES:
        raise Skip(f"{sizes.free_bytes} bytes are free; an engine needs {FREE_MIN_BYTES}")
    env = {**os.environ, "PRISM_ENGINE_WARNINGS": "sglang"}
    if is_carried:
        env["PYTHONPATH"] = path_of(site, env.get("PYTHONPATH", ""))
        env["SGLANG_FORCE_FUSED_OP_BACKEND"] = "torch"  # the stand-in for sgl-kernel lacks them
    if (report.work / EAGER).exists():
        env[NO_DYNAMO] = "1"
    return sizes, env


def run_folder(report: Report, sizes: Sizes) -> Path:
    """Returns the run's folder of models and stores, which is removed when the run ends. It is in
    memory if the files of both families and a store of them fit there."""
    need_bytes = LARGE_BYTES if sizes.is_large else MIB
    return sizes.store_folder(report.work, need_bytes) / store_name(report.work)


def store_options(report: Report, sizes: Sizes) -> list[str]:
    """Returns the option for the weight store of lab.engine_check. A store that a killed process
    leaves is removed with the run."""
    folder = run_folder(report, sizes)
    folder.mkdir(parents=True, exist_ok=True)
    return ["--store-in", str(folder)]


def model_folder(report: Report, sizes: Sizes, env: dict[str, str], family: str) -> Path:
    """Returns the folder of a random model. The first step of a run that needs it writes it."""
    return model_folders(report, sizes, env, [family])[0]


def model_folders(
    report: Report, sizes: Sizes, env: dict[str, str], families: Sequence[str]
) -> list[Path]:
    """Returns the folders of random models. One process writes those that are missing."""
    name = store_name(report.work)
    folders = [_written(report, name, family) for family in families]
    new = [run_folder(report, sizes) / f for f, at in zip(families, folders, strict=True) if not at]
    if new:
        size = "large" if sizes.is_large else "small"
        facts = helper(env, "engine_models", "write", size, *map(str, new))
        report.fact(**{f"written_{family}": {family: fact} for family, fact in facts.items()})
        for folder in new:
            (folder / WRITTEN).touch()
    made = iter(new)
    return [folder or next(made) for folder in folders]


def _written(report: Report, name: str, family: str) -> Path | None:
    places = (folder / name / family for folder in (SHM, report.work))
    return next((folder for folder in places if (folder / WRITTEN).exists()), None)


def whole_pages(size_bytes: float) -> str:
    """Returns a size in the form of options, rounded down to pages of 2 MiB."""
    return f"{int(size_bytes) // PAGE_BYTES * (PAGE_BYTES // MIB)}MiB"


class ServingError(RuntimeError):
    """Error at the end of an engine's process."""


def run_check(
    report: Report, env: dict[str, str], name: str, options: list[str], limit_s: float
) -> dict[str, Any]:
    """Runs lab.engine_check as `run_on_device` does. Returns its rounds and their figures."""
    return run_on_device(report, env, name, ["-m", "lab.engine_check", *options], limit_s)


def run_bench(
    report: Report, env: dict[str, str], name: str, options: list[str], limit_s: float
) -> dict[str, Any]:
    """Runs a script of bench/ as `run_on_device` does. Returns its figures.

    `options` begin with the name of the script. Pages on doubles are small, so that a few tokens
    need several of them.
    """
    page = "2MiB"
    if on_doubles():
        page, env = "4KiB", {**env, "KVCACHED_TEST_CUDA_GRANULARITY": "4096"}
    script, *others = options
    command = [str(ROOT / "bench" / script), "--page", page, *others]
    return run_on_device(report, env, name, command, limit_s)


def run_on_device(
    report: Report, env: dict[str, str], name: str, command: list[str], limit_s: float
) -> dict[str, Any]:
    """Runs this Python on device 0. Returns what the command wrote to NAME.json.

    Raises ServingError, and TimeoutExpired. The file then has what was written before.
    """
    file = rounds_file(report, name)
    file.unlink(missing_ok=True)
    command = [*command, "--device", CUDA, "--json", str(file)]
    code, found = logged(report, env, name, command, limit_s), read(file)
    if code or not found:
        said = found.get("error") or end_of(log_file(report, name))
        raise ServingError(f"the process ended with {code}: {said}")
    return found


def judge_each(
    report: Report, found: dict[str, Any], checks: Mapping[str, Callable[[dict[str, Any]], None]]
) -> None:
    """Judges measurements, each in a check of the same name."""
    for name, judge in checks.items():
        with report.check(name):
            if not found:
                raise Skip("nothing was served")
            judge(found)


def logged(
    report: Report, env: dict[str, str], name: str, command: list[str], limit_s: float
) -> int:
    """Runs this Python with a command. Returns its exit code. Output goes to NAME.log, and to this
    step's log at the end. Raises TimeoutExpired, with the stacks of its processes in the log."""
    with log_file(report, name).open("wb") as output:
        started = subprocess.Popen(
            [sys.executable, *command],
            env=env,
            stdout=output,
            stderr=output,
        )
    try:
        return started.wait(limit_s)
    finally:
        if started.poll() is None:
            processes.abort({started.pid, *processes.descendants(started.pid)})
        started.wait()
        print(log_of(report, name), flush=True)


def log_file(report: Report, name: str) -> Path:
    return report.work / f"{name}.log"


def log_of(report: Report, name: str) -> str:
    log = log_file(report, name)
    return log.read_text(errors="replace") if log.exists() else ""


def rounds_file(report: Report, name: str) -> Path:
    return report.work / f"{name}.json"


def read(file: Path) -> dict[str, Any]:
    """Returns the JSON of a file, {} if the file is missing."""
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def helper(env: dict[str, str], module: str, *arguments: str) -> Any:
    """Returns the last line that a module of this folder prints, which is JSON. A separate process
    runs it, so that its GPU memory is freed."""
    command = [sys.executable, "-m", f"lab.gpu_check.serving.{module}", *arguments]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{module} ended with {done.returncode}: see the log")
    return json.loads(done.stdout.strip().splitlines()[-1])
