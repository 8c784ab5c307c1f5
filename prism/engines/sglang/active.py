"""Active model of an engine, from its activation to its deactivation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

import kvcached
from kvcached.engines.sglang.radix_pages import RadixPages
from prism.engines.kv_moves.moves import KVMoves
from prism.engines.sglang.decode_graphs import DecodeGraphs
from prism.engines.sglang.lora_adapters import Adapters
from prism.engines.sglang.memory import EngineMemory
from prism.engines.sglang.scheduling import image_inputs, moving, request_conversion
from prism.engines.sglang.scheduling.scheduler import InProcessScheduler
from prism.messages.engine import ActivateEngine
from prism.messages.requests import Request


@dataclass(slots=True)
class ActiveModel:
    """Active model: SGLang's scheduler for it, and its memory. Thread rule: the engine's thread."""

    order: ActivateEngine
    memory: EngineMemory
    scheduler: InProcessScheduler
    moves: KVMoves
    graphs: DecodeGraphs
    adapters: Adapters

    def submit(self, request: Request, rid: str) -> int:
        """Queues `request` as `rid`. Returns the number of its tokens that came with KV.

        Raises RequestError if it can never run.
        """
        if request.lora:
            self.adapters.require(request.lora)
        converted = request_conversion.converter(self.order.model)(
            request,
            rid,
            context_length=self.order.model.context_length,
            vocab_size=self.scheduler.model_config.vocab_size,
        )
        converted.mm_inputs = image_inputs.of_request(request, self.scheduler.model_config)
        self.scheduler.process_input_requests([converted])
        req = self.scheduler.find(rid) if request.resume else None
        if request.resume is None or req is None:
            return 0
        return moving.resume_request(self.scheduler, self.moves, req, request.resume)

    def export(self, rid: str, request: Request, targets: Sequence[str] | None) -> Request:
        """Stops `rid`, and returns its request with its progress. KV moves along only where one
        pool has all of it, and without images, whose digests are a part of the cache's keys."""
        req = self.scheduler.find(rid)
        targets = targets if self.order.model.is_plain and not request.images else None
        if req is not None:
            resume = moving.export_request(self.scheduler, self.moves, req, targets)
            request = msgspec.structs.replace(request, resume=resume)
        self.scheduler.cancel(rid)
        return request

    def shrink(self, size_bytes: int | None) -> kvcached.Shrunk:
        """Frees memory: spare pages, then blocks of the radix cache, chosen page by page; with
        several ranks the least recently used tokens."""
        tree, allocator = self.scheduler.tree_cache, self.scheduler.token_to_kv_pool_allocator
        for kv in self.memory.side.values():
            kv.trim()
        if self.memory.ranks.size > 1:
            return self.memory.rank_kv(self.memory.kv).shrink(
                size_bytes, partial(allocator.evict_cache, tree)
            )
        return self.memory.kv.shrink(size_bytes, self._prefixes())

    def evictable_bytes(self) -> int:
        """Returns an upper bound of the bytes that evictions of the radix cache could free."""
        return self._prefixes().evictable_bytes_max(self.memory.kv)

    def _prefixes(self) -> RadixPages:
        return RadixPages(self.scheduler.tree_cache, self.scheduler.token_to_kv_pool_allocator)

    def figures(self) -> dict[str, Any]:
        """Returns the model's part of EngineStatus."""
        scheduler = self.scheduler
        evictable = int(scheduler.tree_cache.evictable_size())
        waiting = [*scheduler.waiting_reqs(), *scheduler.compiling_reqs()]
        waiting += scheduler.paused.awaiting_prefill()
        attainable = scheduler.token_to_kv_pool_allocator.attainable_tokens()
        return {
            "model": self.order.model.name,
            "waiting": len(waiting),
            "available_tokens": attainable + evictable,
            "free_mapped_tokens": self.memory.idle_tokens(),
            "evictable_tokens": evictable,
            "pending_prefill_tokens": sum(scheduler.prefill_left(req) for req in waiting),
            "static_bytes": self.memory.static_bytes,
            "captures_s": tuple(self.graphs.captures_s),
        }
