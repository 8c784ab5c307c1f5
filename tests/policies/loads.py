"""Models, devices and step times for tests of placement searches."""

from __future__ import annotations

from random import Random
from typing import Any

from prism.policies.placement import DeviceSpecView, ModelSpecView, Problem, StepTimes

GB = 10**9
WEIGHT_GB = {"7b": 14, "13b": 26, "30b": 60, "65b": 130}
LAYER_KV_BYTES = {"7b": 524_288, "13b": 819_200, "30b": 1_597_440, "65b": 2_621_440}


def spec(name: str, size: str = "7b", rate: float = 1.0, **more: Any) -> ModelSpecView:
    """Returns a LLaMA of that size under ShareGPT's mean lengths (MuxServe §2.1)."""
    defaults = {
        "prompt_tokens": 161.0,
        "output_tokens": 338.0,
        "tp_degrees": (1, 2, 4, 8),
        "token_bytes": LAYER_KV_BYTES[size],
        "kv_floor_bytes": LAYER_KV_BYTES[size] * 2048,
    }
    weight_bytes = WEIGHT_GB[size] * GB
    return ModelSpecView(name, weight_bytes=weight_bytes, rate_rps=rate, **{**defaults, **more})


def devices(count: int, per_node: int = 8, gb: int = 72) -> tuple[DeviceSpecView, ...]:
    return tuple(
        DeviceSpecView(f"g{i:02}", gb * GB, node=f"n{i // per_node}") for i in range(count)
    )


def times(models: tuple[ModelSpecView, ...]) -> StepTimes:
    """Returns step times of an A100 roofline: compute, bandwidth and a cost of each TP hop."""
    weights = {m.name: m.weight_bytes for m in models}
    kv = {m.name: m.token_bytes for m in models}

    def prefill_s(name: str, tp: int, batch: int, tokens: float, sm_share: float) -> float:
        flops = weights[name] * tokens * batch  # 2 x parameters of 2 bytes each
        return 0.004 + 1e-3 * (tp - 1) + flops / (150e12 * tp * sm_share)

    def decode_s(name: str, tp: int, batch: int, tokens: float, sm_share: float) -> float:
        # Decoding needs few SMs: from 40 % of them on it has all the bandwidth (MuxServe figure 3).
        bandwidth = 1.6e12 * tp * min(1.0, sm_share / 0.4)
        return 0.003 + 2e-4 * (tp - 1) + (weights[name] + kv[name] * tokens * batch) / bandwidth

    return StepTimes(prefill_s, decode_s)


def problem(models: list[ModelSpecView], gpus: int, **more: Any) -> Problem:
    frozen = tuple(models)
    return Problem(frozen, devices(gpus, **more), times(frozen))


def random_models(random: Random, count: int) -> list[ModelSpecView]:
    sizes = random.choices(["7b", "13b", "30b"], weights=(4, 2, 1), k=count)
    return [
        spec(f"m{i}", size, rate=round(random.choice([0.3, 1, 3, 8]) * random.uniform(0.7, 1.4), 2))
        for i, size in enumerate(sizes)
    ]
