"""Small simulated clusters, with costs that are easy to calculate."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from prism.policies.multiplexing.kv_blocks import KvShape
from prism_replay.trace import TraceRequest
from prism_sim.core.setup import (
    ClusterSetup,
    DegreeSetup,
    DeviceSetup,
    EngineSettings,
    KvNeed,
    ModelSetup,
)
from prism_sim.core.workload import Workload, workload
from prism_sim.costs.model import GpuUsage, PromptChunk

MIB = 1 << 20


class LinearCost:
    """A step takes host_s + token_s per prompt token, or decode_s + context_s per context token."""

    def __init__(
        self, token_s: float = 1e-4, decode_s: float = 0.01, context_s: float = 1e-6
    ) -> None:
        self.token_s, self.base_s, self.context_s = token_s, decode_s, context_s

    def step_s(self, chunks: Sequence[PromptChunk], batch: int, context_tokens: int) -> float:
        prefill_s = sum(chunk.tokens for chunk in chunks) * self.token_s
        return prefill_s + (self.decode_s(batch, context_tokens) if batch else 0.0)

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        return tokens * self.token_s

    def decode_s(self, batch: int, context_tokens: int) -> float:
        return self.base_s + self.context_s * context_tokens

    def decode_run_s(self, batch: int, context_tokens: int, steps: int) -> float:
        grown = batch * steps * (steps - 1) / 2
        return steps * self.decode_s(batch, context_tokens) + self.context_s * grown

    def decode_steps(self, batch: int, context_tokens: int, seconds: float, limit: int) -> int:
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.decode_run_s(batch, context_tokens, middle) <= seconds * (1 + 1e-12)
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def usage(self, chunks: Sequence[PromptChunk], batch: int, context_tokens: int) -> GpuUsage:
        return GpuUsage(0.9, 0.3) if chunks else GpuUsage(min(1.0, 0.05 + batch / 64), 0.8)


def parts(cost: LinearCost | None = None, kv: int = 1) -> dict[int, DegreeSetup]:
    """Returns setups at TP 1 and 2. kv: times 1 KiB a token; a quantum is 64 tokens of them."""
    cost = cost or LinearCost()
    return {
        1: DegreeSetup(cost, 4, 64 * 1024 * kv, KvShape(1, 2 * kv, 128, 2, 16)),
        2: DegreeSetup(cost, 4, 32 * 1024 * kv, KvShape(1, kv, 128, 2, 16)),
    }


def model(index: int, name: str, **changes: object) -> ModelSetup:
    """Makes a model of 16 MiB of weights and 1 KiB of KV per token, 64 tokens a quantum of 64
    KiB."""
    plain = ModelSetup(
        index=index,
        name=name,
        tp=1,
        weight_bytes=16 * MIB,
        token_bytes=1024,
        kv_floor_bytes=MIB,
        need=KvNeed(16),
        slo_ttft_s=1.0,
        slo_tpot_s=0.1,
        parts=parts(),
        prefill_tokens_per_s=10_000.0,
    )
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def cluster(models: Sequence[ModelSetup], gpus: int = 1, **changes: object) -> ClusterSetup:
    """Makes a cluster of GPUs of 64 MiB, two a node."""
    devices = tuple(
        DeviceSetup(f"gpu:{i}", f"node{i // 2}", 64 * MIB, 32 * 1024, 4) for i in range(gpus)
    )
    plain = ClusterSetup(
        devices,
        tuple(models),
        engine=EngineSettings(max_running=16, prefill_chunk_tokens=512),
        patience_s=60.0,
    )
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def request(arrival_s: float, model: str, prompt: int = 100, output: int = 20) -> TraceRequest:
    return TraceRequest(
        timestamp=arrival_s * 1000, model=model, input_length=prompt, output_length=output
    )


def work(setup: ClusterSetup, requests: Sequence[TraceRequest]) -> Workload:
    ordered = sorted(requests, key=lambda r: r.timestamp)
    return workload(ordered, {m.name: m.index for m in setup.models}, 1.0, "test")
