"""Step "benches": the benchmarks of bench/ for GPUs, sized by free memory."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from typing import Any

from lab.gpu_check.driver import open_or_skip
from lab.gpu_check.kv import require_kvcached, torch_or_skip
from lab.gpu_check.report import ROOT, Report, Skip, run_as_step, stretched
from lab.gpu_check.sizes import GIB, MIB, PAGE_BYTES, Sizes

LIMIT_S = 45.0
MAP_LINES = {
    "batched": "batched, against page by page",
    "handles_made": "handles made anew, against cached",
    "fenced": "after a fence, against without",
    "guarded": "guarded holes, against faulting ones",
}
_NUMBER = r"\s+([\d.]+)"
RATIO = re.compile(rf"^(\S.*?){_NUMBER} against{_NUMBER} .*: ratio{_NUMBER}")
RATE = re.compile(r"(?P<name>naive|pinned|pipeline|bus) (?P<rate>[\d.]+)")


def main(arguments: list[str] | None = None) -> int:
    return run_as_step("benches", __doc__, body, arguments)


def body(report: Report) -> None:
    require_kvcached()
    sizes = Sizes.of(open_or_skip().free_bytes())
    with report.check("gpu_map"):
        found = ratios(run("gpu_map", *map_options(sizes)))
        report.fact(map_us_per_page=found)
        for name, line in MAP_LINES.items():
            report.figure(name, found[line][0], found[line][1])
    with report.check("gpu_weights"):
        gigabytes = weight_gigabytes(sizes)
        text = run("gpu_weights", *weight_options(gigabytes))
        found_rates = rates(text)
        report.fact(weights_gb_per_s=found_rates)
        largest = list(found_rates.values())[-1]
        report.figure("weights_link", largest["pipeline"], largest["bus"])
        report.figure("weights_naive", largest["pipeline"], largest["naive"])
    with report.check("gpu_attention"):
        torch_or_skip()
        text = run("gpu_attention", *attention_options(sizes))
        attention = ratios(text)
        report.fact(attention=attention, attention_text=text.strip().splitlines())
        report.figure("interleaved_attention", *next(iter(attention.values()))[:2])


def map_options(sizes: Sizes) -> list[str]:
    """Returns sizes of which free memory holds five times buffers x slabs, and some more."""
    buffers = 64 if sizes.free_bytes > 8 * 64 * 4 * PAGE_BYTES else 4
    slabs = 4 if buffers == 64 else 2
    return ["--buffers", str(buffers), "--slabs", str(slabs), "--pairs", "15"]


def weight_gigabytes(sizes: Sizes) -> list[float]:
    """Returns one and three gigabytes if they fit into a store in /dev/shm and twice on the GPU."""
    room = min(sizes.store_bytes // 2, sizes.free_bytes // 3)
    found = [size for size in (1.0, 3.0) if size * 1e9 <= room]
    return found or [round(min(room, 64 * MIB) / 1e9, 3)]


def weight_options(gigabytes: list[float]) -> list[str]:
    if gigabytes[0] <= 0:
        raise Skip("/dev/shm is full: a store does not fit")
    tensor_mb = 64 if gigabytes[0] >= 1 else 4
    sizes = ",".join(str(size) for size in gigabytes)
    return ["--gigabytes", sizes, "--tensor-mb", str(tensor_mb), "--pairs", "3"]


def attention_options(sizes: Sizes) -> list[str]:
    """Returns 8.6 GB of KV, more than any cache, on a large GPU, and tiny sizes elsewhere."""
    if sizes.free_bytes >= 24 * GIB:
        return ["--batch", "64", "--context", "2048"]
    return ["--layers", "2", "--batch", "2", "--context", "64", "--pairs", "2"]


def run(name: str, *options: str) -> str:
    """Returns the output of a benchmark. Raises RuntimeError with the end of its errors."""
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / f"{name}.py"), *options],
        capture_output=True,
        text=True,
        timeout=stretched(LIMIT_S),
        check=False,
    )
    print(f"{name} took {time.monotonic() - began_s:.1f} s\n{done.stdout}{done.stderr}", flush=True)
    if done.returncode:
        raise RuntimeError(f"{name} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout


def ratios(text: str) -> dict[str, Any]:
    """Returns {name: [first, second, ratio]} of a benchmark's lines."""
    found = {}
    for line in text.splitlines():
        if match := RATIO.match(line):
            name, *values = match.groups()
            found[name] = [float(value) for value in values]
    if not found:
        raise RuntimeError(f"no ratio in the output: {text[-200:]}")
    return found


def rates(text: str) -> dict[str, dict[str, float]]:
    """Returns {size: {way: GB/s}} of a benchmark's lines."""
    found = {}
    for line in text.splitlines():
        size, _, rest = line.partition(":")
        if size.endswith(" GB") and (pairs := RATE.findall(rest)):
            found[size] = {name: float(rate) for name, rate in pairs}
    if not found:
        raise RuntimeError(f"no rates in the output: {text[-200:]}")
    return found


if __name__ == "__main__":
    sys.exit(main())
