"""vLLM's scheduler with kvcached's room, which answers other engines."""

from __future__ import annotations

from itertools import islice
from typing import Any

from vllm.v1.core import kv_cache_coordinator
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.kv_cache_interface import MambaSpec

from kvcached.engines.packed import replaced
from kvcached.engines.vllm.block_pool import ElasticBlockPool
from kvcached.engines.vllm.memory import active_memory


class ElasticScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler over an ElasticBlockPool.

    Raises RuntimeError if vLLM has laid out its KV cache elsewhere.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._memory = active_memory()
        with replaced(kv_cache_coordinator, "BlockPool", ElasticBlockPool):
            super().__init__(*args, **kwargs)
        pool = self.kv_cache_manager.block_pool
        if not isinstance(pool, ElasticBlockPool):
            raise NotImplementedError(
                f"vLLM chose {type(pool).__name__}, which does not use kvcached"
            )
        self._pool = pool
        self._hold_counted_blocks()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Plans a step, after answering other engines once."""
        self._answer_requests()
        plan = super().schedule(*args, **kwargs)
        self._pool.return_held_blocks()
        return plan

    def has_requests(self) -> bool:
        """Returns vLLM's answer. Without requests, answers other engines and returns spare pages.

        vLLM calls this several times a step, before it sleeps and after it is woken. There are no
        steps then, so other engines must be answered here.
        """
        found = bool(super().has_requests())
        if not found:
            self._pool.return_held_blocks()
            self._answer_requests()
            self._pool.kv.trim()
        return found

    def _answer_requests(self) -> None:
        self._memory.answer_requests(self._pool.shrink)
        self._memory.publish_evictable(self._pool.evictable_bytes_max())

    def _hold_counted_blocks(self) -> None:
        """Takes a request's blocks from kvcached when vLLM counts them.

        vLLM then compares the count with the free blocks, and allocates them.
        """
        coordinator = self.kv_cache_manager.coordinator
        count_blocks = coordinator.get_num_blocks_to_allocate

        def get_num_blocks_to_allocate(*args: Any, **kwargs: Any) -> int:
            count = int(count_blocks(*args, **kwargs))
            if count > self._pool.num_gpu_blocks:  # vLLM's way to leave a request for the next step
                return count
            short = self._pool.hold(count) if count else 0  # most steps of a request need none
            if short and kwargs.get("apply_admission_cap", False):
                # Asks for all blocks of a request that is not admitted. Running requests do not
                # wait for it.
                self._pool.ask_for(short, max(0, self._waiting_blocks() - count))
            elif short:
                self._find_room(count, short)
            return count

        coordinator.get_num_blocks_to_allocate = get_num_blocks_to_allocate

    def _find_room(self, count: int, short: int) -> None:
        """Takes the `short` missing ones of `count` blocks that a running request needs, if other
        engines give them."""
        self._pool.find(short)

    def _waiting_blocks(self) -> int:
        """Returns the blocks of the waiting requests that could run if there were room."""
        count = self.max_num_running_reqs - len(self.running)
        managers = self.kv_cache_manager.coordinator.single_type_managers
        return sum(
            self._blocks_of(manager, one.num_tokens)
            for one in islice(self.waiting, count)
            for manager in managers
        )

    def _blocks_of(self, manager: Any, num_tokens: int) -> int:
        """Returns the most blocks that a request holds in a group of layers."""
        spec, blocks = manager.kv_cache_spec, -(-num_tokens // manager.block_size)
        most = manager.max_admission_blocks_per_request
        if isinstance(spec, MambaSpec):
            most = spec.max_memory_usage_bytes(self.vllm_config) // spec.page_size_bytes
        return int(blocks if most is None else min(blocks, most))


class ElasticAsyncScheduler(ElasticScheduler, AsyncScheduler):  # type: ignore[misc]
    """The same, planning a step while the one before it runs, as vLLM does on a GPU."""


def start_answering(core: Any) -> None:
    """Starts answering other engines, once everything is built. Raises RuntimeError."""
    if not isinstance(core.scheduler, ElasticScheduler):
        raise RuntimeError(
            f"vLLM chose {type(core.scheduler).__name__}, which does not use kvcached"
        )
    wake = (EngineCoreRequestType.WAKEUP, None)
    active_memory().wake_on_requests(lambda: core.input_queue.put_nowait(wake))
