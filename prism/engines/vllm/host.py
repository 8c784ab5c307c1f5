"""Builds vLLM for one model in this process, and tears it down completely.

Scheduler, worker and KV of vLLM are in the process that steps them. Its process globals (process
groups, caches of its environment) are cleared for the next model.
"""

from __future__ import annotations

import ctypes
import gc
from typing import Any

from vllm.distributed import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
from vllm.model_executor.models import registry
from vllm.v1.engine import core as engine_core
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from kvcached.engines.packed import replaced
from kvcached.engines.vllm.memory import use_memory
from kvcached.engines.vllm.plugin import WORKER
from prism.config.checks.kv_cache import AUTO, KV_NAMES
from prism.config.schema.cluster_config import EngineConfig
from prism.engines.vllm.capabilities import RENAMED
from prism.engines.vllm.loader import LOAD_FORMAT
from prism.engines.vllm.memory import EngineMemory
from prism.messages.engine import ActivateEngine

_SCHEDULER = "prism.engines.vllm.scheduler.PoolScheduler"
_libc = ctypes.CDLL(None)


def _inspect_here(model: Any) -> Any:
    """Inspects a model class in this process. vLLM would import it in a separate process, to keep
    CUDA out of this one."""
    return registry._ModelInfo.from_model_cls(model.load_model_cls())


registry._LazyRegisteredModel.inspect_model_cls = _inspect_here
# A frozen model would never be collected. `gc.unfreeze` would also unfreeze the imports that the
# fork server has frozen, and each garbage collection would then traverse them.
engine_core.freeze_gc_heap = lambda: None


def arguments(order: ActivateEngine, memory: EngineMemory, engine: EngineConfig) -> dict[str, Any]:
    """Returns the arguments of vLLM's `EngineArgs`."""
    model, plan = order.model, memory.plan
    return {
        "model": model.path,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # a request has all its sampling parameters
        "dtype": model.dtype,
        "kv_cache_dtype": KV_NAMES.get(model.other_kv_dtype, AUTO),
        "hf_overrides": {"architectures": [RENAMED.get(model.architecture, model.architecture)]},
        "max_model_len": model.context_length,
        "block_size": model.block_tokens,
        "kv_cache_memory_bytes": plan.virtual_tokens * plan.layout.buffer_token_bytes[0],
        "max_num_seqs": order.max_running,
        # A step computes a token of each running request in addition to the prompts.
        "max_num_batched_tokens": engine.prefill_chunk_tokens + order.max_running,
        "max_logprobs": -1,
        # Machines with AMX would choose another kernel, with other blocks and packed weights.
        "attention_backend": None if model.latent_rope_dim is None else "CPU_MLA",
        "enforce_eager": True,
        "enable_prefix_caching": not model.state_layers,
        "async_scheduling": False,
        "distributed_executor_backend": "uni",
        "scheduler_cls": _SCHEDULER,
        "worker_cls": WORKER,
        "load_format": LOAD_FORMAT,
        "use_tqdm_on_load": False,
        "disable_log_stats": True,
    }


def build(order: ActivateEngine, memory: EngineMemory, engine: EngineConfig) -> EngineCore:
    """Loads the model and lays out its KV space in `memory`.

    Raises any error of vLLM for bad files; the caller must then call `tear_down(None)`.
    """
    use_memory(memory)
    config = EngineArgs(**arguments(order, memory, engine)).create_engine_config()
    return EngineCore(config, UniProcExecutor, log_stats=False)


def tear_down(core: EngineCore | None) -> None:
    """Removes vLLM from this process. Idempotent. REQUIRES: the caller drops its own references to
    `core`."""
    with replaced(gc, "unfreeze", lambda: None):  # see `freeze_gc_heap`
        if core is not None:
            core.shutdown()
        cleanup_dist_env_and_memory()
    _ROPE_DICT.clear()
    use_memory(None)


def release_heap() -> None:
    """Returns freed memory to the system: collects cycles, then trims glibc's heap."""
    gc.collect()
    _libc.malloc_trim(0)
