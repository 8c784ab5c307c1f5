"""transformers' continuous batching with its paged cache in kvcached memory.

transformers builds its cache from names in its own modules. Within `elastic_batching` these names
refer to the classes here: the batch processor, which answers other clients between two steps, the
paged cache, its pool of sectors and its single tensor.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.continuous_batching import cache as paged
from transformers.generation.continuous_batching import continuous_api

from kvcached import Client, KVCache, NoRoomError
from kvcached.checks import checked, duration, instance_of, positive
from kvcached.engines.packed import replaced
from kvcached.engines.transformers import contract
from kvcached.engines.transformers.sectors import CachedPrefixes, ElasticPool
from kvcached.errors import ClosedError, DeviceGoneError, InvalidArgumentError
from kvcached.layouts import PackedLayout

_TRASH_SECTORS = 2  # transformers reads and writes padding in them


@checked(client=instance_of(Client), request_tokens=positive, wait_s=duration)
def elastic_batching(client: Client, request_tokens: int, *, wait_s: float = 10.0) -> Any:
    """Returns a context in which transformers' continuous batching has its KV on the client's
    device.

    This applies to `generate_batch`, and to managers that are made and started in it. One request
    of `request_tokens`, prompt and answer together, is guaranteed: it is the client's minimum while
    a cache lives. Raises NoRoomError in the model's thread if it does not fit, and RuntimeError at
    once for a transformers that does not fulfil the contract. A request that runs alone, is longer
    than that and does not fit asks other clients for up to `wait_s`. If that fails, the manager
    ends, as it does with transformers' own full cache.
    """
    contract.check(contract.CONTINUOUS)
    return _elastic_batching(_DeviceShare(client, request_tokens, wait_s))


@contextmanager
def _elastic_batching(share: _DeviceShare) -> Iterator[None]:
    with ExitStack() as stack:
        cache = functools.partial(_ElasticPagedCache, share)
        stack.enter_context(replaced(continuous_api, "PagedAttentionCache", cache))
        stack.enter_context(replaced(continuous_api, "ContinuousBatchProcessor", _Processor))
        yield


@dataclass(frozen=True)
class _DeviceShare:
    client: Client
    request_tokens: int
    wait_s: float

    def alloc(self, sector_bytes: int, num_sectors: int, request_sectors: int) -> KVCache:
        """Returns a KV space of sectors, with room for one request guaranteed."""
        layout = PackedLayout(
            dtype="int8",
            block_tokens=1,
            arrangement="block_interleaved",
            packed_token_bytes=sector_bytes,
        )
        client, before_bytes = self.client, self.client.usage().min_bytes
        need_bytes = layout.need_bytes(
            request_sectors, client.page_bytes, reserved_blocks=_TRASH_SECTORS
        )
        client.set_min(max(before_bytes, need_bytes))
        try:
            return client.alloc_kvcache(
                layout, num_sectors + _TRASH_SECTORS, reserved_blocks=_TRASH_SECTORS
            )
        except NoRoomError:
            client.set_min(before_bytes)
            raise


class _ElasticPagedCache(paged.PagedAttentionCache):  # type: ignore[misc]
    pool: ElasticPool
    cache_allocators: dict[str, Any]
    bytes_per_sector: int

    def __init__(self, share: _DeviceShare, config: Any, *args: Any, **kwargs: Any) -> None:
        """Builds the cache. Raises InvalidArgumentError for what is not supported, NoRoomError."""
        ranks = kwargs["distributed_helper"].tp_size
        if torch.device(kwargs["device"]).type != "cpu":
            raise InvalidArgumentError(
                "continuous batching on kvcached is supported on host devices alone: put the model "
                "on the CPU, or leave elastic_batching out"
            )
        if ranks != 1:
            raise InvalidArgumentError(
                f"continuous batching over {ranks} ranks is not supported on kvcached: use one"
            )
        self._share, self._kv = share, list[KVCache]()
        before_bytes = share.client.usage().min_bytes
        with (
            replaced(paged, "PagedAttentionMemoryHandler", self._sized),
            replaced(paged, "CachePool", self._make_pool),
        ):
            super().__init__(config, *args, **kwargs)
        self.prefixes = CachedPrefixes(self.pool, list(self.cache_allocators.values()))
        self._published_bytes = 0
        weakref.finalize(self, _close, share.client, self.pool.kv, before_bytes)

    def _sized(self, **kwargs: Any) -> Any:
        """Makes transformers' handler, which sizes the cache, reserve that many addresses."""
        handler = _handler(**kwargs)
        infer = handler.infer_max_batch_tokens_and_num_sectors
        sector_bytes = kwargs["bytes_per_sector"]

        def infer_and_alloc() -> tuple[int, int]:
            batch_tokens, num_sectors = infer()
            kv = self._share.alloc(sector_bytes, num_sectors, self._request_sectors())
            self._kv.append(kv)
            return batch_tokens, kv.num_blocks - _TRASH_SECTORS

        handler.infer_max_batch_tokens_and_num_sectors = infer_and_alloc
        return handler

    def _request_sectors(self) -> int:
        sectors = 0
        for one in self.cache_allocators.values():
            blocks = one.needs_new_blocks("", 0, self._share.request_tokens)
            sectors += -(-blocks * one.bytes_per_block // self.bytes_per_sector)
        return sectors

    def _make_pool(self, num_sectors: int, num_allocators: int) -> ElasticPool:
        return ElasticPool(self._kv[0], num_sectors, num_allocators)

    # --- sectors of a step -------------------------------------------------------------------

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        wanted = sum(
            one.needs_new_sectors(state.request_id, state.current_len(), request_len)
            for one in self.cache_allocators.values()
        )
        if dry_run:  # whether an empty cache could hold it
            return bool(wanted <= self.num_sectors)
        if not self.pool.hold(wanted) and not self._find(wanted, state.request_id):
            return False
        return bool(super().can_store_request_tokens(state, request_len))

    def _find(self, wanted: int, request_id: str) -> bool:
        """Holds `wanted` sectors for a request if no other request of this cache can free any."""
        users = {name for one in self.cache_allocators.values() for name in one.block_table}
        if users - {request_id} or self.pool.kv.missing_pages(wanted) is None:
            return False
        self.evict_cached_blocks()
        self.pool.try_to_free_sectors()
        return self.pool.hold(wanted, self._share.wait_s)

    def count_storable_requests(self, list_blocks_needed: list[dict[str, int]]) -> int:
        self.pool.hold_some(self._sectors_of(list_blocks_needed))
        return int(super().count_storable_requests(list_blocks_needed))

    def prepare_fork_request(self, src_state: Any, dst_req_ids: list[str], copies: Any) -> Any:
        name, length = src_state.request_id, src_state.current_len()
        one_child = {
            key: one.count_non_shareable_blocks(name, length)
            for key, one in self.cache_allocators.items()
        }
        self.pool.hold_some(self._sectors_of([one_child] * len(dst_req_ids)))
        return super().prepare_fork_request(src_state, dst_req_ids, copies)

    def _sectors_of(self, blocks: list[dict[str, int]]) -> int:
        """Returns an upper bound: free blocks in sectors that are in use are not subtracted."""
        return sum(
            -(-sum(one[name] for one in blocks) // allocator.blocks_per_sector)
            for name, allocator in self.cache_allocators.items()
        )

    def compute_free_capacity(self, relative: bool = True) -> int | float:
        """Returns the free part of what this cache has and could allocate now.

        Other clients use a part of the device.
        """
        kv = self.pool.kv
        used_bytes = kv.live_blocks() * self.bytes_per_sector
        room_bytes = kv.available_blocks() * self.bytes_per_sector
        free_bytes = int(super().compute_free_capacity(relative=False)) + room_bytes
        return free_bytes / max(1, used_bytes + room_bytes) if relative else free_bytes

    # --- between two steps -------------------------------------------------------------------

    def answer_requests(self) -> None:
        """Answers other clients' requests, and publishes the bytes that could be evicted."""
        kv, client = self.pool.kv, self._share.client
        client.answer_requests(lambda size: kv.shrink(size, self.prefixes))
        size_bytes = self.prefixes.bytes_max()
        if size_bytes != self._published_bytes:
            client.publish_evictable(size_bytes)
            self._published_bytes = size_bytes

    def handle_idle_step(self) -> None:
        """Returns unused memory when there is nothing to compute."""
        self.pool.try_to_free_sectors()
        self.pool.kv.trim()


_handler = paged.PagedAttentionMemoryHandler


class _Processor(continuous_api.ContinuousBatchProcessor):  # type: ignore[misc]
    """Batch processor that transformers' loop calls for every step, and ten times a second when
    idle.
    """

    cache: _ElasticPagedCache

    def prepare_next_batch(self) -> bool:
        self.cache.answer_requests()
        found = bool(super().prepare_next_batch())
        if not found:
            self.cache.handle_idle_step()
        return found


def _close(client: Client, kv: KVCache, min_bytes: int) -> None:
    with contextlib.suppress(ClosedError, DeviceGoneError):  # both may be closed before the cache
        client.free_kvcache(kv)
        client.set_min(min_bytes)
