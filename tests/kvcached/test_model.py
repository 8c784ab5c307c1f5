"""Random steps on a KV cache, compared with a dict model."""

from __future__ import annotations

from uuid import uuid4

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcached import Device, Layout, NoRoomError, errors

from .arrays import as_array

pytestmark = pytest.mark.usefixtures("libcuda")

PAGE = 4096
# A block of 4 tokens is 768 B in K and 1,024 B in V: 3 and 4 pages hold 16 blocks.
LAYOUT = Layout(
    num_layers=2, num_kv_heads=3, head_dim=16, v_head_dim=64 // 3, dtype="float32", block_tokens=4
)
CAPACITY = 12 * LAYOUT.quantum_bytes(PAGE)


class KvMachine(RuleBasedStateMachine):
    """Every live block has its own tag in each buffer. A neighbour of the client needs memory."""

    DEVICE = "host:0"

    def __init__(self) -> None:
        super().__init__()
        self.namespace = f"model-{uuid4().hex[:10]}"
        self.device = Device.open(
            self.DEVICE, capacity_bytes=CAPACITY, page_bytes=PAGE, namespace=self.namespace
        )
        self.client = self.device.client("subject", background=False)
        self.kv = self.client.alloc_kvcache(LAYOUT, 10 * LAYOUT.slab_tokens(PAGE))
        self.buffers = [
            as_array(view(layer))
            for layer in range(LAYOUT.num_layers)
            for view in (self.kv.k_buffer, self.kv.v_buffer)
        ]
        self.neighbour = self.device.client("neighbour")
        self.pressure = self.neighbour.alloc_virtual_tensor(CAPACITY)
        self.live: dict[int, int] = {}
        self.freed: set[int] = set()
        self.tags = 0

    def rows(self, block: int) -> slice:
        return slice(block * LAYOUT.block_tokens, (block + 1) * LAYOUT.block_tokens)

    @rule(count=st.integers(0, 60))
    def alloc(self, count: int) -> None:
        available = self.kv.available_blocks()
        ids = self.kv.alloc_kv(count)
        assert (ids is not None) == (count <= available)
        if ids is None:
            return
        assert len(ids) == count
        for block in ids.tolist():
            assert 0 < block < self.kv.num_blocks
            assert block not in self.live
            self.tags += 1
            self.live[block] = self.tags
            self.freed.discard(block)
            for buffer in self.buffers:
                buffer[self.rows(block)] = self.tags

    @precondition(lambda self: self.live)
    @rule(data=st.data(), share=st.sampled_from([0.1, 0.5, 1.0]))
    def free(self, data: st.DataObject, share: float) -> None:
        order = data.draw(st.permutations(sorted(self.live)))
        chosen = order[: max(1, int(len(order) * share))]
        for block in chosen:
            tag = self.live.pop(block)
            assert all((buffer[self.rows(block)] == tag).all() for buffer in self.buffers)
        self.freed.update(chosen)
        self.kv.free_kv(np.array(chosen, dtype=np.int64))

    @precondition(lambda self: self.freed)
    @rule(data=st.data())
    def free_again(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(sorted(self.freed)))
        ids = np.array([*self.live, gone], dtype=np.int64)
        with pytest.raises(errors.DoubleFreeError):
            self.kv.free_kv(ids)

    @rule(pages=st.integers(0, CAPACITY // PAGE))
    def press(self, pages: int) -> None:
        if self.pressure.mapped_bytes:
            self.pressure.unmap(0, self.pressure.mapped_bytes)
        free = self.device.usage().free_bytes
        if pages == 0:
            return
        if pages * PAGE <= free:
            self.pressure.map(0, pages * PAGE)
            return
        with pytest.raises(NoRoomError):
            self.pressure.map(0, pages * PAGE)

    @rule(quanta=st.one_of(st.none(), st.integers(0, 12)))
    def limit(self, quanta: int | None) -> None:
        self.client.set_limit(None if quanta is None else quanta * LAYOUT.quantum_bytes(PAGE))

    @rule(low=st.integers(0, 20), extra=st.integers(0, 40))
    def spares(self, low: int, extra: int) -> None:
        self.kv.set_spare_pages(low, low + extra)

    @rule()
    def trim(self) -> None:
        self.kv.trim()
        assert self.client.usage().committed_bytes == self.kv.mapped_bytes()

    @invariant()
    def books_agree(self) -> None:
        self.kv.check_integrity()
        usage = self.device.usage()
        assert self.kv.live_blocks() == len(self.live)
        assert usage.reserved_bytes + usage.free_bytes == CAPACITY
        assert self.client.usage().committed_bytes >= self.kv.mapped_bytes()
        slabs = self.kv.mapped_bytes() // LAYOUT.quantum_bytes(PAGE)
        per_slab = LAYOUT.slab_tokens(PAGE) // LAYOUT.block_tokens
        used = {block // per_slab for block in self.live} | {0}
        assert slabs == len(used)
        assert self.kv.free_mapped_blocks() == slabs * per_slab - len(self.live) - 1
        assert self.device.resident_bytes() <= usage.committed_bytes

    def teardown(self) -> None:
        self.client.close()
        self.neighbour.close()
        assert self.device.usage().free_bytes == CAPACITY
        self.device.destroy()


class KvMachineOnCuda(KvMachine):
    """KvMachine on a GPU of the test libcuda."""

    DEVICE = "cuda:0"


def campaign(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


KvMachine.TestCase.settings = campaign(200)
KvMachineOnCuda.TestCase.settings = campaign(60)
TestKvCacheAgainstADict = KvMachine.TestCase
TestKvCacheAgainstADictOnCuda = KvMachineOnCuda.TestCase
