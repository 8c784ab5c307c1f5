"""What Prism's evaluation runs on (§7.2): models, GPUs, SLOs from dedicated GPUs, policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lab.papers.lab import Lab
from lab.papers.trial import Trial
from lab.papers.tuning import AS_SHIPPED, RULE, Tuned
from prism.errors import ConfigError
from prism_replay.trace import Trace

E2E_MODELS = (
    *("Llama-3.1-8B", "Llama-3.2-3B", "Llama-3.2-1B", "Llama-3.1-8B"),
    *("Llama-3.1-8B", "Llama-3.2-1B", "Llama-3.2-1B", "Llama-3.2-1B"),
)
"""The eight models of the prototype's end-to-end experiment, the most popular first."""

ENGINE: dict[str, Any] = {"host": "4.5ms", "request": "12ms", "max_running": 2048}
"""What the real stack adds to the GPU's time, fitted to measured rows (`prism_calibration`): host
time of each step, and the way of a request to its queue. max_running: SGLang bounds the requests
that run by memory alone, not below 2048, unless it is told otherwise."""

SMALL = ("Llama-3.2-1B", "Llama-3.2-3B", "Qwen2.5-1.5B", "Qwen3-1.7B")
MEDIUM = ("Llama-3.1-8B", "Qwen2.5-7B", "Qwen3-8B", "Qwen3-4B")
LARGE = ("Qwen2.5-14B", "Qwen3-14B", "Qwen2.5-14B")
WIDE = (("Qwen2.5-32B", 4), ("Qwen2.5-32B", 4), ("Llama-3.1-70B", 4), ("Llama-3.3-70B-Instruct", 8))

GIVEN_AHEAD = (
    " Placement searches are given the whole trace's rates and lengths, which no live system "
    "has, and up to 600 of its requests to simulate on; Prism is given nothing in advance. `prism` "
    "is the paper's Algorithm 1 and two rules that the paper does not have: a model moves for "
    "balance only off a device on which several models' requests run and some wait, or less than a "
    "quarter of the memory is free, and only where the room that it takes is free now."
)
FAIR = (
    "Every policy runs with the shipped settings, the same at every point: only the studies that "
    "rank systems (Table 1, Figures 7 and 12) tune them." + GIVEN_AHEAD
)
FAIR_TUNED = RULE + "." + GIVEN_AHEAD


def eighteen() -> list[tuple[str, int]]:
    """Of 1B to 8B, a mix of sizes over the ranks of popularity (§7.3)."""
    return [(MEDIUM[i // 3 % 4] if i % 3 == 0 else SMALL[i % 4], 1) for i in range(18)]


def fifty_eight() -> list[tuple[str, int]]:
    """Table 4: 43 of 1B-3B, 8 of 4B-8B, 3 of 9B-30B, 4 of 31B-70B, the larger ones spread over the
    ranks of popularity."""
    small = [(SMALL[i % 4], 1) for i in range(43)]
    others = [(MEDIUM[i % 4], 1) for i in range(8)] + [(name, 1) for name in LARGE] + list(WIDE)
    stride = 58 / len(others)
    found = list(small)
    for number, model in enumerate(others):
        found.insert(round(number * stride), model)
    return found


@dataclass(frozen=True)
class Cluster:
    """A prepared experiment. SLO scale 1 is what dedicated GPUs do."""

    config: str
    """Path of the YAML."""
    slo_ttft_ms: tuple[float, float]
    """The smallest and the largest of a model."""
    slo_tpot_ms: tuple[float, float]
    tuned: Tuned = AS_SHIPPED

    def described(self) -> str:
        (ttft, ttft_most), (tpot, tpot_most) = self.slo_ttft_ms, self.slo_tpot_ms
        return (
            f"SLO scale 1 is {ttft:.0f} to {ttft_most:.0f} ms TTFT and {tpot:.1f} to "
            f"{tpot_most:.1f} ms TPOT (P95 on dedicated GPUs; the paper has 40 to 130 ms and 5.2 "
            "to 50.9 ms)"
        )


def prepared(
    lab: Lab,
    name: str,
    models: Sequence[tuple[str, int]],
    trace: Trace,
    extra: dict[str, Any] | None = None,
    *,
    tpot_part: float = 1.0,
) -> Cluster:
    """Run the trace on dedicated GPUs for its P95 latencies (§7.2) and write the setup with these
    as SLOs. Models without requests get the others' largest. tpot_part: the SLO scale of TPOT over
    that of TTFT, which `slo_scale` is."""
    base = {
        "gpus": {"type": "h100", "count": 2},
        "models": [
            {"name": f"m{i}", "shape": shape, "tp": tp} for i, (shape, tp) in enumerate(models)
        ],
        "engine": ENGINE,
        "patience": "60s",
        **(extra or {}),
    }
    whole = sum(tp for _, tp in models)
    alone = {**base, "gpus": {"type": "h100", "count": -(-whole // 8) * 8, "nodes": -(-whole // 8)}}
    path = lab.setup(f"{name}-dedicated", alone, trace)
    measured = lab.run([Trial(path, {"policy": "dedicated"})], f"{name}: dedicated GPUs")[0]
    if measured.summary is None:
        raise ConfigError(measured.problem)
    found = measured.summary.models
    slos = {n: (g.ttft_ms.p95 or 0.0, g.tpot_ms.p95 or 0.0) for n, g in found.items()}
    ttfts = sorted(t for t, _ in slos.values() if t)
    tpots = sorted(t for _, t in slos.values() if t)
    for model in base["models"]:
        ttft, tpot = slos.get(model["name"], (0.0, 0.0))
        ttft, tpot = ttft or ttfts[-1], tpot or tpots[-1]
        model["slo"] = {"ttft": f"{ttft:.2f}ms", "tpot": f"{tpot * tpot_part:.3f}ms"}
    config = lab.setup(name, base, trace)
    return Cluster(config, (ttfts[0], ttfts[-1]), (tpots[0], tpots[-1]))


def model_names(count: int) -> list[str]:
    return [f"m{i}" for i in range(count)]
