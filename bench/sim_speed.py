"""Speed of the simulator: runs of decode steps against single steps, and growth with the size.

python bench/sim_speed.py [--big] [--seconds S]

Times are CPU seconds. Models are those of Prism's Table 4 (43 of 1-3B, 8 of 4-8B, 3 of 9-30B, 4 of
31-70B) on 32 GPUs, as in its Figure 12, with a generated trace. --big adds 2,000 models on 1,000
GPUs with a million requests in an hour.
"""

from __future__ import annotations

import argparse
import gc
import math
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from prism_sim.cluster.world import World
from prism_sim.scenario.scenario import load

RUNS, STEPS = 20, 3
"""How often each way is measured: the short one is disturbed more."""
FIGURE_12 = """
gpus: {type: h100, count: 32, nodes: 4}
models:
  - {name: s1, shape: Llama-3.2-1B, count: 20}
  - {name: s3, shape: Llama-3.2-3B, count: 23}
  - {name: m8, shape: Llama-3.1-8B, count: 8}
  - {name: l14, shape: Qwen3-14B, count: 3}
  - {name: x32, shape: Qwen3-32B, tp: 4, count: 2}
  - {name: x70, shape: Llama-3.1-70B, tp: 8, count: 2}
slo: {ttft: 500ms, tpot: 50ms}
generate: {seconds: 3600, rate: 4, active_fraction: 0.35}
"""
BIG = """
gpus: {type: h100, count: 1000, nodes: 125}
models:
  - {name: s1, shape: Llama-3.2-1B, count: 800}
  - {name: s3, shape: Llama-3.2-3B, count: 600}
  - {name: m8, shape: Llama-3.1-8B, count: 500}
  - {name: l14, shape: Qwen3-14B, count: 80}
  - {name: x32, shape: Qwen3-32B, tp: 4, count: 10}
  - {name: x70, shape: Llama-3.1-70B, tp: 8, count: 10}
slo: {ttft: 500ms, tpot: 50ms}
generate: {seconds: 3600, rate: 277.8, active_fraction: 0.35}
"""


def cpu_s(path: Path, name: str, times: int = 1, **changes: Any) -> float:
    """Returns the least CPU seconds of that many simulations, and prints a line."""
    spent_s = math.inf
    for _ in range(times):
        scenario = load(path, {key.replace("__", "."): value for key, value in changes.items()})
        gc.collect()
        since_s = time.process_time()
        records = World(scenario.setup, scenario.work).run()
        spent_s = min(spent_s, time.process_time() - since_s)
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    requests = len(scenario.work)
    print(
        f"{name:34} {requests:8} requests {records.events:9} events {spent_s:8.3f} s "
        f"{1e6 * spent_s / requests:7.0f} us each, {peak_gib:.2f} GiB",
        flush=True,
    )
    return spent_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--big", action="store_true")
    parser.add_argument("--seconds", type=int, default=600, help="of the trace that both ways run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "figure12.yaml"
        small.write_text(FIGURE_12)
        for policy in ("prism", "static"):
            about = {"policy": policy, "generate__seconds": options.seconds}
            runs_s = cpu_s(small, f"{policy}, runs", RUNS, **about)
            steps_s = cpu_s(small, f"{policy}, single steps", STEPS, steps="single", **about)
            print(f"{policy}: ratio {steps_s / runs_s:.1f}, single steps against runs")
        hour = {"generate__seconds": 6 * options.seconds, "rate_scale": 8}
        cpu_s(small, "prism, 6 times as long, rate scale 8", **hour)
        if options.big:
            path = Path(folder) / "big.yaml"
            path.write_text(BIG)
            cpu_s(path, "2,000 models, 1,000 GPUs, 1 h")


if __name__ == "__main__":
    main()
