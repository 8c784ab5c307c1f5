"""Hand-overs in which the other end, or this process, does not do its part."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from kvcached import KVCache, _core, errors
from kvcached.handover import fetch, offer_server, offers, wire

from .conftest import PAGE
from .handover_ends import Ends, connect, hear, offered, open_files, say, soon, taken
from .handover_source import content, read

Answer = Callable[[int], tuple[bytes, list[int]]]


@pytest.fixture
def ends(namespace: str) -> Iterator[Ends]:
    before = open_files()
    made = Ends(namespace, ("host:0", "host:0"))
    yield made
    made.close()
    soon(lambda: open_files() <= before)


def no_descriptors(*_: object) -> None:
    raise OSError(errno.EMFILE, "Too many open files")


# --- the end that offers -------------------------------------------------------------------------


def test_want_of_descriptors_delays_whoever_comes(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, into = offered(ends), taken(ends)
    calls = itertools.chain([no_descriptors] * 2, itertools.repeat(socket.socket.accept))
    monkeypatch.setattr(offer_server, "PAUSE_S", 0.001)

    def accept(link: socket.socket) -> object:
        return next(calls)(link)

    monkeypatch.setattr(socket.socket, "accept", accept)
    ends.target.fetch_kv(ends.source.offer_kv(ids).address, into)
    assert (read(ends.target, into) == content(ends.target, len(ids))).all()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_offers_end_with_the_thread_that_serves_them(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, into = offered(ends), taken(ends)
    others = threading.enumerate()
    offer = ends.source.offer_kv(ids[:20])
    (serving,) = (t for t in threading.enumerate() if t not in others)
    ends.source.free_kv(ids[:20])
    with monkeypatch.context() as patch:
        patch.setattr(wire, "decode_hello", lambda _: 1 // 0)
        with pytest.raises(errors.HandoverError):
            ends.target.fetch_kv(offer.address, into)
        soon(lambda: ends.source.open_offers() == 0)
        serving.join()  # its exception is reported while this test runs, not another
    assert ends.source.live_blocks() == 20
    ends.target.fetch_kv(ends.source.offer_kv(ids[20:]).address, into[:20])
    assert (read(ends.target, into[:20]) == content(ends.target, 40)[20:]).all()


@pytest.mark.parametrize("call", ["open_offers", "free_kv"])
def test_deadlines_hold_without_the_thread(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    silent = SimpleNamespace(name="nobody", wake=lambda: None, join=lambda: None)
    monkeypatch.setattr(offers, "OfferServer", lambda _: silent)
    ids = offered(ends)
    ends.source.offer_kv(ids, deadline_s=0.0)
    if call == "free_kv":
        ends.source.free_kv(ids)
        assert ends.source.live_blocks() == 0
    assert ends.source.open_offers() == 0


@pytest.mark.parametrize("lacking", ["descriptors", "threads"])
def test_an_offer_that_nobody_could_serve_is_none(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    def no_threads(_: object) -> None:
        raise RuntimeError("can't start new thread")

    ids, before = offered(ends), open_files()
    with monkeypatch.context() as patch:
        if lacking == "descriptors":
            patch.setattr(socket, "socketpair", no_descriptors)
        else:
            patch.setattr(threading.Thread, "start", no_threads)
        with pytest.raises(errors.HandoverError):
            ends.source.offer_kv(ids)
    assert ends.source.open_offers() == 0
    assert open_files() == before
    assert ends.source.offer_kv(ids).is_open()


def test_who_speaks_slowly_is_hung_up_on(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits the time of the whole frame, even if bytes keep coming."""
    monkeypatch.setattr(offer_server, "FRAME_S", 0.1)
    ids, into = offered(ends), taken(ends)
    offer, sent = ends.source.offer_kv(ids), list[bytes]()
    with connect(offer.address.split("/")[0]) as link:
        link.sendall(struct.pack("<Q", wire.ASK_BYTES_MAX))

        def is_hung_up_on() -> bool:
            with contextlib.suppress(OSError):
                link.sendall(b"x")
                sent.append(b"x")
                return False
            return True

        soon(is_hung_up_on)
    assert len(sent) < wire.ASK_BYTES_MAX  # not the end of the frame
    monkeypatch.setattr(offer_server, "FRAME_S", 20.0)
    ends.target.fetch_kv(offer.address, into)


def test_a_second_free_is_found_while_an_offer_ends(ends: Ends) -> None:
    ids = offered(ends)
    found: list[Exception] = []

    def free_again() -> None:
        try:
            ends.source.free_kv(ids)
        except errors.DoubleFreeError as error:
            found.append(error)

    other = threading.Thread(target=free_again)
    offer = ends.source.offer_kv(ids)
    open_offers = ends.source._offers
    free = open_offers._free

    def slowly(gone: np.ndarray) -> None:
        other.start()
        other.join(0.05)
        free(gone)

    open_offers._free = slowly
    ends.source.free_kv(ids)
    offer.withdraw()
    other.join()
    assert len(found) == 1
    assert ends.source.live_blocks() == 0


