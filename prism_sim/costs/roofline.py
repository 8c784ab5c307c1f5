"""Roofline costs from a model's shape and a GPU's rates, for combinations without measurements.

The dense part is bound by reading the weights once or by the multiplications. Of experts it reads
those that the tokens are expected to be routed to. Decode attention is bound by reading KV, prefill
attention by its multiplications; layers with a sliding window stop there, at the mean context of a
batch. A state is read once per request and step; the multiplications of recurrences are left out.
TP adds two all-reduces per layer. The embedding look-up is free; the output matrix is read in each
step.
"""

from __future__ import annotations

from prism.errors import ConfigError
from prism_sim.costs.gpus import GpuSpec
from prism_sim.costs.shapes import ModelShape
from prism_sim.costs.table import FAR_TOKENS, StepTable, linear_decode

# Numbers of tokens between which the reading of experts is nearly linear.
_EXPERT_TOKENS = tuple(float(2**i) for i in range(13))


def roofline(gpu: GpuSpec, model: ModelShape, tp: int = 1) -> StepTable:
    """Returns the roofline's table, without host time. Raises ConfigError for an invalid tp."""
    if tp < 1 or model.heads % tp:
        raise ConfigError(f"tp {tp}: {model.name} has {model.heads} heads; tp must divide them")
    bandwidth_bytes_s = gpu.bandwidth_bytes_s * gpu.bandwidth_efficiency
    flops_s = gpu.flops_s * gpu.compute_efficiency
    dense_flops_s = flops_s * (2 if model.weight_dtype_bytes == 1 else 1)
    active = sum(layer.active_parameters for layer in model.decoder.layers)
    token_s = 2 * active / tp / dense_flops_s

    def dense_s(tokens: float) -> float:
        read_s = _read_bytes(model, tokens) / tp / bandwidth_bytes_s
        return max(read_s, tokens * token_s) + _allreduce_s(gpu, model, tp, tokens)

    knee = max(2.0, _read_bytes(model, FAR_TOKENS) / tp / bandwidth_bytes_s / token_s)
    tokens = tuple(
        sorted({1.0, knee, FAR_TOKENS, *(_EXPERT_TOKENS if _has_experts(model) else ())})
    )
    flops = dict.fromkeys((None, *(layer.window_tokens for layer in model.decoder.layers)), 0)
    for layer in model.decoder.layers:
        flops[layer.window_tokens] += layer.pair_flops
    pair_s = {window: each / tp / flops_s for window, each in flops.items()}
    read_s = {w: each / bandwidth_bytes_s for w, each in model.read_token_bytes(tp).items()}
    state_bytes = model.kept_by_rank(tp).state_bytes() if model.state_bytes() else 0
    state_s = state_bytes / bandwidth_bytes_s
    windows = sorted(window for window in flops if window is not None)
    batches, contexts, decode_s = linear_decode(
        read_s[None], {window: read_s[window] for window in windows}, state_s
    )
    once: tuple[float, ...] = (1.0,) if state_s else ()
    return StepTable(
        gpu=gpu.name,
        model=model.name,
        tp=tp,
        source="roofline",
        dense_tokens=tokens,
        dense_s=tuple(map(dense_s, tokens)),
        pair_s=pair_s[None],
        window_pair_s=tuple((float(window), pair_s[window]) for window in windows),
        prefill_tokens=once,
        prefill_context=once,
        prefill_s=((state_s,),) if state_s else (),
        decode_batch=batches,
        decode_context=contexts,
        decode_s=decode_s,
    )


def _has_experts(model: ModelShape) -> bool:
    return any(layer.mlp.experts for layer in model.decoder.layers)


def _read_bytes(model: ModelShape, tokens: float) -> float:
    """Returns the size of the weights that a step of `tokens` reads. Excludes tables unless they
    are also the output matrix, and experts that no token is expected to be routed to."""
    decoder = model.decoder
    tables = decoder.table_parameters - (decoder.head_parameters if decoder.tied else 0)
    mixtures = [layer.mlp for layer in decoder.layers if layer.mlp.experts]
    idle: float = sum(
        mlp.experts * mlp.expert_parameters * (1 - mlp.experts_used / mlp.experts) ** tokens
        for mlp in mixtures
    )
    return (decoder.parameters - tables - idle) * model.weight_dtype_bytes


def _allreduce_s(gpu: GpuSpec, model: ModelShape, tp: int, tokens: float) -> float:
    """Returns the time of two ring all-reduces of the step's activations per layer."""
    if tp == 1:
        return 0.0
    moved_bytes = 2 * (tp - 1) / tp * tokens * model.decoder.hidden_size * model.dtype_bytes
    return 2 * model.layers * (gpu.allreduce_s + moved_bytes / gpu.peer_bytes_s)
