"""Stock SGLang server whose KV is in kvcached: its start, and the work around each step.

`start` installs three hooks in SGLang, one of them around each step of its event loop. With several
ranks each rank's process does the same, and `rank_votes` keeps them in step.
"""

from __future__ import annotations

import os
import pkgutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import zmq
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_device, get_parallel, get_server_args

from kvcached import KVCache, KVLayout, RankKV
from kvcached.engines.device_share import DeviceShare, weights_bytes
from kvcached.engines.settings import Settings
from kvcached.engines.sglang import gpu, rank_votes
from kvcached.engines.sglang.allocator import KvcachedAllocator
from kvcached.engines.sglang.hybrid import install
from kvcached.engines.sglang.hybrid.windows import KvcachedWindowAllocator
from kvcached.engines.sglang.kv_pool import pool_bytes
from kvcached.engines.sglang.memory import Ids, Pool, active_memory
from kvcached.engines.sglang.radix_pages import RadixPages
from kvcached.engines.sglang.retraction import retract_chunked_request
from kvcached.errors import InvalidArgumentError
from kvcached.tools.sizes import format_size

_IDLE_SLEEP_S = 0.002

Hook = tuple[Callable[..., Any], HookType]


def start(memory: ServerMemory | None, model: torch.nn.Module) -> ServerMemory:
    """Installs the adapter in the scheduler's process, once its model is loaded.

    `memory` is the one that has already leased the model's memory, if any. Raises the errors of
    `DeviceShare`.
    """
    if memory is None:
        memory = ServerMemory()
        memory.share.lease_static(weights_bytes(model))
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    configurator = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
    hooks: dict[str, Hook] = {
        f"{configurator}._profile_available_bytes": (pool_bytes, HookType.REPLACE),
        f"{scheduler}.get_next_batch_to_run": (plan_step, HookType.AROUND),
        f"{scheduler}.update_running_batch": (retract_chunked_request, HookType.BEFORE),
    }
    install_hooks(hooks)
    install.install()
    return memory