def test_pages_without_a_lease_are_not_given_out(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> None:
        raise errors.KvcachedError("no descriptor")

    offer = ends.source.offer_kv(offered(ends))
    before = open_files()
    with monkeypatch.context() as patch:
        patch.setattr(_core, "share_liveness", fails)
        with pytest.raises(errors.KvcachedError):
            ends.source._offers.export(offer.address.split("/")[1], 0, 2)
    assert open_files() == before


# --- the end that fetches ------------------------------------------------------------------------


@contextlib.contextmanager
def impostor(
    kv: KVCache, ids: bytes, answer: Answer, before_each: Callable[[], None] = lambda: None
) -> Iterator[str]:
    """Offers as a process with such a cache does, except for its ids and pages."""
    name, shape = f"kvcached-test-{secrets.token_hex(8)}", kv._shape
    size = (shape.page_bytes, shape.slab_pages, shape.blocks_per_slab, shape.slabs)
    terms = wire.OfferTerms("", repr(kv.layout), *size)

    def serve() -> None:
        link, _ = listener.accept()
        with link, contextlib.suppress(errors.HandoverError):
            hear(link)
            for payload in (wire.encode(terms), ids):
                before_each()
                say(link, payload)
            [(_, count)] = wire.unpack_pairs(hear(link)[0])
            payload, files = answer(count)
            say(link, payload, files)
            wire.close_all(files)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(20)
        listener.bind(f"\0{name}")
        listener.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"{name}/key"
        thread.join()


def pages_at(offset_bytes: int, length_bytes: int) -> Answer:
    """Returns an answer with a file of `length_bytes` zeros and all pages from `offset_bytes`."""

    def answer(count: int) -> tuple[bytes, list[int]]:
        file = os.memfd_create("impostor")
        os.truncate(file, length_bytes)
        places = [(0, offset_bytes + i * PAGE) for i in range(count)]
        return wire.pack_pairs(places), [file, os.dup(file)]

    return answer


GOOD = pages_at(0, 1 << 30)
IDS = np.arange(8).tobytes()
LIES = {
    "short file": (IDS, pages_at(0, PAGE), "beyond the end"),
    "empty file": (IDS, pages_at(0, 0), "beyond the end"),
    "far offset": (IDS, pages_at(1 << 62, PAGE), "beyond the end"),
    "negative offset": (IDS, pages_at(-PAGE * 1000, PAGE), "negative"),
    "odd pairs": (IDS, lambda count: (b"abc", GOOD(count)[1]), "3 bytes"),
    "odd ids": (IDS + b"abc", GOOD, "block ids"),
    "negative ids": (np.array([-1] * 8).tobytes(), GOOD, "out of range"),
    "ids of nothing": (np.array([1 << 50] * 8).tobytes(), GOOD, "out of range"),
    "no files": (IDS, lambda count: (wire.pack_pairs([(0, 0)] * count), []), "were requested"),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_cannot_be_is_not_believed(ends: Ends, lie: str) -> None:
    """Raises, leaves no descriptor open and does not end the process."""
    ids, answer, message = LIES[lie]
    into, before = taken(ends, 8), open_files()
    refused = pytest.raises(errors.HandoverError, match=message)
    with impostor(ends.target, ids, answer) as address, refused:
        ends.target.fetch_kv(address, into, timeout_s=20)
    soon(lambda: open_files() <= before)


def test_nothing_is_fetched_from_another_user(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    into, user = taken(ends, 8), os.geteuid()
    with impostor(ends.target, IDS, GOOD) as address:
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        with pytest.raises(errors.HandoverError, match="another user"):
            ends.target.fetch_kv(address, into, timeout_s=20)


def test_a_fetch_has_one_time_for_all(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times out although each single answer comes in time."""
    now_s = [time.monotonic()]
    clock = SimpleNamespace(monotonic=lambda: now_s[0])

    def wait() -> None:
        now_s[0] += 6.0

    into = taken(ends, 8)
    monkeypatch.setattr(fetch, "time", clock)
    monkeypatch.setattr(wire, "time", clock)
    late = pytest.raises(errors.HandoverError, match="hand-over timed out")
    with impostor(ends.target, IDS, GOOD, wait) as address, late:
        ends.target.fetch_kv(address, into, timeout_s=10.0)


def test_json_without_end_is_no_message() -> None:
    with pytest.raises(errors.HandoverError, match="did not send JSON"):
        wire.decode_terms(b"[" * 100_000)


def test_received_descriptors_are_this_programs_alone() -> None:
    """Prevents their inheritance by other programs. Descriptors that did not fit raise."""
    before = open_files()
    file = os.memfd_create("sent")
    here, there = socket.socketpair()
    with here, there:
        say(here, b"one", [file])
        payload, files = hear(there, 1)
        assert payload == b"one"
        assert [os.get_inheritable(each) for each in files] == [False]
        say(here, b"three", [file] * 3)
        with pytest.raises(errors.HandoverError, match="descriptors were lost"):
            hear(there, 1)
    wire.close_all([file, *files])
    assert open_files() == before
