"""A stock SGLang server whose KV is kvcached's: what happens at its start and in each turn.

`start` puts three hooks into SGLang, of which the turns of its event loop are one.
"""

from __future__ import annotations

import os
import pkgutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import zmq
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_server_args

from kvcached import KVCache, Layout, RankKV
from kvcached.engines.settings import Settings
from kvcached.engines.sglang import gpu
from kvcached.engines.sglang.allocator import KvcachedAllocator
from kvcached.engines.sglang.kv_pool import pool_bytes
from kvcached.engines.sglang.memory import Ids, active_memory
from kvcached.engines.sglang.radix_pages import RadixPages
from kvcached.engines.sglang.retraction import make_way
from kvcached.engines.stake import Stake, weights_bytes

_NAP_S = 0.002

Hook = tuple[Callable[..., Any], HookType]


def start(memory: ServerMemory | None, model: torch.nn.Module) -> ServerMemory:
    """In the scheduler's process, once its model is loaded. `memory`: the one that has leased what
    the model takes. Raises what `Stake` raises."""
    if memory is None:
        memory = ServerMemory()
        memory.stake.lease_static(weights_bytes(model))
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    configurator = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
    hooks: dict[str, Hook] = {
        f"{configurator}._profile_available_bytes": (pool_bytes, HookType.REPLACE),
        f"{scheduler}.get_next_batch_to_run": (take_turn, HookType.AROUND),
        f"{scheduler}.update_running_batch": (make_way, HookType.BEFORE),
    }
    install_hooks(hooks)
    return memory


class ServerMemory:
    """The server's KV memory (`PoolMemory`), and what it does between two steps."""

    def __init__(self) -> None:
        """Raises what `Settings.from_environment` and `Stake` raise."""
        arguments = get_server_args()
        model = Path(arguments.served_model_name or arguments.model_path).name
        settings = Settings.from_environment(os.environ)
        self.stake = Stake(settings, f"{model}:{arguments.port}")
        self._kv: KVCache | None = None
        self._context_tokens = 0
        self._joined = False

    # --- as SGLang's pool and allocator see it ---------------------------------------------

    def pool_bytes(self, context_tokens: int) -> int:
        self._context_tokens = context_tokens
        return self.stake.device.capacity_bytes

    def kv_cache(self, layout: Layout, num_tokens: int) -> KVCache:
        if self._kv is not None:
            raise NotImplementedError("a model with several KV pools is not served on kvcached")
        request_tokens = min(self._context_tokens, num_tokens)
        self._kv = self.stake.alloc_kvcache(layout, num_tokens, request_tokens)
        return self._kv

    def rank_kv(self) -> RankKV:
        return RankKV(self.kv, bool)

    def least(self, value: int) -> int:
        return value

    def lacks(self, num_tokens: int) -> None:
        self.stake.ask_for(num_tokens * self.kv.layout.token_bytes)

    def find_room(self, num_blocks: int) -> Ids | None:
        return self.stake.find_room(self.kv, num_blocks)

    @property
    def kv(self) -> KVCache:
        """Raises RuntimeError before SGLang has laid out its pool."""
        if self._kv is None:
            raise RuntimeError("SGLang has laid out no pool yet")
        return self._kv

    # --- between two steps -----------------------------------------------------------------

    def join(self, scheduler: Any) -> None:
        """Before the first step: everything is built, and what others ask for wakes the loop."""
        if self._joined:
            return
        allocator = scheduler.token_to_kv_pool_allocator
        if not isinstance(allocator, KvcachedAllocator):
            raise NotImplementedError(
                f"SGLang chose {type(allocator).__name__} for this model, which is not on kvcached"
            )
        if scheduler.device == "cuda":
            gpu.name_streams(self.stake.client, scheduler.tp_worker.gpu_id, scheduler)
        if scheduler.idle_sleeper is not None:
            scheduler.idle_sleeper.poller.register(self.stake.client.fileno(), zmq.POLLIN)
        self._joined = True

    def answer_requests(self, scheduler: Any) -> None:
        """Gives others what they ask for, and says what else it could do without."""
        tree, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
        cache = RadixPages(tree, allocator)
        self.stake.client.answer_requests(lambda size: self.kv.shrink(size, cache))
        self.stake.client.publish_evictable(cache.evictable_bytes_max(self.kv))

    def rest(self, scheduler: Any) -> None:
        """There was nothing to compute. Spare pages go; what waits for room leaves the CPU to
        those who make it."""
        if scheduler.is_fully_idle():
            self.kv.trim()
        elif not scheduler.last_batch:
            time.sleep(_NAP_S)


# --- the hooks -------------------------------------------------------------------------------


def install_hooks(hooks: Mapping[str, Hook]) -> None:
    """By dotted path. Raises RuntimeError where SGLang has not taken one, which it only logs."""
    for target, (hook, kind) in hooks.items():
        HookRegistry.register(target, hook, kind)
    HookRegistry.apply_hooks()
    for target in hooks:
        if not hasattr(pkgutil.resolve_name(target), "__wrapped__"):
            raise RuntimeError(f"SGLang did not take the hook of {target}; its log says why")


def take_turn(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the planning of a step: others' requests first; blocks that the step does not use
    go back after it."""
    memory, allocator = _server_memory(), scheduler.token_to_kv_pool_allocator
    memory.join(scheduler)
    memory.answer_requests(scheduler)
    # Memory may have come free on the device without one of this engine's requests ending, which
    # is all that SGLang itself waits for.
    scheduler.running_batch.batch_is_full = False
    plan = original(scheduler, *args, **kwargs)
    allocator.return_held_blocks()
    if plan.batch_to_run is None:
        memory.rest(scheduler)
    return plan


def _server_memory() -> ServerMemory:
    return cast(ServerMemory, active_memory())
