"""Prism's two algorithms at scale, against a Python sort of the same arrays.

    python bench/policies.py [--pairs 15] [--models 1000] [--gpus 1000] [--requests 10000]

Measures KVPR placement (Algorithm 1) of all models, and Moore-Hodgson (Algorithm 2) over all
waiting requests. The sort has the algorithm's own order: models by pressure and devices by rank;
requests by deadline. CPU time, in interleaved pairs. Target: at most 10 times the sort. The other
lines show Algorithm 1 with nearly full devices, with tensor-parallel models, and for larger inputs.
"""

from __future__ import annotations

import argparse
from random import Random

from pairs import measure

from prism.policies import kvpr
from prism.policies.admission import moore_hodgson
from prism.policies.bins import empty_bins
from prism.policies.data import EngineView, GpuView, ModelView, Waiting

TARGET = "at most 10"
GB = 10**9


def cluster(
    models: int, gpus: int, tp: int = 1, seed: int = 0
) -> tuple[list[ModelView], list[GpuView]]:
    """Returns models of 1B to 13B (32B with tensor parallelism) with long-tailed rates, and GPUs of
    80 GB in nodes of eight, with fewer models each than they could hold on average.
    """
    random = Random(0)
    sizes = (2, 6, 16, 26) if tp == 1 else (64,)
    made = [
        ModelView(
            name=f"m{i:05}",
            weight_bytes=random.choice(sizes) * GB + random.randrange(GB),
            token_bytes=random.choice((57_344, 131_072, 196_608)),
            kv_floor_bytes=GB,
            slo_ttft_s=1.0,
            slo_tpot_s=random.uniform(0.01, 0.05),
            token_rate=1000 * random.paretovariate(1.2) if random.random() < 0.5 else 0.0,
            tp=tp,
        )
        for i in range(models)
    ]
    devices = [
        GpuView(f"g{i:05}", 80 * GB, engines_free=8, engines_total=8, node=f"n{i // 8}")
        for i in range(gpus)
    ]
    return made, devices


ENGINES = {"m": EngineView("m", 0, 0, 0, 1, prefill_tokens_per_s=1e4)}


def requests(count: int) -> list[Waiting]:
    """Returns a backlog of which half will be late: it needs twice the time of its deadlines."""
    random = Random(0)
    return [
        Waiting(f"r{i:06}", "m", 100, 1, at := random.uniform(0, 60), at + random.uniform(1, 10))
        for i in range(count)
    ]


def placement(models: int, gpus: int, pairs: int, tp: int = 1) -> str:
    made, devices = cluster(models, gpus, tp)
    bins = empty_bins(made, devices)
    found = measure(
        lambda: kvpr.place(made, devices, 0.2),
        lambda: (sorted(made, key=kvpr.by_pressure), sorted(bins.values(), key=lambda b: b.rank)),
        pairs,
    )
    refused = len(kvpr.place(made, devices, 0.2).refused)
    name = (
        f"KVPR, {models} models{f' at TP {tp}' if tp > 1 else ''}, {gpus} GPUs ({refused} refused)"
    )
    return found.line(name, TARGET, "ms", 1e-3, 1e-3)


def ordering(count: int, pairs: int) -> str:
    jobs = requests(count)
    found = measure(
        lambda: moore_hodgson.order(jobs, ENGINES, 30.0),
        lambda: sorted(jobs, key=lambda job: (job.deadline_s, job.arrival_s, job.id)),
        pairs,
    )
    late = len(moore_hodgson.order(jobs, ENGINES, 30.0).late)
    return found.line(f"Moore-Hodgson, {count} requests ({late} late)", TARGET, "ms", 1e-3, 1e-3)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--gpus", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=10_000)
    chosen = parser.parse_args(arguments)
    models, gpus, pairs = chosen.models, chosen.gpus, chosen.pairs
    print(placement(models, gpus, pairs))
    print(ordering(chosen.requests, pairs))
    print(placement(4 * models, 4 * gpus, pairs))
    print(placement(4 * models, gpus, pairs))
    print(placement(6 * models, gpus, pairs))
    print(placement(models // 8, gpus, pairs, tp=4))


if __name__ == "__main__":
    main()
