"""Roofline costs from a model's shape and a GPU's rates, for combinations without measurements.

The dense part is bound by reading the weights once or by the multiplications. Decode attention is
bound by reading KV, prefill attention by its multiplications. TP adds two all-reduces per layer.
The embedding look-up is free; the output matrix is read in each step.
"""

from __future__ import annotations

from prism.errors import ConfigError
from prism_sim.costs.gpus import GpuSpec
from prism_sim.costs.shapes import ModelShape
from prism_sim.costs.table import FAR_TOKENS, StepTable, linear_decode


def roofline(gpu: GpuSpec, model: ModelShape, tp: int = 1) -> StepTable:
    """Returns the roofline's table, without host time. Raises ConfigError for an invalid tp."""
    if tp < 1 or model.heads % tp:
        raise ConfigError(f"tp {tp}: {model.name} has {model.heads} heads; tp must divide them")
    bandwidth_bytes_s = gpu.bandwidth_bytes_s * gpu.bandwidth_efficiency
    flops_s = gpu.flops_s * gpu.compute_efficiency
    dense_flops_s = flops_s * (2 if model.weight_dtype_bytes == 1 else 1)
    weights_s = _read_bytes(model) / tp / bandwidth_bytes_s
    token_s = 2 * model.layers * model.layer_parameters / tp / dense_flops_s
    knee = max(2.0, weights_s / token_s)
    tokens = (1.0, knee, FAR_TOKENS)
    pair_s = 4 * model.layers * model.heads * model.head_dim / tp / flops_s
    batches, contexts, decode_s = linear_decode(model.kv_token_bytes(tp) / bandwidth_bytes_s)
    return StepTable(
        gpu=gpu.name,
        model=model.name,
        tp=tp,
        source="roofline",
        dense_tokens=tokens,
        dense_s=tuple(
            max(weights_s, n * token_s) + _allreduce_s(gpu, model, tp, n) for n in tokens
        ),
        pair_s=pair_s,
        decode_batch=batches,
        decode_context=contexts,
        decode_s=decode_s,
    )


def _read_bytes(model: ModelShape) -> int:
    """Returns the size of the weights that a step reads. Excludes the embedding's table unless it
    is also the output matrix."""
    unread = model.positions + (0 if model.tied else model.vocab)
    return (model.parameters - unread * model.hidden) * model.weight_dtype_bytes


def _allreduce_s(gpu: GpuSpec, model: ModelShape, tp: int, tokens: float) -> float:
    """Returns the time of two ring all-reduces of the step's activations per layer."""
    if tp == 1:
        return 0.0
    moved_bytes = 2 * (tp - 1) / tp * tokens * model.hidden * model.kv_dtype_bytes
    return 2 * model.layers * (gpu.allreduce_s + moved_bytes / gpu.peer_bytes_s)
