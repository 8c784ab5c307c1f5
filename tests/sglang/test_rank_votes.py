"""Answers of a stock server's rank to other engines, without the other ranks' processes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvcached import Device, Layout, RankKV

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("preloaded")]

PAGE = 64 << 10
LAYOUT = Layout(2, 2, 16, dtype="float16", block_tokens=16)
QUANTUM = LAYOUT.quantum_bytes(PAGE)


@pytest.mark.parametrize(("wanted", "given"), [(1, 2), (2, 2), (3, 3)])
def test_spare_pages_of_all_pools_are_given_before_prefixes(
    monkeypatch: pytest.MonkeyPatch, namespace: str, wanted: int, given: int
) -> None:
    from kvcached.engines.sglang import rank_votes

    alone = SimpleNamespace(tp_rank=0, tp_size=1)
    monkeypatch.setattr(rank_votes, "get_parallel", lambda: alone)
    device = Device.open("host:0", capacity_bytes=64 << 20, page_bytes=PAGE, namespace=namespace)
    with device.client("engine", background=False) as client:
        full, window = (client.alloc_kvcache(LAYOUT, 1 << 14, reserved_blocks=0) for _ in range(2))
        slab = LAYOUT.slab_tokens(PAGE) // LAYOUT.block_tokens
        prefixes = [kv.alloc_kv(slab) for kv in (full, window)]
        for kv in (full, window):
            kv.set_spare_pages(0, sum(LAYOUT.slab_pages(PAGE)))
            spare = kv.alloc_kv(slab)
            assert spare is not None
            kv.free_kv(spare)
        assert device.usage().committed_bytes == 4 * QUANTUM

        def evict(_: int | None) -> int:
            for kv, ids in zip((full, window), prefixes, strict=True):
                assert ids is not None
                kv.free_kv(ids)
            prefixes.clear()
            return slab * LAYOUT.block_tokens

        waking = rank_votes.Waking(client)
        order = device.order_shrink("engine", wanted * QUANTUM)
        waking.answer_together([full, window], RankKV(full, bool), evict)
        (answer,) = order.wait()
        assert waking.socket is not None
        waking.socket.close()
        assert answer.returned_bytes == given * QUANTUM
        assert bool(prefixes) == (wanted <= 2)
    device.destroy()
