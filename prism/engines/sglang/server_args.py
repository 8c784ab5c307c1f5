"""SGLang's arguments for one model in one engine process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang.srt.server_args import PortArgs, ServerArgs

from prism.config.checks.kv_cache import AUTO, KV_NAMES
from prism.config.checks.memory_needs import BLOCK_TOKENS
from prism.config.schema.cluster_config import EngineConfig
from prism.engines.model_memory import MemoryPlan
from prism.engines.sglang import lora_adapters
from prism.engines.sglang.loader import KvcachedLoader
from prism.engines.sglang.platform import gpu, supported_models, weight_formats
from prism.messages.engine import ActivateEngine
from prism.models.gguf.gguf_weights import GGUF, has_gguf

# SGLang rejects prompts of its context minus 6 tokens or more and ends requests one token early.
# With this many additional positions a request may fill the model's whole context. Positions above
# the model's own context are never computed: `requests.convert` rejects such requests.
CONTEXT_SLACK_TOKENS = 8


def build(
    order: ActivateEngine, plan: MemoryPlan, engine: EngineConfig, *, ranks: int, device: str
) -> ServerArgs:
    """Returns arguments that make SGLang deterministic and free of sockets, with one process per
    rank."""
    path = Path(order.model.path)
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    common = settings(order, plan, engine.prefill_chunk_tokens, ranks)
    common |= lora_adapters.settings(order.model.lora, device)
    if has_gguf(path):
        common["quantization"] = GGUF
    if config.get("model_type") in supported_models.IMAGES:
        keys = supported_models.image_overrides(config)
        common["json_model_override_args"] = json.dumps(keys)
    captures = not weight_formats.syncs(config)
    own = on_gpu(order, engine, captures=captures) if gpu.is_gpu(device) else on_host(config)
    return ServerArgs(**common, **own)


def on_host(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments for a CPU, whose attention has the names of several backends."""
    return {
        "device": "cpu",
        "disable_cuda_graph": True,
        "attention_backend": supported_models.host_attention(config),
        "sampling_backend": "pytorch",
    }


def on_gpu(order: ActivateEngine, engine: EngineConfig, *, captures: bool = True) -> dict[str, Any]:
    """Returns the arguments for a GPU: SGLang's own kernels and backends, except for sampling.

    Each request has its own seed, and FlashInfer's sampling does not support seeds. Graphs of
    decode steps are captured for every possible batch size (`decode_graphs.py`), none of prefills:
    SGLang would capture dozens at every activation.
    """
    arguments: dict[str, Any] = {
        "device": "cuda",
        "sampling_backend": "pytorch",
        "attention_backend": gpu.attention_backend(engine.attention_backend, order.model),
        "disable_prefill_cuda_graph": True,
    }
    decodes = order.model.embedding is None
    if engine.cuda_graphs == "off" or not (captures and decodes):
        return arguments | {"disable_decode_cuda_graph": True}
    # SGLang would unfreeze the objects that the fork server froze, and every later garbage
    # collection would traverse them.
    return arguments | {"cuda_graph_max_bs_decode": order.max_running, "enable_cudagraph_gc": True}


def settings(
    order: ActivateEngine, plan: MemoryPlan, prefill_chunk_tokens: int, ranks: int
) -> dict[str, Any]:
    """Returns the arguments for all devices."""
    spec = order.model
    return {
        "model_path": spec.path,
        "load_format": KvcachedLoader,
        "tp_size": ranks,
        "dtype": spec.dtype,
        "kv_cache_dtype": KV_NAMES.get(spec.other_kv_dtype, AUTO),
        "context_length": spec.context_length + CONTEXT_SLACK_TOKENS,
        "skip_tokenizer_init": True,
        "mm_enable_dp_encoder": ranks > 1 and spec.images is not None,
        "is_embedding": spec.embedding is not None,
        "page_size": BLOCK_TOKENS,
        "max_total_tokens": plan.pool_tokens,
        **_side_pools(order, plan),
        "max_running_requests": order.max_running,
        "chunked_prefill_size": _chunk_tokens(prefill_chunk_tokens),
        "max_prefill_tokens": max(prefill_chunk_tokens, spec.context_length),
        "disable_overlap_schedule": True,
        "disable_custom_all_reduce": True,
        "stream_interval": 1,
        "random_seed": 0,
        "log_level": "warning",
        "skip_server_warmup": True,
    }


def _side_pools(order: ActivateEngine, plan: MemoryPlan) -> dict[str, Any]:
    """Returns the arguments for pools of windows and states. States are not kept for other requests
    with the same beginning."""
    if "state" in plan.side:
        return {"max_mamba_cache_size": order.max_running, "disable_radix_cache": True}
    return {"swa_full_tokens_ratio": 1.0} if "window" in plan.side else {}


def ports() -> PortArgs:
    """Returns empty names of sockets, which are never opened."""
    return PortArgs(
        tokenizer_ipc_name="",
        scheduler_input_ipc_name="",
        detokenizer_ipc_name="",
        nccl_port=0,
        rpc_ipc_name="",
        metrics_ipc_name="",
        tokenizer_worker_ipc_name=None,
        decoupled_spec_ipc_config=None,
    )


def _chunk_tokens(tokens: int) -> int:
    """Returns the prefill chunk rounded to whole blocks, at least one, as SGLang requires."""
    return max(tokens // BLOCK_TOKENS, 1) * BLOCK_TOKENS
