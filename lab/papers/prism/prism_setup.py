"""Setup of Prism's evaluation (§7.2): models, GPUs, SLOs from dedicated GPUs, policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lab.papers.study.lab import Lab
from lab.papers.study.trial import Trial
from lab.papers.study.tuning import AS_SHIPPED, RULE, Tuned
from prism.errors import ConfigError
from prism_replay.trace import Trace

E2E_MODELS = (
    *("Llama-3.1-8B", "Llama-3.2-3B", "Llama-3.2-1B", "Llama-3.1-8B"),
    *("Llama-3.1-8B", "Llama-3.2-1B", "Llama-3.2-1B", "Llama-3.2-1B"),
)
"""The eight models of the prototype's end-to-end experiment, the most popular first."""

ENGINE: dict[str, Any] = {"host": "4.5ms", "request": "12ms", "max_running": 2048}
"""Engine settings. The host time of each step and the time before a request is in its queue are
fitted to measured rows (`prism_calibration`). max_running: by default, SGLang limits running
requests only by memory up to 2048."""

SMALL = ("Llama-3.2-1B", "Llama-3.2-3B", "Qwen2.5-1.5B", "Qwen3-1.7B")
MEDIUM = ("Llama-3.1-8B", "Qwen2.5-7B", "Qwen3-8B", "Qwen3-4B")
LARGE = ("Qwen2.5-14B", "Qwen3-14B", "Qwen2.5-14B")
WIDE = (("Qwen2.5-32B", 4), ("Qwen2.5-32B", 4), ("Llama-3.1-70B", 4), ("Llama-3.3-70B-Instruct", 8))

GIVEN_AHEAD = (
    " Placement searches know the rates and lengths of the whole trace, which a live system does "
    "not, and simulate up to 600 of its requests. Prism knows nothing in advance. `prism` is the "
    "paper's Algorithm 1 with two additional rules: a model moves for balance only off a device on "
    "which several models run and requests wait, or with less than a quarter of its memory free, "
    "and only to a device with enough free memory."
)
FAIR = (
    "Every policy runs with the shipped settings at every point. Only the studies that rank "
    "systems (Table 1, Figures 7 and 12) tune them." + GIVEN_AHEAD
)
FAIR_TUNED = RULE + GIVEN_AHEAD


def eighteen() -> list[tuple[str, int]]:
    """Returns (shape, TP) of 18 models of 1B to 8B with mixed sizes over the ranks (§7.3)."""
    return [(MEDIUM[i // 3 % 4] if i % 3 == 0 else SMALL[i % 4], 1) for i in range(18)]


def fifty_eight() -> list[tuple[str, int]]:
    """Returns (shape, TP) of the models of Table 4, with the larger ones spread over the ranks.

    43 are of 1B-3B, 8 of 4B-8B, 3 of 9B-30B and 4 of 31B-70B.
    """
    small = [(SMALL[i % 4], 1) for i in range(43)]
    others = [(MEDIUM[i % 4], 1) for i in range(8)] + [(name, 1) for name in LARGE] + list(WIDE)
    stride = 58 / len(others)
    found = list(small)
    for number, model in enumerate(others):
        found.insert(round(number * stride), model)
    return found


@dataclass(frozen=True)
class Cluster:
    """Prepared experiment. SLO scale 1 is the P95 latency on dedicated GPUs."""

    config: str
    """Path of the YAML."""
    slo_ttft_ms: tuple[float, float]
    """Smallest and largest SLO of a model."""
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
    """Measures P95 latencies on dedicated GPUs (§7.2) and writes the setup with these as SLOs.

    Models without requests get the largest SLOs of the others.

    Args:
        tpot_part: SLO scale of TPOT over that of TTFT, which is `slo_scale`.
    """
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
    dedicated = {
        **base,
        "gpus": {"type": "h100", "count": -(-whole // 8) * 8, "nodes": -(-whole // 8)},
    }
    path = lab.setup(f"{name}-dedicated", dedicated, trace)
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