class ServerMemory:
    """The server's KV memory (`PoolMemory`), and its work between two steps."""

    def __init__(self) -> None:
        """Opens the rank's device. Raises the errors of `Settings.from_environment` and
        `DeviceShare`."""
        arguments = get_server_args()
        model = Path(arguments.served_model_name or arguments.model_path).name
        offset = get_parallel().tp_rank * get_device().gpu_id_step
        settings = Settings.from_environment(os.environ).of_device(offset)
        self.share = DeviceShare(settings, f"{model}:{arguments.port}")
        self._pools: dict[Pool, KVCache] = {}
        self._request_tokens: dict[Pool, int] = {"full": 0, "window": 0, "state": 1}
        self._waking: rank_votes.Waking | None = None  # with several ranks
        self._attached = False

    # --- PoolMemory ------------------------------------------------------------------------

    def pool_bytes(self, context_tokens: int, window_tokens: int) -> int:
        self._request_tokens["full"] = context_tokens
        self._request_tokens["window"] = min(context_tokens, window_tokens)
        page_bytes = self.share.device.page_bytes
        if self.least(page_bytes) != rank_votes.most(page_bytes):
            raise InvalidArgumentError(
                f"{self.share.device.name} has pages of {format_size(page_bytes)}, and the device "
                "of another rank has others: set KVCACHED_PAGE before the devices' first engines"
            )
        return self.least(self.share.device.capacity_bytes)

    def kv_cache(self, layout: KVLayout, num_tokens: int, pool: Pool = "full") -> KVCache:
        if pool in self._pools:
            raise NotImplementedError(
                f"a model with two KV pools for {pool} layers is not supported on kvcached"
            )
        request_tokens = min(self._request_tokens[pool], num_tokens)
        kv = self._pools[pool] = self.share.alloc_kvcache(layout, num_tokens, request_tokens)
        return kv

    def rank_kv(self, kv: KVCache) -> RankKV:
        return RankKV(kv, rank_votes.all_true)

    def least(self, value: int) -> int:
        return rank_votes.least(value)

    def report_shortage(self, num_tokens: int) -> None:
        self.share.ask_for(num_tokens * self.kv.layout.token_bytes)

    def find_room(self, kv: KVCache, num_blocks: int) -> Ids | None:
        return self.rank_kv(kv).agree(self.share.find_room(kv, num_blocks))

    @property
    def kv(self) -> KVCache:
        """KV of the layers without a window. Raises RuntimeError before SGLang has laid out its
        pool."""
        if "full" not in self._pools:
            raise RuntimeError("SGLang has not laid out its pool yet")
        return self._pools["full"]

    # --- between two steps -----------------------------------------------------------------

    def attach(self, scheduler: Any) -> None:
        """Connects the scheduler before its first step. Requests of other engines wake its loop."""
        if self._attached:
            return
        allocator = scheduler.token_to_kv_pool_allocator
        if not isinstance(allocator, KvcachedAllocator | KvcachedWindowAllocator):
            raise NotImplementedError(
                f"SGLang chose {type(allocator).__name__} for this model, which does not use "
                "kvcached"
            )
        if scheduler.device == "cuda":
            gpu.set_streams(self.share.client, scheduler.tp_worker.gpu_id, scheduler)
        if scheduler.idle_sleeper is not None:
            scheduler.idle_sleeper.poller.register(self.share.client.fileno(), zmq.POLLIN)
        if get_parallel().tp_size > 1:
            self._waking = rank_votes.Waking(self.share.client)
            if scheduler.idle_sleeper is not None and self._waking.socket is not None:
                scheduler.idle_sleeper.poller.register(self._waking.socket, zmq.POLLIN)
        self._attached = True

    def answer_requests(self, scheduler: Any) -> None:
        """Answers other engines' requests, and publishes the bytes that could be evicted."""
        tree, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
        cache = RadixPages(tree, allocator)
        if self._waking is None:
            self.share.client.answer_requests(lambda size: self.kv.shrink(size, cache))
        else:
            evict = partial(allocator.evict_cache, tree)
            self._waking.answer_together(self._pools.values(), self.rank_kv(self.kv), evict)
        self.share.client.publish_evictable(cache.evictable_bytes_max(self.kv))

    def handle_idle_step(self, scheduler: Any) -> None:
        """Handles a step without work.

        An idle engine returns spare pages. One whose requests wait for room sleeps, which leaves
        the CPU to the engines that free memory.
        """
        if scheduler.is_fully_idle():
            for kv in self._pools.values():
                kv.trim()
        elif not scheduler.last_batch:
            time.sleep(_IDLE_SLEEP_S)


# --- the hooks -------------------------------------------------------------------------------


def install_hooks(hooks: Mapping[str, Hook]) -> None:
    """Installs hooks by dotted path.

    Raises RuntimeError if SGLang did not install one, which SGLang only logs.
    """
    for target, (hook, kind) in hooks.items():
        HookRegistry.register(target, hook, kind)
    HookRegistry.apply_hooks()
    for target in hooks:
        if not hasattr(pkgutil.resolve_name(target), "__wrapped__"):
            raise RuntimeError(f"SGLang did not install the hook of {target}; see its log")


def plan_step(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Answers other engines before a step is planned, and returns unused blocks after it."""
    memory, allocator = _server_memory(), scheduler.token_to_kv_pool_allocator
    memory.attach(scheduler)
    memory.answer_requests(scheduler)
    # SGLang tries again only when one of its requests ends, but others may free memory as well.
    scheduler.running_batch.batch_is_full = False
    plan = original(scheduler, *args, **kwargs)
    allocator.return_held_blocks()
    if plan.batch_to_run is None:
        memory.handle_idle_step(scheduler)
    return plan


def _server_memory() -> ServerMemory:
    return cast(ServerMemory, active_memory())
