"""Differences between a GPU and a host device."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvcached import WeightKey
from prism.config.checks.memory_needs import GpuNeeds
from prism.config.schema.machines import is_gpu as is_gpu  # noqa: PLC0414 (for the adapter)
from prism.engines import cuda_facts, cuda_toolkit
from prism.messages.model_spec import ModelSpec

CUDA = "cuda"
PLATFORM_ENTRY_POINT = "prism_cuda"
TRITON = "triton"  # attention that needs no kernel library
# Types of KV other than the model's, and the attention backends that read them. SGLang's attention
# on latents reads them by Triton's kernels alone: others convert the whole pool, of which pages
# without KV cannot be read.
KV_ATTENTION = {
    "bf16": frozenset({TRITON}),
    "fp8_e4m3": frozenset({TRITON, "flashinfer", "fa3", "trtllm_mha"}),
    "fp8_e5m2": frozenset({TRITON, "flashinfer"}),
}
_ANY_CHOICE = "float8_e4m3fn"  # is read by all backends that SGLang chooses

# Import names of what SGLang's CUDA path needs in addition to the wheel: its kernels, and Triton.
_NEEDS = ("sgl_kernel", TRITON)

_ENVIRONMENT = {
    # torch asks NVML for GPUs, since CUDA must not be initialised before the fork.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # Disables SGLang's check for equal free memory of its GPUs: the ledger guarantees each rank's
    # share.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
    # Compiles in this thread: a pool of compilers for each engine would take the host's cores.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    # A progress bar for each captured graph would fill the log.
    "TQDM_DISABLE": "1",
}

log = logging.getLogger("prism.engine")


def index_of(device: str) -> int:
    """Returns N of "cuda:N"."""
    return int(device.partition(":")[2])


def lacks(device: str) -> str:
    """Returns what prevents this installation from serving on `device`, "" if nothing does."""
    missing = [name for name in _NEEDS if is_gpu(device) and find_spec(name) is None]
    if not missing:
        return ""
    return (
        f"{device} needs SGLang's CUDA kernels, and {', '.join(missing)} cannot be imported:"
        " run scripts/install --cuda, or use host:0"
    )


def needs(device: str) -> GpuNeeds:
    """Returns the planned memory, rounded up from an H200. `code_bytes` covers all kernels."""
    if not is_gpu(device):
        return GpuNeeds()
    return GpuNeeds(
        context_bytes=512 << 20,
        code_bytes=256 << 20,
        driver_bytes=192 << 20,
        ranks_bytes=256 << 20,
        torch_min_bytes=256 << 20,
    )


def weight_key(
    content: str, spec: ModelSpec, rank: int = 0, ranks: int = 1, device: str = "host:0"
) -> WeightKey:
    """Returns the key of parameters as SGLang's loaders fuse and shard them for its kernels
    ("native" on a CPU). Embedding models and other types of KV have separate keys, since their
    stored answers differ."""
    kernels = "cuda" if is_gpu(device) else "native"
    use = " embeddings" if spec.embedding else ""
    use += f" {spec.other_kv_dtype} KV" if spec.other_kv_dtype else ""
    return WeightKey(content, f"sglang {version('sglang')} {kernels}{use}", spec.dtype, rank, ranks)


def prepare(device: str) -> None:
    """Chooses the platform, and the CUDA toolkit that SGLang compiles its kernels with. REQUIRES:
    sglang is not imported yet."""
    if is_gpu(device):
        os.environ["SGLANG_PLATFORM"] = PLATFORM_ENTRY_POINT
        os.environ.update(_ENVIRONMENT)
        os.environ.update(cuda_toolkit.variables())


def importing(device: str) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which imports can query GPUs without initialising CUDA.

    If the driver cannot be queried in advance, imports may initialise CUDA.
    """
    if not is_gpu(device):
        return contextlib.nullcontext()
    try:
        facts = cuda_facts.ask()
    except cuda_facts.CudaFactsError as error:
        log.warning("cannot read the properties of the GPUs before the imports: %s", error)
        return contextlib.nullcontext()
    before_fork = importlib.import_module("prism.engines.sglang.platform.before_fork")
    answering: contextlib.AbstractContextManager[None] = before_fork.answering(
        facts, index_of(device)
    )
    return answering


def attention_backend(configured: str | None, model: ModelSpec) -> str | None:
    """Returns SGLang's name of the attention backend: the configured one, Triton without SGLang's
    attention kernels or for KV that some of them do not read, or None to let SGLang choose."""
    if configured is not None:
        return configured
    is_latent = model.latent_rope_dim is not None
    if model.other_kv_dtype and (is_latent or model.other_kv_dtype != _ANY_CHOICE):
        return TRITON
    return None if _has_module("sgl_kernel", "flash_attn") else TRITON


def _has_module(package: str, module: str) -> bool:
    """Returns whether a package has a module. Looks for files, since an import would load the
    kernels."""
    spec = find_spec(package)
    folders = (spec.submodule_search_locations if spec else None) or ()
    names = (f"{module}.py", module)
    return any((Path(folder) / name).exists() for folder in folders for name in names)


# --- in the engine's process -----------------------------------------------------------------


def adopt(client: Any, device: str, torch_cap_bytes: int) -> None:
    """Prepares the client before a model is built; see `kvcached.engines.gpu_share`. Does nothing
    on a host device."""
    if is_gpu(device):
        from kvcached.engines import gpu_share

        gpu_share.adopt(client, index_of(device), torch_cap_bytes)


def name_streams(client: Any, device: str, scheduler: Any) -> None:
    """Names the streams of a built scheduler. Does nothing on a host device."""
    if is_gpu(device):
        from kvcached.engines.sglang import gpu

        gpu.set_streams(client, index_of(device), scheduler)


def synchronize(device: str) -> None:
    """Waits until all submitted work is done. Does nothing on a host device."""
    if is_gpu(device):
        import torch

        torch.cuda.synchronize(index_of(device))


def return_cached(device: str) -> None:
    """Returns freed memory in torch's cache to the driver. Does nothing on a host device.
    REQUIRES: nothing runs, and garbage is collected."""
    if is_gpu(device):
        import torch

        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def torch_reserved_bytes(device: str) -> int:
    """Returns the device memory that torch's allocator holds, 0 on a host device."""
    if not is_gpu(device):
        return 0
    import torch

    return int(torch.cuda.memory_reserved(index_of(device)))
