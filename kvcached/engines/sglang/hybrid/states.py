"""States of sequences (Mamba, linear attention, short convolutions) in kvcached memory.

A block of the pool has the state of one sequence, all layers after another. The kernels see a
tensor for all layers with a larger stride from sequence to sequence, as in SGLang's own
page-major layout.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.layout.token_major import build_mamba_entry_views, mamba_entry_bytes
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MambaPool

from kvcached import KVCache
from kvcached.engines.packed import packed_tensor
from kvcached.engines.sglang.memory import Ids, active_memory
from kvcached.layouts import state_layout

_NO_SLOTS: Ids = np.empty(0, dtype=np.int64)


class Slots:
    """Allocator of states, with the calls of SGLang's MambaSlotAllocator.

    Like blocks, states are held before SGLang allocates them, so that admission is exact.
    """

    def __init__(self, kv: KVCache, size: int, device: str) -> None:
        self.kv = kv
        self.size = size
        self.device = device
        self._rank_kv = active_memory().rank_kv(kv)
        self._held = self._live = _NO_SLOTS

    def hold(self, count: int) -> bool:
        """Takes the missing ones of `count` states. Returns False if they do not fit."""
        missing = count - len(self._held)
        if missing <= 0:
            return True
        slots = None
        if len(self._live) + count <= self.size:
            slots = self._rank_kv.alloc_kv(missing)
            if slots is None:
                slots = active_memory().find_room(self.kv, missing)
        if slots is None:
            return False
        self._held = np.concatenate((self._held, slots))
        return True

    def return_held(self) -> None:
        """Frees the states that the last step did not use."""
        if len(self._held):
            self.kv.free_kv(self._held)
            self._held = _NO_SLOTS

    def available_size(self) -> int:
        """Returns a virtual number, which SGLang compares with its total."""
        return self.size - len(self._live)

    schedulable_available_size = available_size

    def alloc_group_begin(self, num_reqs: int) -> None:
        """Does nothing: states are held already."""

    def alloc_group_end(self) -> None:
        """Does nothing: see `return_held`."""

    def alloc(self, need_size: int) -> torch.Tensor | None:
        if not self.hold(need_size):
            return None
        taken, self._held = self._held[:need_size], self._held[need_size:]
        self._live = np.concatenate((self._live, taken))
        return torch.from_numpy(taken).to(self.device)

    def free(self, free_index: torch.Tensor) -> None:
        slots = free_index.reshape(-1).to(torch.int64).cpu().numpy()
        self.kv.free_kv(slots)
        self._live = np.setdiff1d(self._live, slots, assume_unique=True)

    def clear(self) -> None:
        self.return_held()
        if len(self._live):
            self.kv.free_kv(self._live)
        self._live = _NO_SLOTS


class StatePool(MambaPool):  # type: ignore[misc]
    """SGLang's pool of states, whose tensors are views of kvcached."""

    def __init__(
        self,
        *,
        size: int,
        cache_params: Any,
        mamba_layer_ids: list[int],
        device: str,
        **kwargs: Any,
    ) -> None:
        model = {"cache_params": cache_params, "mamba_layer_ids": mamba_layer_ids, "device": device}
        super().__init__(size=0, **model, **kwargs)
        shape, dtype = cache_params.shape, cache_params.dtype
        geometry = {
            "layer_num": len(mamba_layer_ids),
            "conv_state_shapes": shape.conv,
            "conv_dtype": dtype.conv,
            "temporal_state_shape": shape.temporal,
            "temporal_dtype": dtype.temporal,
        }
        layout = state_layout(mamba_entry_bytes(**geometry))
        kv = active_memory().kv_cache(layout, size + 1, "state")
        conv, temporal = build_mamba_entry_views(
            packed_tensor(kv).flatten(),
            max_slots=kv.num_blocks,
            entry_bytes=layout.token_bytes,
            **geometry,
        )
        self.size = size
        self.slots = Slots(kv, size, device)
        self.mamba_cache = self.State(conv=conv, temporal=temporal)
        for name in ("_conv_fuse_ok", "_conv_slot_desc"):  # of the tensors before
            self.__dict__.pop(name, None)


class StateRows(HybridReqToTokenPool):  # type: ignore[misc]
    """SGLang's table of requests, with their states in kvcached."""

    mamba_pool_cls = StatePool

    def _init_mamba_pool(self, *args: Any, **kwargs: Any) -> None:
        super()._init_mamba_pool(*args, **kwargs)
        self.mamba_allocator = self.mamba_pool.slots
