"""Multi-head latent attention at tensor level: SGLang's CPU attention cannot run such models, but
their KV memory takes its turns in an engine process like that of others."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

import kvcached
from prism.engines.timeline import Timeline
from prism.messages import Activate
from tests.sglang.models import LLAMA, spec_of

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("preloaded")]

PAGE, CAPACITY = 64 << 10, 64 << 20
LATENT = kvcached.MLALayout(
    num_layers=3, kv_lora_rank=512, rope_dim=64, dtype="float32", block_tokens=16
)
TOKENS = 200


class Seat(NamedTuple):
    device: kvcached.Device
    client: kvcached.Client


@pytest.fixture
def seat(namespace: str) -> Iterator[Seat]:
    device = kvcached.Device.open(
        "host:0", capacity_bytes=CAPACITY, page_bytes=PAGE, namespace=namespace
    )
    with device.client("e0") as opened:
        opened.reserve_addresses(4 * CAPACITY)
        yield Seat(device, opened)
    device.destroy(force=True)


def memory_of(seat: Seat, layout: kvcached.MLALayout | None) -> Any:
    """The engine's memory with its own layout, or with this one."""
    from prism.engines.sglang.memory import EngineMemory, plan
    from prism.engines.sglang.weights import ModelWeights, StoreAccess

    order = Activate(spec_of(LLAMA, 512))
    made = plan(order, capacity_bytes=CAPACITY, page_bytes=PAGE, static_bytes=1 << 20)
    if layout is not None:
        quantum, slab_tokens = layout.quantum_bytes(PAGE), layout.slab_tokens(PAGE)
        made = replace(
            made,
            layout=layout,
            quantum_bytes=quantum,
            slab_tokens=slab_tokens,
            slab_pages=quantum // PAGE,
            reserve_bytes=2 * quantum,
            virtual_tokens=CAPACITY // quantum * slab_tokens,
        )
    weights = ModelWeights(seat.client, StoreAccess(), order.model)
    return EngineMemory(
        seat.client, seat.device, weights, order=order, plan=made, timeline=Timeline()
    )


def slots_of(memory: Any) -> Any:
    """Allocated blocks and the slots of their tokens, in no order."""
    ids = memory.kv.alloc_kv(-(-TOKENS // 16))
    slots = (torch.from_numpy(ids)[:, None] * 16 + torch.arange(16)).flatten()
    return ids, slots[torch.randperm(len(slots))[:TOKENS]]


def latent_turn(seat: Seat) -> None:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.platforms import current_platform
    from sglang.srt.runtime_context import get_parallel

    memory = memory_of(seat, LATENT)
    current_platform.memory = memory
    shape: dict[str, Any] = {"page_size": 16, "dtype": torch.float32, "kv_lora_rank": 512}
    shape |= {"qk_rope_head_dim": 64, "layer_num": 3}
    shape |= {"device": "cpu", "enable_memory_saver": False}
    pool_class = current_platform.get_kv_pool_cls(kind="mla")
    pool = pool_class(size=memory.plan.pool_tokens, **shape)
    stock = MLATokenToKVPool(size=memory.plan.pool_tokens, **shape)
    assert issubclass(pool_class, MLATokenToKVPool)
    ids, slots = slots_of(memory)
    written = torch.randn(3, TOKENS, 1, 576)
    for layer, rows in enumerate(written):
        for each in (pool, stock):
            with get_parallel().override(dcp_enabled=False, attn_dcp_size=1):
                each.set_kv_buffer(SimpleNamespace(layer_id=layer), slots, rows, rows)
    for layer, rows in enumerate(written):
        key, value = pool.get_kv_buffer(layer)
        assert torch.equal(key[slots], rows)
        assert torch.equal(key[slots], stock.get_key_buffer(layer)[slots])
        assert torch.equal(value[slots], stock.get_value_buffer(layer)[slots])
    assert pool.data_ptrs.tolist() == [layer.data_ptr() for layer in pool.kv_buffer]
    memory.kv.free_kv(ids)
    end(seat, memory)


def heads_turn(seat: Seat) -> None:
    memory = memory_of(seat, None)
    ids, slots = slots_of(memory)
    keys = torch.from_dlpack(memory.kv.k_buffer(0))
    written = torch.randn(TOKENS, *keys.shape[1:])
    keys[slots] = written
    assert torch.equal(keys[slots], written)
    memory.kv.free_kv(ids)
    del keys
    end(seat, memory)


def end(seat: Seat, memory: Any) -> None:
    from sglang.srt.platforms import current_platform

    current_platform.memory = None
    memory.release()
    gc.collect()
    assert seat.device.usage().reserved_bytes == 0
    assert seat.device.resident_bytes() == 0


def test_latent_kv_takes_turns_with_heads(seat: Seat, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt import platforms

    from prism.engines.sglang.platform import PrismCpuPlatform

    monkeypatch.setattr(platforms, "current_platform", PrismCpuPlatform())
    torch.manual_seed(0)
    for turn in (heads_turn, latent_turn) * 3:
        turn(seat)
