"""Hand-over of blocks from one client or process to another, between devices."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from kvcached import Layout, errors
from kvcached.handover import offer_server, offers, plan, wire

from .conftest import SMOL, TINY
from .handover_ends import Ends, connect, hear, offered, open_files, say, soon, taken
from .handover_source import content, fill, read, wipe
from .libcuda import LibCuda

LAYOUTS = [
    TINY,
    replace(TINY, arrangement="block_interleaved"),
    replace(SMOL, num_layers=3, arrangement="token_interleaved", padded_token_bytes=5120),
    replace(SMOL, num_layers=2),
]


@pytest.fixture
def ends(namespace: str, names: tuple[str, str], libcuda: LibCuda) -> Iterator[Ends]:
    assert libcuda.library.cuInit(0) == 0  # it keeps its own files open
    before, violations = open_files(), libcuda.violations()
    made = Ends(namespace, names)
    yield made
    libcuda.pass_all()
    made.close()
    soon(lambda: open_files() <= before)
    assert libcuda.violations() == violations


def test_blocks_come_whole_and_in_order(ends: Ends) -> None:
    ids, into = offered(ends), taken(ends)
    offer = ends.source.offer_kv(ids)
    assert offer.is_open()
    assert ends.source.open_offers() == 1
    ends.target.fetch_kv(offer.address, into)
    assert not offer.is_open()
    assert ends.source.open_offers() == 0
    assert (read(ends.target, into) == content(ends.target, len(ids))).all()
    assert (read(ends.source, ids) == content(ends.source, len(ids))).all()
    with pytest.raises(errors.HandoverError):
        ends.target.fetch_kv(offer.address, into, timeout_s=1)
    ends.source.free_kv(ids)
    ends.target.free_kv(into)
    assert ends.charged() == [ends.source.floor_bytes(), ends.target.floor_bytes()]


@pytest.mark.parametrize("names", [("host:0", "host:0")])
def test_a_part_of_the_blocks(ends: Ends) -> None:
    ids, into = offered(ends), taken(ends)
    fill(ends.target, into[:1])
    ends.target.fetch_kv(ends.source.offer_kv(ids).address, into[1:12], skip=7)
    assert (read(ends.target, into[:1]) == content(ends.target, 1)).all()
    assert (read(ends.target, into[1:12]) == content(ends.target, 40)[7:18]).all()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.arrangement)
@pytest.mark.parametrize("names", [("host:0", "host:1")])
def test_every_layout(namespace: str, names: tuple[str, str], layout: Layout) -> None:
    ends = Ends(namespace, names, layout)
    ids, into = offered(ends, 60), taken(ends, 60)
    ends.target.fetch_kv(ends.source.offer_kv(ids).address, into)
    assert (read(ends.target, into) == content(ends.target, 60)).all()
    ends.close()


def test_freed_blocks_stay_until_they_are_fetched(ends: Ends) -> None:
    ids, into = offered(ends), taken(ends)
    before = ends.charged()
    offer = ends.source.offer_kv(ids)
    ends.source.free_kv(ids[:30])
    with pytest.raises(errors.DoubleFreeError):
        ends.source.free_kv(ids[29:31])
    ends.source.free_kv(ids[30:])
    assert ends.charged() == before
    fresh = ends.source.alloc_kv(20)
    assert fresh is not None
    assert not set(fresh) & set(ids)
    ends.target.fetch_kv(offer.address, into)
    assert (read(ends.target, into) == content(ends.target, len(ids))).all()
    ends.source.free_kv(fresh)
    assert ends.charged()[0] == ends.source.floor_bytes()
    ends.source.check_integrity()


@pytest.mark.parametrize("names", [("host:0", "host:0")])
def test_a_block_of_two_offers_waits_for_both(ends: Ends) -> None:
    ids, into = offered(ends), taken(ends)
    first, second = (ends.source.offer_kv(part) for part in (ids[:25], ids[15:]))
    ends.source.free_kv(ids)
    first.withdraw()
    assert ends.source.live_blocks() == 25
    ends.target.fetch_kv(second.address, into[:25])
    assert ends.source.live_blocks() == 0
    assert (read(ends.target, into[:25]) == content(ends.target, 40)[15:]).all()


@pytest.mark.parametrize("names", [("host:0", "host:0"), ("cuda:0", "cuda:1")], ids="-".join)
def test_after_the_deadline_the_blocks_go(ends: Ends) -> None:
    ids, into = offered(ends), taken(ends)
    offer = ends.source.offer_kv(ids, deadline_s=0.0)
    ends.source.free_kv(ids)
    soon(lambda: ends.source.open_offers() == 0)
    assert ends.charged()[0] == ends.source.floor_bytes()
    with pytest.raises(errors.HandoverError, match=r"offer has ended|no process serves|is gone"):
        ends.target.fetch_kv(offer.address, into)


@pytest.mark.parametrize("names", [("cuda:0", "cuda:1")], ids="-".join)
def test_a_driver_that_fails_fetches_nothing(ends: Ends, libcuda: LibCuda) -> None:
    """Fails each call in turn: the target reports it, both ends keep their pages, nothing leaks."""
    ids, into = offered(ends, 8), taken(ends, 8)
    held, used = ends.charged(), [libcuda.used_bytes(device) for device in (0, 1)]
    calls = libcuda_calls(ends, libcuda, ids, into)
    passed = 0
    for nth in range(1, calls + 1):
        offer = ends.source.offer_kv(ids)
        wipe(ends.target, into)
        libcuda.fail_at(nth)
        said = True
        with contextlib.suppress(errors.HandoverError):
            ends.target.fetch_kv(offer.address, into)
            said = False
        libcuda.pass_all()
        if not said:
            assert (read(ends.target, into) == content(ends.target, len(ids))).all()
            passed += 1
        soon(lambda: ends.source.open_offers() == 0)
        assert ends.charged() == held
        assert [libcuda.used_bytes(device) for device in (0, 1)] == used
    assert 0 < passed < calls / 4  # calls that a window leaves for later, mostly of its handles
    ends.target.fetch_kv(ends.source.offer_kv(ids).address, into)
    assert (read(ends.target, into) == content(ends.target, len(ids))).all()


def libcuda_calls(
    ends: Ends, libcuda: LibCuda, ids: NDArray[np.int64], into: NDArray[np.int64]
) -> int:
    """Returns the number of driver calls of a successful hand-over."""
    offer = ends.source.offer_kv(ids)
    libcuda.reset()
    ends.target.fetch_kv(offer.address, into)
    return libcuda.calls()


@pytest.mark.parametrize("names", [("host:0", "host:0")])
def test_what_does_not_fit_is_refused(ends: Ends) -> None:
    ids, into = offered(ends), taken(ends)
    with pytest.raises(errors.HandoverError, match="40 blocks are offered, but 41"):
        ends.target.fetch_kv(ends.source.offer_kv(ids).address, into, skip=1)
    other = ends.clients[1].alloc_kvcache(replace(TINY, dtype="int8"), 2000)
    blocks = other.alloc_kv(40)
    assert blocks is not None
    with pytest.raises(errors.HandoverError, match="another layout"):
        other.fetch_kv(ends.source.offer_kv(ids).address, blocks)
    for wrong in ("nobody/1", "nothing", f"{ends.source.offer_kv(ids).address}1"):
        with pytest.raises(errors.HandoverError):
            ends.target.fetch_kv(wrong, into, timeout_s=1)
    with pytest.raises(errors.UnknownBlockError):
        ends.source.offer_kv(np.array([0]))
    with pytest.raises(errors.InvalidArgumentError):
        ends.source.offer_kv(np.array([], dtype=np.int64))
    with pytest.raises(errors.DoubleFreeError):
        ends.target.fetch_kv("nobody/1", np.array([int(into.max()) + 100]))


def _hang_on(link: socket.socket) -> None:
    """Waits until the other end hangs up."""
    with contextlib.suppress(ConnectionResetError):
        while link.recv(1 << 16):
            pass


@pytest.mark.parametrize("names", [("host:0", "host:0")])
def test_nonsense_on_the_socket_ends_that_connection_alone(ends: Ends) -> None:
    ids, into = offered(ends), taken(ends)
    name, before = ends.source.offer_kv(ids).address.split("/")[0], offer_server.malformed_total()
    for nonsense in (
        b"junk",
        b"{}",
        b"[1]",
        b"[" * 1000,
        wire.encode(wire.Hello("another", False, 1 << 35)),
    ):
        with connect(name) as link:
            say(link, nonsense)
            _hang_on(link)
    for nonsense in (b"abc", wire.pack_pairs([(0, 9999)])):
        name, key = ends.source.offer_kv(ids).address.split("/")
        with connect(name) as link:
            say(link, wire.encode(wire.Hello(key, False, 0)))
            say(link, nonsense)
            _hang_on(link)
    # A connection that named an offer and hangs up ends that offer. None named the first one.
    soon(lambda: ends.source.open_offers() == 1)
    with connect(name) as link:
        link.send(struct.pack("<Q", wire.ASK_BYTES_MAX + 1))
        assert link.recv(1) == b""
    assert offer_server.malformed_total() - before == 7  # all but the missing pages
    ends.target.fetch_kv(ends.source.offer_kv(ids).address, into)


@pytest.mark.parametrize("device", ["host:0", "cuda:0"])
def test_who_can_read_whom(namespace: str, device: str, libcuda: LibCuda) -> None:
    ends = Ends(namespace, (device, device))
    kind = device[:4]
    assert ends.source.can_offer_to(f"{kind}:1")
    assert not ends.source.can_offer_to("cuda:0" if kind == "host" else "host:0")
    with pytest.raises(errors.UnknownDeviceError):
        ends.source.can_offer_to("disk:0")
    ends.close()


@pytest.mark.parametrize("names", [("host:0", "host:0")], ids="-".join)
def test_a_target_that_stands_still_is_waited_for_a_moment(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offers, "GRACE_S", 0.2)
    ids = offered(ends)
    name, key = ends.source.offer_kv(ids).address.split("/")
    ends.source.free_kv(ids)
    with connect(name) as link:
        say(link, wire.encode(wire.Hello(key, False, 0)))
        for _ in ("terms", "ids"):
            hear(link)
        say(link, wire.pack_pairs([(0, 1)]))
        wire.close_all(hear(link, 5)[1])
        assert ends.source.live_blocks() == 40
        open_offers = ends.source._offers
        open_offers.active[key].until_s = time.monotonic()  # its deadline
        assert open_offers._server is not None
        open_offers._server.wake()
        soon(lambda: ends.source.open_offers() == 0)
        assert ends.source.live_blocks() == 0
        with pytest.raises(errors.HandoverError):
            hear(link, 5)


# --- arithmetic ----------------------------------------------------------------------------------


def test_the_plan_covers_every_byte_once() -> None:
    """Compares with a count of every byte, for widths that divide a page and widths that do not."""
    rng = np.random.default_rng(1)
    for slab_pages, per_slab in (((1, 2), 4), ((3,), 16), ((5, 1), 1), ((3, 2), 2)):
        source = plan.Shape(64, slab_pages, per_slab, 6)
        target = replace_slabs(source, 9)
        ids = rng.permutation(6 * per_slab)[:5].astype(np.int64)
        into = rng.permutation(9 * per_slab)[:5].astype(np.int64)
        pages = plan.pages_of(source, ids)
        pieces = plan.pieces_of(source, ids, target, into)
        memory = rng.integers(0, 1 << 30, sum(slab_pages) * 6 * 64)
        window = np.concatenate([memory[p * 64 : p * 64 + 64] for p in pages])
        copied = np.full(sum(slab_pages) * 9 * 64, -1)
        for first in range(0, len(pages), 2):
            end = min(first + 2, len(pages))
            for offset, place, size in plan.runs_in(pieces, first, end, 64):
                assert (copied[place : place + size] == -1).all()
                copied[place : place + size] = window[first * 64 + offset :][:size]
        for buffer in source.buffers:
            width = source.block_bytes(buffer)
            for a, b in zip(ids, into, strict=True):
                at = [s.first_page(buffer) * 64 + i * width for s, i in ((source, a), (target, b))]
                assert (memory[at[0] :][:width] == copied[at[1] :][:width]).all()
        assert (copied >= 0).sum() == 5 * sum(source.block_bytes(b) for b in source.buffers)


def replace_slabs(shape: plan.Shape, slabs: int) -> plan.Shape:
    return plan.Shape(shape.page_bytes, shape.slab_pages, shape.blocks_per_slab, slabs)
