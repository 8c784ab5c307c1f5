"""Step "elastic": the KV memory of an SGLang engine follows its load.

One engine serves rising and falling numbers of requests (bench/sglang_elastic.py). Samples have the
KV bytes that exist, those that live tokens need, and the driver's free memory. The prefix cache is
off, since it keeps KV of ended requests until the memory is needed. transformers judges each token
on the same GPU.
"""

from __future__ import annotations

import sys
from typing import Any

from lab.gpu_check.report import Report, Skip, is_quick, on_doubles, run_as_step, stretched
from lab.gpu_check.serving.engine import judge_tokens
from lab.gpu_check.serving.process import (
    ServingError,
    judge_each,
    model_folder,
    read,
    rounds_file,
    run_bench,
    sizes_and_environment,
    whole_pages,
)
from lab.gpu_check.sizes import GIB, MIB, Sizes

NAME = "elastic"
LIMIT_S = 120.0  # without a runner, which sets it otherwise
JUDGE_S = 25.0  # kept for transformers
PHASES = "1x64,4x96,16x200,64x400,16x300,4x300,1x300"
QUICK_PHASES = "1x32,16x96,64x250,16x150,1x100"
TINY_PHASES = "1x6,4x12,8x20,4x12,1x8"
KV_GIB = 12
POINTS_MAX = 300
QUANTA_MIN = 4  # of growth, so that changes can be seen
FALLEN_MAX = 0.6  # of the peak, at the end of the last phase
IDLE_MAX_S = 5.0
# Share of the change of KV memory: page tables, and code of kernels that are first used then.
DRIVER_SLACK = 0.25
NOT_FACTS = ("samples", "rounds", "wanted_tokens")  # of what the load writes
# kvcached on a GPU maps two slabs or 128 MiB ahead of need, at most a 32nd of the device. It keeps
# up to twice as much, and one slab of pages that are created and not mapped.
READY_BYTES, READY_SLABS, READY_PART = 128 * MIB, 2, 32


def main(arguments: list[str] | None = None) -> int:
    return run_as_step(NAME, __doc__, body, arguments)


def body(report: Report) -> None:
    sizes, env = sizes_and_environment(report)
    if not sizes.is_large and not on_doubles():
        raise Skip("the KV of a small model fits into one page of each layer: it needs 24 GiB free")
    folder = model_folder(report, sizes, env, "llama")
    with report.check("served"):
        serve(report, [*options_of(sizes), "--model", str(folder)], env)
    judge_each(report, read(rounds_file(report, NAME)), CHECKS)
    with report.check("tokens"):
        report.fact(tokens=judge_tokens(env, rounds_file(report, NAME), [folder]))


def options_of(sizes: Sizes) -> list[str]:
    if not sizes.is_large:
        tiny = ("--kv", "64MiB", "--prompt-tokens", "24", "--output-tokens", "8")
        return [*tiny, "--phases", TINY_PHASES]
    kv = whole_pages(min(KV_GIB * GIB, 0.4 * sizes.free_bytes))
    return [
        *("--kv", kv, "--prompt-tokens", "960", "--output-tokens", "64"),
        *("--phases", QUICK_PHASES if is_quick() else PHASES),
    ]


def serve(report: Report, options: list[str], env: dict[str, str]) -> None:
    """Runs the load. Raises ServingError unless every answer has the requested length."""
    limit_s = report.left_s(stretched(LIMIT_S)) - stretched(JUDGE_S)
    found = run_bench(report, env, NAME, ["sglang_elastic.py", *options], limit_s)
    report.fact(
        **facts_of(found), phases=options[options.index("--phases") + 1], prefix_cache="off"
    )
    record(report, found)
    lengths = [len(tokens) for tokens in found["rounds"][0]["tokens"]]
    if lengths != found["wanted_tokens"]:
        wrong = sum(a != b for a, b in zip(lengths, found["wanted_tokens"], strict=True))
        raise ServingError(f"{wrong} of {len(lengths)} answers do not have the requested length")


def facts_of(found: dict[str, Any]) -> dict[str, Any]:
    """Returns the measurements, with fewer samples, in MiB."""
    kept = {name: value for name, value in found.items() if name not in NOT_FACTS}
    kept["requests"] = len(found["wanted_tokens"])
    return kept | {"series": series(found["samples"])}


