"""Device memory of one engine process: KV, weights and the synthetic static share.

All of it is reserved in the ledger before any is used. `reserve_bytes` of KV are guaranteed to this
engine; KV pages above that are elastic.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import kvcached
from prism.config.checks.memory_needs import (
    PoolNeed,
    group_tokens,
    pools_of,
    side_need,
    state_tokens,
    step_tokens,
    whole_pages,
)
from prism.config.schema.units import format_size
from prism.engines.ranks.group import ALONE, RankGroup
from prism.engines.room import make_room
from prism.engines.timeline import Timeline
from prism.engines.weights.model_weights import ModelWeights
from prism.errors import ActivationError
from prism.messages.engine import ActivateEngine

log = logging.getLogger(__name__)

_PADDING_BLOCKS = 1
_DIFFERENCE_MAX = 0.01


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory that a model needs on a device with a given page size. KV without further words is
    that of the main pool."""

    layout: kvcached.KVLayout
    quantum_bytes: int
    slab_tokens: int
    slab_pages: int
    # KV of one request of the full context, in all pools.
    reserve_bytes: int
    weight_bytes: int
    share_bytes: int
    virtual_tokens: int
    # Pools in addition to the main one, of layers with windows or of states, by name.
    side: Mapping[str, PoolNeed] = field(default_factory=dict)
    side_tokens: Mapping[str, int] = field(default_factory=dict)  # their virtual tokens
    # Groups of layers with a window in the main pool, and the tokens of a request in each.
    window_groups: int = 0
    group_tokens: int = 0
    # Of a request's state, where it is in the main pool.
    state_tokens: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes that must be free on the device to activate the model."""
        return self.weight_bytes + self.share_bytes + self.reserve_bytes

    def kv_need(self) -> dict[str, Any]:
        """Returns fields of Activated: the granularity in which schedulers count KV, and what a
        request takes in side pools. The granularity is a slab, or a block where several pools grow
        by different slabs."""
        tokens = self.layout.block_tokens if self.side else self.slab_tokens
        quantum_bytes = self.quantum_bytes * tokens // self.slab_tokens
        of_side = side_need(self.layout, self.side)
        if self.window_groups:
            of_side = {"window_tokens": self.group_tokens, "window_share": self.window_groups}
        if self.state_tokens:
            of_side = {"state_tokens": self.state_tokens}
        return {"quantum_bytes": quantum_bytes, "quantum_tokens": tokens, **of_side}

    @property
    def pool_tokens(self) -> int:
        """Number of tokens that the engine can use: all but the padding block."""
        return self.virtual_tokens - _PADDING_BLOCKS * self.layout.block_tokens


def plan(
    order: ActivateEngine,
    *,
    capacity_bytes: int,
    page_bytes: int,
    static_bytes: int,
    chunk_tokens: int,
) -> MemoryPlan:
    """Returns the plan of `order.model` on a device; pure arithmetic. `static_bytes` is the
    engine's static share, `chunk_tokens` the size of a prefill step."""
    spec = order.model
    step = step_tokens(spec, chunk_tokens, order.max_running)
    main, *others = pools_of(spec, step)
    layout = main.layout
    slab_tokens = layout.slab_tokens(page_bytes)
    quantum = layout.quantum_bytes(page_bytes)
    virtual_tokens = max(capacity_bytes // quantum, main.slabs(page_bytes)) * slab_tokens
    return MemoryPlan(
        layout=layout,
        quantum_bytes=quantum,
        slab_tokens=slab_tokens,
        slab_pages=quantum // page_bytes,
        reserve_bytes=sum(pool.need_bytes(page_bytes) for pool in (main, *others)),
        weight_bytes=whole_pages(spec.weight_bytes, page_bytes),
        share_bytes=whole_pages(static_bytes, page_bytes),
        virtual_tokens=virtual_tokens,
        side={pool.name: pool for pool in others},
        side_tokens={"window": virtual_tokens, "state": order.max_running + _PADDING_BLOCKS},
        window_groups=spec.window_groups,
        group_tokens=group_tokens(spec, step) if spec.window_groups else 0,
        state_tokens=state_tokens(spec),
    )


def _free_bytes(kv: kvcached.KVCache) -> int:
    return kv.free_mapped_blocks() * kv.layout.block_tokens * kv.layout.token_bytes


class ModelMemory:
    """Memory of one active model. `release` returns all of it and is idempotent.

    The constructor raises ActivationError with the missing bytes; nothing stays reserved then.
    Thread rule: the engine's thread only.
    """

    def __init__(
        self,
        client: kvcached.Client,
        device: kvcached.Device,
        weights: ModelWeights,
        *,
        order: ActivateEngine,
        plan: MemoryPlan,
        timeline: Timeline,
        ranks: RankGroup = ALONE,
    ) -> None:
        self.plan = plan
        self.weights = weights
        self.timeline = timeline
        self.ranks = ranks
        self._client = client
        self._device = device
        self._name = order.model.name
        self._computed_bytes = order.model.weight_bytes
        self._derived_bytes = order.model.derived_bytes
        self._lease: kvcached.StaticLease | None = None
        self._kv: kvcached.KVCache | None = None
        self.side: dict[str, kvcached.KVCache] = {}  # of the pools that the engine laid out
        try:
            self._check_limit(order)
            self._make_room()
            self._reserve(order)
        except ActivationError:
            self.release()
            self.ranks.all_true(False)
            raise
        self._agree(order)

    @property
    def kv(self) -> kvcached.KVCache:
        """KV space of the main pool, whose virtual range is laid out at the first use. May raise
        NoRoomError."""
        if self._kv is None:
            self._kv = self._client.alloc_kvcache(
                self.plan.layout, self.plan.virtual_tokens, reserved_blocks=_PADDING_BLOCKS
            )
            # One spare slab, or a block at a slab's edge would map and unmap it at every step.
            self._kv.set_spare_pages(0, self.plan.slab_pages)
        return self._kv

    def side_kv(self, name: str) -> kvcached.KVCache:
        """Returns the KV space of a side pool, laid out at the first use. May raise NoRoomError."""
        if name not in self.side:
            pool = self.plan.side[name]
            kv = self._client.alloc_kvcache(
                pool.layout, self.plan.side_tokens[name], reserved_blocks=_PADDING_BLOCKS
            )
            kv.set_spare_pages(0, sum(pool.layout.slab_pages(self._device.page_bytes)))
            self.side[name] = kv
        return self.side[name]

    def idle_tokens(self) -> int:
        """Returns the tokens of the main pool that fit into mapped memory without a live block, of
        all pools."""
        spare_bytes = sum(_free_bytes(kv) for kv in self.side.values())
        return (
            self.kv.free_mapped_blocks() * self.plan.layout.block_tokens
            + spare_bytes // self.plan.layout.token_bytes
        )

    @property
    def floor_bytes(self) -> int:
        """Bytes of KV that stay mapped without requests."""
        return self.kv.floor_bytes() + sum(kv.floor_bytes() for kv in self.side.values())

    def trim(self) -> None:
        """Returns pages without a live block."""
        for kv in (self.kv, *self.side.values()):
            kv.trim()

    @property
    def static_bytes(self) -> int:
        """Bytes that do not vary with requests."""
        return self.weights.size_bytes + self.plan.share_bytes

    def lay_out_weights(self, *parts: Mapping[str, torch.Tensor], back: bool) -> None:
        """Lays out the weights at their real size, known once the model is built. With `back`, all
        pages are mapped at once."""
        try:
            self.weights.lay_out(*parts)
            if back:
                self.weights.back()
        except kvcached.NoRoomError as error:
            raise self._no_room(error, 0) from error

    def replace_weights(self, names: Iterable[str], tensors: Mapping[str, torch.Tensor]) -> None:
        """Lays out these tensors in the place of a part's (`WeightPages.replace`)."""
        try:
            self.weights.pages.replace(names, tensors)
        except kvcached.NoRoomError as error:
            raise self._no_room(error, 0) from error

    def load_weights(self) -> None:
        """Copies the weights out of the store, and lays out the KV space meanwhile. Raises
        WeightFileError or WeightMismatchError for a stored copy that cannot be used."""
        try:
            self.weights.load(lambda: self.kv)
        except kvcached.NoRoomError as error:
            raise self._no_room(error, 0) from error

    def set_limit(self, limit_bytes: int | None) -> None:
        """Caps elastic memory, but never below the need of one full-context request."""
        if limit_bytes is not None:
            limit_bytes = max(limit_bytes, self.plan.reserve_bytes)
        self._client.set_limit(limit_bytes)

    def release(self) -> None:
        """Returns all memory. REQUIRES: no tensor over the KV space is used any more."""
        self._client.publish_evictable(0)
        for kv in (self._kv, *self.side.values()):
            if kv is not None:
                self._client.free_kvcache(kv)
        self._kv, self.side = None, {}
        self.weights.release()
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        self._client.set_min(0)
        self._client.set_limit(None)

    def compare_weights(self) -> None:
        """Logs a warning if the loaded weights differ by over 1 % from what the scheduler reckons
        with. Engines may drop the weights that they derive others from.

        KV needs no comparison: engines lay it out as the scheduler says, or fail.
        """
        measured = sum(spec.size_bytes for spec in self.weights.pages.specs.values())
        tolerance = _DIFFERENCE_MAX * self._computed_bytes
        least_bytes = self._computed_bytes - self._derived_bytes - tolerance
        if not least_bytes <= measured <= self._computed_bytes + tolerance:
            log.warning(
                "model %s: its weights take %s in the engine, and %s by its files",
                self._name,
                format_size(measured),
                format_size(self._computed_bytes),
            )

    def _agree(self, order: ActivateEngine) -> None:
        """Waits until all ranks have reserved their memory, since ranks that build the model wait
        for each other. Raises ActivationError if one has failed."""
        if not self.ranks.all_true(True):
            self.release()
            raise ActivationError(
                f"model {order.model.name}: another rank does not have memory for it"
            )

    def _check_limit(self, order: ActivateEngine) -> None:
        limit = order.kv_limit_bytes
        if limit is not None and limit < self.plan.reserve_bytes:
            raise ActivationError(
                f"model {order.model.name}: its KV limit of {format_size(limit)} is below the "
                f"{format_size(self.plan.reserve_bytes)} of one request of "
                f"{order.model.context_length} tokens; raise its share or lower its context_length"
            )

    def _make_room(self) -> None:
        self.timeline.enter("shrink")
        try:
            what = f"activation of {self._name}"
            make_room(self._client, self._device, self.plan.total_bytes, what)
        except kvcached.NoRoomError as error:
            raise self._no_room(error, 0) from error

    def _reserve(self, order: ActivateEngine) -> None:
        """Reserves share, weights and KV. `more_bytes` is the part not yet asked for."""
        self.timeline.enter("reserve")
        plan = self.plan
        self._client.set_limit(order.kv_limit_bytes)
        more_bytes = plan.weight_bytes + plan.reserve_bytes
        try:
            if plan.share_bytes:
                self._lease = self._client.reserve_static(plan.share_bytes, "engine's share")
            more_bytes = plan.reserve_bytes
            self.weights.reserve(plan.weight_bytes)
            more_bytes = 0
            self._client.set_min(plan.reserve_bytes)
        except kvcached.NoRoomError as error:
            raise self._no_room(error, more_bytes) from error

    def _no_room(self, error: kvcached.NoRoomError, more_bytes: int) -> ActivationError:
        missing = error.need_bytes - error.free_bytes + more_bytes
        return ActivationError(
            f"model {self._name} needs {format_size(self.plan.weight_bytes)} for weights,"
            f" {format_size(self.plan.share_bytes)} for its engine and"
            f" {format_size(self.plan.reserve_bytes)} of KV; {format_size(missing)} are missing on"
            " the device",
            missing,
        )
