"""Platforms of stock SGLang servers (`kvcached_plugins.sglang_platform` chooses one).

SGLang imports this module while it imports itself, so the methods import other SGLang modules.
"""

from __future__ import annotations

import logging
import os
from importlib.metadata import version
from typing import Any

from sglang.srt.platforms.cuda import CudaSRTPlatform

from kvcached.engines.sglang.contract import CONTRACT
from kvcached.engines.sglang.platform import KvcachedPlatform, NativeCpuPlatform, bind_threads

BLOCK_TOKENS = 16
STATES_MAX = 256

_OWN_LAYOUT = "it lays out SGLang's pools in a way that kvcached does not have"
# Argument -> its only supported value, and the reason.
_ONLY: dict[str, tuple[Any, str]] = {
    "pp_size": (1, "its stages plan batches at different times, and cannot agree on blocks"),
    "dp_size": (1, "start one server for each replica; they share the device"),
    "dcp_size": (1, "it divides the tokens of a block among ranks"),
    "nnodes": (1, "ranks agree on blocks on one machine only"),
    "speculative_algorithm": (
        None,
        "kvcached does not have a pool for a draft model's KV, and attention over NGRAM's trees "
        "needs a GPU, where it has not been run",
    ),
    "disaggregation_mode": (
        "null",
        "it sends KV from addresses that must have memory from the start to the end",
    ),
    "enable_hierarchical_cache": (
        False,
        "its copy in host memory has the size of the pool, which is as large as the device",
    ),
    "enable_lmcache": (False, "its copies of KV are not in the device's ledger"),
    "enable_hisparse": (False, _OWN_LAYOUT),
    "enable_unified_memory": (False, _OWN_LAYOUT),
    "enable_page_major_kv_layout": (False, _OWN_LAYOUT),
}
# Values of kv_cache_dtype without other buffers next to K and V, as FP4 and MXFP8 have for scales.
_KV_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")


class ServerPlatform:
    """First base of a platform, before `KvcachedPlatform`."""

    memory: Any

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Checks and completes the arguments.

        Raises NotImplementedError or ValueError for arguments that cannot be served, RuntimeError
        for a SGLang that does not fulfil the contract.
        """
        CONTRACT.check(version("sglang"), logging.getLogger(__name__).warning)
        for name, (value, reason) in _ONLY.items():
            if getattr(server_args, name) != value:
                raise NotImplementedError(
                    f"{name} {getattr(server_args, name)!r} is not supported on kvcached "
                    f"({reason}): leave it out, or unset KVCACHED_DEVICE"
                )
        if server_args.kv_cache_dtype not in _KV_DTYPES:
            raise NotImplementedError(
                f"kv_cache_dtype {server_args.kv_cache_dtype!r} is not supported on kvcached: "
                f"choose one of {', '.join(_KV_DTYPES)}"
            )
        server_args.sleep_on_idle = True  # an idle scheduler would otherwise spin on a core
        if server_args.page_size is None:
            server_args.page_size = BLOCK_TOKENS
        if server_args.page_size == 1:
            raise ValueError("page_size 1 is not supported on kvcached: leave it out")
        if _keeps_states(server_args):
            _complete_for_states(server_args)

    def post_load_model(self, model: Any) -> None:
        """Starts the adapter; called once, in the scheduler's process. Raises RuntimeError if
        SGLang has loaded the model without kvcached's plugin."""
        from kvcached.engines.sglang import server
        from kvcached.engines.sglang.hybrid import corrections

        corrections.require()
        self.memory = server.start(self.memory, model)


def _complete_for_states(server_args: Any) -> None:
    """Completes the arguments of a model with states. SGLang caches prefixes with their states only
    for blocks of one token."""
    server_args.disable_radix_cache = True
    if server_args.max_mamba_cache_size is None:  # addresses: states get memory when they are used
        server_args.max_mamba_cache_size = server_args.max_running_requests or STATES_MAX
    if server_args.dtype != "auto":
        os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", server_args.dtype)


def _keeps_states(server_args: Any) -> bool:
    """Returns whether the model keeps a state per sequence (Mamba, linear attention)."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(model_config_of(server_args)) is not None


class HostServer(ServerPlatform, NativeCpuPlatform):
    """Platform for KVCACHED_DEVICE=host:N: native code alone, on the CPU."""

    def get_device(self, device_id: int = 0) -> str:
        """Returns the string that SGLang uses as the default of --device."""
        return "cpu"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        super().apply_server_args_defaults(server_args)
        server_args.sampling_backend = "pytorch"
        server_args.disable_overlap_schedule = True  # nothing overlaps on a CPU
        bind_threads(server_args.tp_size)


class CudaServer(ServerPlatform, KvcachedPlatform, CudaSRTPlatform):  # type: ignore[misc]
    """Platform for KVCACHED_DEVICE=cuda:N: SGLang's own kernels and backends."""

    def apply_server_args_defaults(self, server_args: Any) -> None:
        if server_args.tp_size != 1:
            raise NotImplementedError(
                f"tp_size {server_args.tp_size!r} is not supported on kvcached on a GPU (ranks "
                "have run on host devices only): leave it out, or unset KVCACHED_DEVICE"
            )
        super().apply_server_args_defaults(server_args)
        device = os.environ["KVCACHED_DEVICE"]
        index = int(device.partition(":")[2])
        if server_args.base_gpu_id not in (0, index):
            raise ValueError(
                f"base_gpu_id {server_args.base_gpu_id} is not the GPU of KVCACHED_DEVICE, "
                f"{device}: leave it out"
            )
        server_args.base_gpu_id = index

    def post_load_model(self, model: Any) -> None:
        """Starts the adapter. Raises RuntimeError if nothing was leased before."""
        if self.memory is None:
            raise RuntimeError("SGLang has not run kvcached's plugin: see its log")
        super().post_load_model(model)
