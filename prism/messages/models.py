"""The model that messages are about."""

from __future__ import annotations

from prism.messages import Wire


class ModelSpec(Wire, frozen=True):
    """What every process needs to know of a model; built once from the YAML and its files.

    Sizes are those of the whole model, also if it is spread over several devices.
    """

    name: str
    path: str
    architecture: str
    dtype: str
    kv_dtype: str
    context_length: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    weight_bytes: int  # resident, in `dtype`
    # KV of one token over all layers, K and V, in `kv_dtype`, with the gap that the arrangement
    # leaves.
    token_bytes: int
    slo_ttft_s: float
    slo_tpot_s: float
    slo_least_ttft_s: float = 0.0  # the tightest that a request may ask for
    slo_least_tpot_s: float = 0.0
    never_evict: bool = False
    pinned_device: str | None = None
    static_share: float | None = None
    kv_arrangement: str = "per_layer"  # a name of kvcached's
    tp: int = 1  # devices that it is spread over (tensor parallel)
    # Of its answers: a name of the engine's, "auto" or "none".
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    adapter: str = ""  # of its engines; empty: the cluster's
    block_tokens: int = 16  # of a KV block
    replicas_min: int = 1  # copies that stay up
    replicas_max: int = 1
