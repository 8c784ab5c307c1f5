"""vLLM's scheduler, with the room that kvcached has, and other engines to answer to."""

from __future__ import annotations

from itertools import islice
from typing import Any

from vllm.v1.core import kv_cache_coordinator
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequestType

from kvcached.engines.packed import replaced
from kvcached.engines.vllm.block_pool import ElasticBlockPool
from kvcached.engines.vllm.memory import active_memory


class ElasticScheduler(Scheduler):  # type: ignore[misc]
    """Raises RuntimeError where vLLM has laid out its KV cache elsewhere."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._memory = active_memory()
        with replaced(kv_cache_coordinator, "BlockPool", ElasticBlockPool):
            super().__init__(*args, **kwargs)
        pool = self.kv_cache_manager.block_pool
        if not isinstance(pool, ElasticBlockPool):
            raise NotImplementedError(f"vLLM chose {type(pool).__name__}, which is not on kvcached")
        self._pool = pool
        self._hold_what_is_asked_for()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Others are answered once a step, before it is planned."""
        self._answer_requests()
        plan = super().schedule(*args, **kwargs)
        self._pool.return_held_blocks()
        return plan

    def has_requests(self) -> bool:
        """vLLM asks several times a step; and before it sleeps, and when something has woken it:
        there are no steps then, and it is the time to answer others."""
        found = bool(super().has_requests())
        if not found:
            self._pool.return_held_blocks()
            self._answer_requests()
            self._pool.kv.trim()
        return found

    def _answer_requests(self) -> None:
        self._memory.answer_requests(self._pool.shrink)
        self._memory.publish_evictable(self._pool.evictable_bytes_max())

    def _hold_what_is_asked_for(self) -> None:
        """vLLM counts the blocks that a request needs, compares them with those that are free, and
        takes them."""
        coordinator = self.kv_cache_manager.coordinator
        count_blocks = coordinator.get_num_blocks_to_allocate

        def get_num_blocks_to_allocate(*args: Any, **kwargs: Any) -> int:
            count = int(count_blocks(*args, **kwargs))
            short = self._pool.hold(count) if count else 0  # most steps of a request need none
            if short and kwargs.get("apply_admission_cap", False):
                # All of a request that is not admitted yet. Running ones do not wait for it.
                self._pool.ask_for(short, max(0, self._waiting_blocks() - count))
            elif short:
                self._pool.find(short)
            return count

        coordinator.get_num_blocks_to_allocate = get_num_blocks_to_allocate

    def _waiting_blocks(self) -> int:
        """Of the requests that could run if there were room."""
        count, block_tokens = self.max_num_running_reqs - len(self.running), self.block_size
        return sum(-(-one.num_tokens // block_tokens) for one in islice(self.waiting, count))


def begin(core: Any) -> None:
    """Everything is built, and the engine's loop is about to start. Raises RuntimeError."""
    if not isinstance(core.scheduler, ElasticScheduler):
        raise RuntimeError(f"vLLM chose {type(core.scheduler).__name__}, which is not on kvcached")
    wake = (EngineCoreRequestType.WAKEUP, None)
    active_memory().call_when_asked(lambda: core.input_queue.put_nowait(wake))
