"""Step "large": a model of 8 billion parameters is activated cold, from the store, and again.

Random weights in the shape of Llama 3.1 8B are written to /dev/shm, and SGLang serves them as in
the step "engine". Doubles use a tiny model. The files are removed at the end.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from lab.gpu_check.driver import Driver
from lab.gpu_check.memory.models import SMALL
from lab.gpu_check.report import PASSED, Report, Skip, on_doubles, run_as_step, stretched
from lab.gpu_check.serving import engine, reference
from lab.gpu_check.serving.large_model import size_of
from lab.gpu_check.serving.process import (
    helper,
    read,
    rounds_file,
    run_check,
    sizes_and_environment,
    whole_pages,
)
from lab.gpu_check.serving.shard import available_bytes
from lab.gpu_check.sizes import GIB, MIB, SHM, Sizes, store_name

NAME = "large"
LIMIT_S = 240.0  # without a runner, which sets it otherwise
JUDGE_S = 25.0  # kept for transformers
ROUNDS = 3  # cold, from the store, again
STREAMS = 16
SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
TINY = SMALL | {"max_position_embeddings": 2048}
GPU_BYTES = 28 * GIB  # 16 of weights, the engine's share, KV, and some more
CAPACITY_BYTES = 48 * GIB
SLACK_BYTES = 2 * GIB


def main(arguments: list[str] | None = None) -> int:
    return run_as_step(NAME, __doc__, body, arguments)


def body(report: Report) -> None:
    sizes, env = sizes_and_environment(report)
    shape = TINY if on_doubles() else SHAPE
    require_room(sizes, 0 if on_doubles() else size_of(shape))
    parent = SHM / store_name(report.work) / "8b"
    folder = parent / "llama"  # a folder is named after its family
    try:
        with report.check("written"):
            written = write(report, env, folder, shape)
        if report.checks["written"] == PASSED:
            serve(report, sizes, env, folder, written["bytes"])
    finally:
        shutil.rmtree(parent, ignore_errors=True)


def require_room(sizes: Sizes, weight_bytes: int) -> None:
    """Raises Skip where the GPU or /dev/shm is too small. /dev/shm has to take the files and the
    store's copy of them."""
    free_gib = sizes.free_bytes >> 30
    if weight_bytes and sizes.free_bytes < GPU_BYTES:
        raise Skip(f"{free_gib} GiB of the GPU are free, and {GPU_BYTES >> 30} are needed")
    need_bytes = 2 * weight_bytes + (SLACK_BYTES if weight_bytes else MIB)
    if sizes.shm_free_bytes < need_bytes:
        raise Skip(
            f"/dev/shm has {sizes.shm_free_bytes >> 30} GiB free, and files and store need"
            f" {need_bytes / GIB:.0f}: mount -o remount,size={2 * need_bytes >> 30}G /dev/shm"
        )


def write(report: Report, env: dict[str, str], folder: Path, shape: dict[str, int]) -> Any:
    """Writes the model. Raises Skip if the machine's memory cannot take the files and the store's
    copy. The memory of some virtual machines grows while it is used."""
    written = helper(env, "large_model", str(folder), json.dumps(shape))
    report.fact(written=written)
    if written["short"]:
        raise Skip(f"the files do not fit into the machine's memory: {written['short']}")
    left_bytes, need_bytes = available_bytes(), written["bytes"] + (0 if on_doubles() else GIB)
    if left_bytes < need_bytes and not written["memory_grew"]:
        raise Skip(f"{left_bytes >> 20} MiB of memory are left, and the store needs {need_bytes}")
    report.figure("write", written["bytes"] / written["write_s"] / 1e9)
    return written


def serve(
    report: Report, sizes: Sizes, env: dict[str, str], folder: Path, weight_bytes: int
) -> None:
    limit_s = report.left_s(stretched(LIMIT_S)) - stretched(JUDGE_S)
    with report.check("served"):
        try:
            run_check(report, env, NAME, options_of(folder, sizes), limit_s)
        finally:
            served = read(rounds_file(report, NAME))
            if engine.rounds_of(served):
                report.fact(**engine.figures(served))
        engine.judge_rounds(served, ROUNDS, models=1)
    with report.check("figures"):
        rounds = engine.rounds_of(served)
        engine.record(report, rounds, engine.kept_growth(rounds))
        record_decode(report, rounds[-1], weight_bytes)
    with report.check("tokens"):
        if report.left_s(stretched(LIMIT_S)) < stretched(JUDGE_S) / 2:
            raise Skip("no time is left for transformers")
        report.fact(tokens=engine.judge_tokens(env, rounds_file(report, NAME), [folder]))


def options_of(folder: Path, sizes: Sizes) -> list[str]:
    """Returns the sizes of the engine and of its requests."""
    given = ["--model", str(folder), "--store-in", str(folder.parent), "--rounds", str(ROUNDS)]
    if on_doubles():
        capacity = whole_pages(0.8 * sizes.free_bytes)
        given += ["--capacity", capacity, "--static", "2GiB", "--context", "128"]
        return [*given, "--streams", "2", "--tokens", "4", "--prompt-tokens", "16"]
    capacity = whole_pages(min(CAPACITY_BYTES, 0.9 * sizes.free_bytes))
    given += ["--capacity", capacity, "--static", "3GiB", "--context", "4096"]
    return [*given, "--streams", str(STREAMS), "--tokens", "64", "--prompt-tokens", "512"]


def record_decode(report: Report, found: dict[str, Any], weight_bytes: int) -> None:
    """Reports a decode step, compared with the time in which the GPU reads each weight once."""
    if not found["tokens_graphs"]:
        raise Skip("no decode graph was captured")
    read_s = reference.read_s(Driver.open(), weight_bytes, copy_bytes(found))
    step_ms = engine.decode_ms(found, graphs=True)
    report.figure("decode", step_ms, 1e3 * read_s)
    report.figure("tokens_per_s", 1e3 * len(found["tokens_graphs"]) / step_ms)


def copy_bytes(found: dict[str, Any]) -> int:
    """Returns a size larger than any cache, or a small one on doubles."""
    return reference.COPY_BYTES if found["weight_bytes"] > GIB else MIB


if __name__ == "__main__":
    sys.exit(main())