def series(samples: dict[str, list[Any]], points_max: int = POINTS_MAX) -> dict[str, list[Any]]:
    """Returns at most `points_max` samples. The first, the last and the highest are among them."""
    kv = samples["kv"]
    stride = -(-len(kv) // (points_max - 2))
    chosen = sorted({*range(0, len(kv), stride), len(kv) - 1, kv.index(max(kv))})
    columns = {"t_s": [round(samples["seconds"][i], 3) for i in chosen]}
    columns["streams"] = [samples["streams"][i] for i in chosen]
    for name in ("needed", "kv", "free", "torch"):
        values = (samples[name][i] for i in chosen)
        columns[f"{name}_mib"] = [None if v is None else round(v / MIB, 2) for v in values]
    return columns


def record(report: Report, found: dict[str, Any]) -> None:
    """Reports figures, compared with the need of the tokens and with a static pool."""
    peak_bytes = found["peak_bytes"]
    report.figure("peak_kv", peak_bytes / MIB, found["needed_peak_bytes"] / MIB)
    report.figure("mean_kv", found["mean_bytes"] / MIB, peak_bytes / MIB)
    report.figure("idle_kv", found["idle_bytes"] / MIB, peak_bytes / MIB)
    report.figure("idle_after", found["idle_s"])


def idle_bound(found: dict[str, Any]) -> int:
    """Returns the bytes that kvcached may keep for an engine without requests."""
    slab_bytes = found["quantum_bytes"]
    wanted = max(READY_SLABS, -(-READY_BYTES // slab_bytes))
    low = min(wanted, found["capacity_bytes"] // READY_PART // slab_bytes)
    return int(found["floor_bytes"] + 2 * low * slab_bytes + slab_bytes)


def judge_follows(found: dict[str, Any]) -> None:
    """Raises RuntimeError unless KV memory grew and fell with the load."""
    kv, needed = found["samples"]["kv"], found["samples"]["needed"]
    short = [place for place, (a, b) in enumerate(zip(kv, needed, strict=True)) if a < b]
    if short:
        raise RuntimeError(f"{len(short)} samples have less KV memory than their tokens need")
    peak_bytes, last_bytes = found["peak_bytes"], last_of_load(found)
    grown = (peak_bytes - kv[0]) // found["quantum_bytes"]
    if grown < QUANTA_MIN:
        raise RuntimeError(f"KV memory grew by {grown} quanta only")
    if last_bytes > FALLEN_MAX * peak_bytes:
        raise RuntimeError(f"{last_bytes} of {peak_bytes} bytes are left after the last phase")
    if found["retractions"]:
        raise RuntimeError(f"{found['retractions']} requests were retracted: the pool is too small")


def last_of_load(found: dict[str, Any]) -> int:
    """Returns the KV bytes at the end of the last phase, while requests still run."""
    samples = found["samples"]
    place = max(i for i, streams in enumerate(samples["streams"]) if streams)
    return int(samples["kv"][place])


def judge_idle(found: dict[str, Any]) -> None:
    """Raises RuntimeError unless the idle engine soon held no more than it may keep."""
    bound = min(idle_bound(found), int(FALLEN_MAX * found["peak_bytes"]))
    if found["idle_bytes"] > bound:
        raise RuntimeError(f"the idle engine keeps {found['idle_bytes']} bytes of KV, not {bound}")
    if found["idle_s"] > stretched(IDLE_MAX_S):
        raise RuntimeError(f"KV memory still fell {found['idle_s']:.1f} s after the last token")


def judge_driver(found: dict[str, Any]) -> None:
    """Raises RuntimeError unless the driver's free memory changes with pages and torch's memory."""
    samples = found["samples"]
    asked = [
        (free, kv, torch)
        for free, kv, torch in zip(samples["free"], samples["kv"], samples["torch"], strict=True)
        if free is not None
    ]
    sums, pages = [sum(each) for each in asked], [kv for _, kv, _ in asked]
    drift_bytes, moved_bytes = max(sums) - min(sums), max(pages) - min(pages)
    if drift_bytes > DRIVER_SLACK * moved_bytes:
        raise RuntimeError(
            f"KV memory changed by {moved_bytes} bytes, and the driver's free memory differently:"
            f" {drift_bytes} bytes are not explained"
        )


CHECKS = {"follows": judge_follows, "idle": judge_idle, "driver": judge_driver}


if __name__ == "__main__":
    sys.exit(main())
