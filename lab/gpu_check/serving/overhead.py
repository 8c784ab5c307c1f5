"""Step "overhead": SGLang on elastic KV memory against SGLang on its own static pool.

Two engines on one GPU serve the same requests in turn (bench/sglang_throughput.py). Both use decode
graphs. Measured are decode steps of the full batch, steps in which pages are mapped, and the time
until the first token of a prompt on an idle engine.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Any

from lab.gpu_check.report import Report, is_quick, run_as_step, stretched
from lab.gpu_check.serving.process import (
    judge_each,
    model_folder,
    read,
    rounds_file,
    run_bench,
    sizes_and_environment,
    whole_pages,
)
from lab.gpu_check.sizes import GIB, Sizes

NAME = "overhead"
LIMIT_S = 180.0  # without a runner, which sets it otherwise
END_S = 3.0  # kept for the report
KV_GIB = 4
SAME_MIN = 0.9  # of all tokens


def main(arguments: list[str] | None = None) -> int:
    return run_as_step(NAME, __doc__, body, arguments)


def body(report: Report) -> None:
    sizes, env = sizes_and_environment(report)
    folder = model_folder(report, sizes, env, "llama")
    with report.check("served"):
        serve(report, folder, sizes, env)
    judge_each(report, read(rounds_file(report, NAME)), CHECKS)


def serve(report: Report, folder: Path, sizes: Sizes, env: dict[str, str]) -> None:
    """Runs the benchmark and reports its figures."""
    options = ["sglang_throughput.py", "--model", str(folder), *options_of(sizes)]
    found = run_bench(report, env, NAME, options, report.left_s(stretched(LIMIT_S)) - END_S)
    report.fact(**found)
    record(report, found)


def options_of(sizes: Sizes) -> list[str]:
    """Returns sizes of the load. Each round starts on an idle engine, with short prompts and long
    answers, so that KV grows by a slab about every hundred steps."""
    if not sizes.is_large:
        return [
            *("--kv", "64MiB", "--batch", "4", "--prompt-tokens", "16", "--output-tokens", "32"),
            *("--warmup", "3", "--steps", "24", "--pairs", "1"),
            *("--first-token", "40", "--first-pairs", "1", "--from-idle"),
        ]
    pairs, steps = ("3", "160") if is_quick() else ("6", "256")
    kv = whole_pages(min(KV_GIB * GIB, 0.15 * sizes.free_bytes))
    return [
        *("--kv", kv, "--batch", "32", "--prompt-tokens", "128"),
        *("--output-tokens", "512", "--warmup", "64", "--steps", steps, "--pairs", pairs),
        *("--first-token", "2000", "--first-pairs", "4" if is_quick() else "12", "--from-idle"),
    ]


def record(report: Report, found: dict[str, Any]) -> None:
    """Reports figures of kvcached's side, compared with the static pool's."""
    elastic, static = found["kvcached_steps"], found["stock_steps"]
    for name, key in (("decode", "mean_ms"), ("decode_p99", "p99_ms")):
        if elastic[key] and static[key]:
            report.figure(name, elastic[key], static[key])
    if elastic["growth_p99_ms"] and elastic["plain_median_ms"]:
        report.figure("growth_step", elastic["growth_p99_ms"], elastic["plain_median_ms"])
    firsts = (found["kvcached_first_token_ms"], found["stock_first_token_ms"])
    if all(firsts):
        report.figure("first_token", *map(median, firsts))


def judge_tokens(found: dict[str, Any]) -> None:
    """Raises RuntimeError for answers that depend on the pool.

    Both sides run the same batches in the same order, so that tokens should be equal. But a matrix
    library may choose other kernels in each process, and their last bits decide near ties. So the
    first token of each request must be equal, and nearly all tokens. A request's tokens count up to
    the first difference.
    """
    same = found["agreement"]
    if same["same_first"] < same["requests"]:
        wrong = same["requests"] - same["same_first"]
        raise RuntimeError(f"{wrong} of {same['requests']} requests differ in their first token")
    if same["same_tokens"] < SAME_MIN * same["tokens"]:
        raise RuntimeError(f"{same['same_tokens']} of {same['tokens']} tokens are the same")


def judge_batches(found: dict[str, Any]) -> None:
    """Raises RuntimeError unless both sides decoded the full batch equally often without
    retractions. Otherwise the times are of different work."""
    steps = [found[f"{name}_steps"]["steps"] for name in ("kvcached", "stock")]
    if min(steps) == 0 or steps[0] != steps[1]:
        raise RuntimeError(f"{steps} decode steps of the full batch, kvcached and static")
    if found["kvcached_retractions_per_s"] or found["stock_retractions_per_s"]:
        raise RuntimeError("requests were retracted: the pools are too small")


CHECKS = {"same_tokens": judge_tokens, "same_batches": judge_batches}


if __name__ == "__main__":
    sys.exit(main())
