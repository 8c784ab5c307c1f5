"""KV memory of the fake engine: real blocks of kvcached, written, checked and cached.

A token's KV is a number computed from its id, in K and V of every layer. If another number is read
back than was written, the page was given to another client while it was in use.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvcached
from prism.config.checks.memory_needs import layout_of as arranged_layout_of
from prism.config.schema.units import format_size
from prism.engines.core import EngineContext
from prism.engines.fake.cpu_view import cpu_address
from prism.engines.fake.prefix_cache import BlockCache
from prism.engines.kv_moves.kv_file import Rows
from prism.engines.kv_moves.moves import Ids, KVMoves
from prism.engines.room import make_room
from prism.engines.timeline import Timeline
from prism.errors import ActivationError, EngineError
from prism.messages.engine import Activated, ActivateEngine
from prism.messages.model_spec import ModelSpec

BLOCK_TOKENS = 16
RESERVED_BLOCKS = 1
STORED_AS = {"float32": "float32", "float16": "float16", "bfloat16": "float16"}
EVICT_BATCH_BLOCKS = 64
PUBLISH_S = 0.1
_DLPACK_CPU = 1


class CorruptKVError(EngineError):
    """KV of a live token was overwritten, so a page had two owners."""


def layout_of(model: ModelSpec) -> kvcached.KVLayout:
    """Returns the KV layout of a model. Raises ActivationError for a dtype that numpy lacks."""
    if model.kv_dtype not in STORED_AS:
        raise ActivationError(f"the fake engine does not support KV of type {model.kv_dtype}")
    return replace(arranged_layout_of(model), dtype=STORED_AS[model.kv_dtype])


def reserve_bytes(layout: kvcached.KVLayout, page_bytes: int, context_tokens: int) -> int:
    """Returns the maximum KV of one request of full context. With all others retracted, its blocks
    and the reserved one fill every mapped slab but the last."""
    tokens = context_tokens + (1 + RESERVED_BLOCKS) * BLOCK_TOKENS
    slabs = -(-tokens // layout.slab_tokens(page_bytes))
    return slabs * layout.quantum_bytes(page_bytes)


class FakeMemory:
    """Memory of one active model. `free` returns all of it.

    The constructor raises ActivationError if the ledger has no room; nothing stays reserved then.
    """

    def __init__(
        self,
        client: kvcached.Client,
        device: kvcached.Device,
        context: EngineContext,
        order: ActivateEngine,
        timeline: Timeline,
        *,
        share_bytes: int,
    ) -> None:
        self._client = client
        usage = device.usage()
        layout = layout_of(order.model)
        self.embedding = order.model.embedding
        self._leases: list[kvcached.StaticLease] = []
        self.static_bytes = order.model.weight_bytes + share_bytes
        self.reserve_bytes = reserve_bytes(layout, usage.page_bytes, order.model.context_length)
        self._check_limit(order)
        try:
            timeline.enter("shrink")
            need_bytes = self.static_bytes + self.reserve_bytes
            make_room(client, device, need_bytes, f"activation of {order.model.name}")
            timeline.enter("reserve")
            self._reserve(order, share_bytes)
            tokens = max(usage.capacity_bytes // layout.token_bytes, order.model.context_length)
            self.kv = client.alloc_kvcache(layout, tokens, reserved_blocks=RESERVED_BLOCKS)
            # Without a spare slab, a block at a slab's edge would map and unmap it at every step.
            self.kv.set_spare_pages(0, sum(layout.slab_pages(usage.page_bytes)))
        except kvcached.NoRoomError as error:
            self._release()
            raise self._no_room(device, order.model) from error
        self._ranks = kvcached.RankKV(self.kv, context.ranks.all_true)
        self._group = context.ranks
        self.moves = KVMoves(self.kv, context.ranks, context.config, _read, _write)
        self._quantum = (
            layout.quantum_bytes(usage.page_bytes),
            layout.slab_tokens(usage.page_bytes),
        )
        self._buffers = self._open_buffers()
        self.cache = BlockCache(BLOCK_TOKENS)
        self._published_s = float("-inf")

    def _reserve(self, order: ActivateEngine, share_bytes: int) -> None:
        self._leases.append(self._client.reserve_static(order.model.weight_bytes, "weights"))
        self._leases.append(self._client.reserve_static(share_bytes, "workspace"))
        self._client.set_min(self.reserve_bytes)
        self._client.set_limit(order.kv_limit_bytes)

    def release_weight_lease(self) -> None:
        """Releases the memory reserved for weights, which are then leased at their real size."""
        self._leases.pop(0).release()

    def _check_limit(self, order: ActivateEngine) -> None:
        limit_bytes = order.kv_limit_bytes
        if limit_bytes is not None and limit_bytes < self.reserve_bytes:
            raise ActivationError(
                f"{order.model.name}: its KV limit of {format_size(limit_bytes)} is below the "
                f"{format_size(self.reserve_bytes)} of one request of full context"
            )

    def _release(self) -> None:
        self._client.set_limit(None)
        self._client.set_min(0)
        while self._leases:
            self._leases.pop().release()

    def _no_room(self, device: kvcached.Device, model: ModelSpec) -> ActivationError:
        need_bytes = self.static_bytes + self.reserve_bytes
        missing_bytes = max(1, need_bytes - device.usage().free_bytes)
        need, missing = format_size(need_bytes), format_size(missing_bytes)
        text = f"{model.name} needs {need}, {missing} more than are free"
        return ActivationError(text, missing_bytes)

    def _open_buffers(self) -> list[NDArray[Any]]:
        parts = self.kv.layout.parts
        return [as_array(self.kv.buffer(part.layer, part.name)) for part in parts]

    def describe(self, order: ActivateEngine, max_running: int) -> Activated:
        return Activated(
            model=order.model.name,
            quantum_bytes=self._quantum[0],
            quantum_tokens=self._quantum[1],
            floor_bytes=self.kv.floor_bytes(),
            reserve_bytes=self.reserve_bytes,
            static_bytes=self.static_bytes,
            block_tokens=BLOCK_TOKENS,
            max_running=max_running,
        )

    def alloc(self, num_blocks: int) -> list[int] | None:
        """Allocates blocks, and evicts cached ones if necessary. Returns None without room."""
        while (ids := self._ranks.alloc_kv(num_blocks)) is None:
            evicted = self.cache.evict(max(num_blocks, EVICT_BATCH_BLOCKS))
            if not evicted:
                return None
            self._free(evicted)
        return [int(i) for i in ids]

    def give(self, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        """Returns a sequence's blocks to this memory; whole blocks stay in the prefix cache."""
        self._free(self.cache.give(token_ids, blocks))

    def take(self, token_ids: Sequence[int]) -> list[int]:
        """Returns cached blocks of a prefix of `token_ids`. At least the last token is left to
        compute."""
        blocks = self.cache.take(token_ids[:-1])
        self.check(token_ids[: len(blocks) * BLOCK_TOKENS], blocks)
        return blocks

    def write(self, parts: Iterable[tuple[Sequence[int], Sequence[int], range]]) -> None:
        """Writes KV of all sequences at once.

        Args:
            parts: for each sequence its token ids, its blocks, and the range of tokens to write.
        """
        slots: list[int] = []
        token_ids: list[int] = []
        for tokens, blocks, some in parts:
            slots += [blocks[i // BLOCK_TOKENS] * BLOCK_TOKENS + i % BLOCK_TOKENS for i in some]
            token_ids += tokens[some.start : some.stop]
        places, values = np.asarray(slots, dtype=np.int64), _values(token_ids)
        for buffer in self._buffers:
            buffer[places] = values

    def check(self, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        """Raises CorruptKVError when a token's KV is not what was written."""
        slots = self._slots(blocks, len(token_ids))
        values = _values(token_ids)
        for buffer in (self._buffers[0], self._buffers[-1]):
            if not np.array_equal(buffer[slots], np.broadcast_to(values, buffer[slots].shape)):
                raise CorruptKVError(f"KV in blocks {list(blocks)[:8]} is not what was written")

    def shrink(self, size_bytes: int | None) -> kvcached.Shrunk:
        """Frees memory: spare pages, then cached blocks, chosen page by page; with several ranks
        the least recently used blocks."""
        if self._group.size > 1:
            return self._ranks.shrink(size_bytes, self._evict_tokens)
        return self.kv.shrink(size_bytes, self)

    def _evict_tokens(self, tokens: int | None) -> int:
        count = self.cache.idle_blocks if tokens is None else -(-tokens // BLOCK_TOKENS)
        evicted = self.cache.evict(count)
        self._free(evicted)
        return len(evicted) * BLOCK_TOKENS

    def evictable(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Implements `kvcached.PrefixCache`. The order of use replaces the time of use."""
        blocks = np.fromiter(self.cache.idle(), dtype=np.int64)
        return blocks, np.arange(len(blocks))

    def evict(self, ids: NDArray[np.int64]) -> int:
        """Implements `kvcached.PrefixCache`. Blocks that follow an evicted one are not found until
        that block is computed again."""
        blocks = [int(block) for block in ids]
        self.cache.forget(blocks)
        self._free(blocks)
        return len(blocks) * BLOCK_TOKENS

    def figures(self, busy: bool) -> dict[str, int]:
        """Returns the memory's part of EngineStatus, and publishes the evictable bytes. It does so
        at most every PUBLISH_S while the engine is `busy`, since it examines each cached block."""
        evictable_blocks, now_s = self.cache.idle_blocks, time.monotonic()
        if not busy or now_s >= self._published_s + PUBLISH_S:
            self._published_s = now_s
            self._client.publish_evictable(self.kv.evictable_bytes(self))
        return {
            "available_tokens": (self.kv.available_blocks() + evictable_blocks) * BLOCK_TOKENS,
            "free_mapped_tokens": self.kv.free_mapped_blocks() * BLOCK_TOKENS,
            "evictable_tokens": evictable_blocks * BLOCK_TOKENS,
            "kv_mapped_bytes": self.kv.mapped_bytes(),
            "static_bytes": self.static_bytes,
        }

    def set_limit(self, limit_bytes: int | None) -> None:
        """Caps elastic memory, but never below the need of one full-context request."""
        if limit_bytes is not None:
            limit_bytes = max(limit_bytes, self.reserve_bytes)
        self._client.set_limit(limit_bytes)

    def free(self) -> None:
        self._client.publish_evictable(0)
        self._buffers.clear()
        self._client.free_kvcache(self.kv)
        self._release()

    def _free(self, blocks: Sequence[int]) -> None:
        if blocks:
            self.kv.free_kv(np.asarray(blocks, dtype=np.int64))

    def _slots(self, blocks: Sequence[int], tokens: int) -> NDArray[np.int64]:
        index = np.arange(tokens, dtype=np.int64)
        table = np.asarray(blocks, dtype=np.int64)
        return table[index // BLOCK_TOKENS] * BLOCK_TOKENS + index % BLOCK_TOKENS


def as_array(view: Any) -> NDArray[Any]:
    """Returns a numpy array on a view's memory. numpy does not accept GPU tensors, so the CPU must
    be able to access the memory at another address (`FakeOptions.cpu_reads_gpu`)."""
    if view.__dlpack_device__()[0] == _DLPACK_CPU:
        return np.from_dlpack(view)
    item = np.dtype(view.dtype).itemsize
    last = sum((n - 1) * step for n, step in zip(view.shape, view.strides, strict=True))
    raw = (ctypes.c_uint8 * ((last + 1) * item)).from_address(cpu_address(view))
    return np.ndarray(view.shape, view.dtype, raw, strides=[step * item for step in view.strides])


def _read(view: Any, slots: Ids) -> NDArray[Any]:
    rows: NDArray[Any] = as_array(view)[slots]
    return rows


def _write(view: Any, slots: Ids, rows: Rows) -> None:
    buffer = as_array(view)
    buffer[slots] = np.ascontiguousarray(rows).view(buffer.dtype).reshape(-1, *buffer.shape[1:])


def _values(token_ids: Sequence[int]) -> NDArray[np.int64]:
    """Returns one number per token, exact in float16; broadcasts to (tokens, heads, head_dim)."""
    return (np.asarray(token_ids, dtype=np.int64) % 1021 + 1)[:, None, None]
