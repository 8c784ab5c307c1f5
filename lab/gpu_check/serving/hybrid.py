"""Step "hybrid": models whose KV memory is not one pool for all layers.

A Gemma 3 has windows of 512 tokens in five layers of six, so it has two pools. The same weights
without windows show how much memory the windows save. An LFM2 has short convolutions, whose states
are a pool too. transformers judges the tokens.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from lab.gpu_check.report import Report, Skip, on_doubles, run_as_step, stretched
from lab.gpu_check.serving import engine, shard
from lab.gpu_check.serving.process import (
    model_folder,
    read,
    rounds_file,
    run_check,
    run_folder,
    sizes_and_environment,
    store_options,
    whole_pages,
)
from lab.gpu_check.sizes import GIB, MIB, Sizes

NAME = "hybrid"
LIMIT_S = 120.0  # without a runner, which sets it otherwise
JUDGE_S = 25.0  # kept for transformers
WINDOWS, STATES = "gemma3_text", "lfm2"
PLAIN = "plain"  # the same weights without windows
PAGE = "4KiB"  # on doubles, so that a few tokens need several pages


def main(arguments: list[str] | None = None) -> int:
    return run_as_step(NAME, __doc__, body, arguments)


def body(report: Report) -> None:
    sizes, env = sizes_and_environment(report)
    env |= page_variables()
    # SGLang compiles its kernels of short convolutions for real GPUs only.
    families = [WINDOWS] if on_doubles() else [WINDOWS, STATES]
    for done, family in enumerate(families):
        with report.check(f"served_{family}"):
            share_s = report.left_s(stretched(LIMIT_S)) / (len(families) - done)
            serve(report, sizes, env, family, share_s)
    with report.check("figures"):
        record(report, engine.rounds_of(read(rounds_file(report, WINDOWS))))


def serve(report: Report, sizes: Sizes, env: dict[str, str], family: str, limit_s: float) -> None:
    """Serves a model, and the same one without windows if it has any."""
    folders = [model_folder(report, sizes, env, family)]
    if family == WINDOWS:
        folders.append(without_windows(folders[0], run_folder(report, sizes) / PLAIN))
    options = options_of(folders, sizes) + store_options(report, sizes)
    run_check(report, env, family, options, limit_s - stretched(JUDGE_S) / 2)
    file = rounds_file(report, family)
    report.fact(**{family: engine.figures(read(file))})
    engine.judge_rounds(read(file), rounds_of_each=2, models=len(folders))
    report.fact(**{f"tokens_{family}": engine.judge_tokens(env, file, folders)})


def without_windows(source: Path, folder: Path) -> Path:
    """Writes a model with the weights of `source` and full attention in all layers."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(shard.NAME))
    (folder / shard.NAME).symlink_to(source / shard.NAME)
    config = json.loads((folder / "config.json").read_text())
    config["layer_types"] = ["full_attention"] * len(config["layer_types"])
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def page_variables() -> dict[str, str]:
    """Returns the variables for the pages of `options_of`."""
    return {"KVCACHED_TEST_CUDA_GRANULARITY": "4096"} if on_doubles() else {}


def options_of(folders: list[Path], sizes: Sizes) -> list[str]:
    """Returns the sizes of the engine, and requests of several windows each."""
    given = [word for folder in folders for word in ("--model", str(folder))]
    given += ["--capacity", whole_pages(min(16 * GIB, 0.8 * sizes.free_bytes)), "--static", "2GiB"]
    given += ["--rounds", "2"]
    if on_doubles():
        given += ["--page", PAGE]
    if not sizes.is_large:
        given += ["--context", "256", "--streams", "2"]
        return [*given, "--tokens", "6", "--prompt-tokens", "170"]
    given += ["--context", "8192", "--streams", "4"]
    return [*given, "--tokens", "32", "--prompt-tokens", "6000"]


def record(report: Report, rounds: list[dict[str, Any]]) -> None:
    """Reports what windows save, and how long a copy from the store takes against files."""
    if not rounds:
        raise Skip("nothing was served")
    windows, plain = ([r for r in rounds if r["model"] == name] for name in (WINDOWS, PLAIN))
    peaks = [found[-1]["kv_peak_bytes"] / MIB for found in (windows, plain)]
    report.figure("window_kv", *peaks)
    cold, again = (engine.activation_s(found["stages_s"]) for found in windows)
    report.figure("activation_store", again, cold)


if __name__ == "__main__":
    sys.exit(main())
