"""Hand-over of blocks between processes, of which either one dies."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from kvcached import Device, KVCache, _core, errors
from kvcached.handover import fetch, wire

from .conftest import CAPACITY, PAGE, TINY
from .handover_ends import COMMAND, Source, connect, hear, say, soon
from .handover_source import content, read
from .libcuda import LibCuda


@pytest.fixture
def target(namespace: str, names: tuple[str, str], libcuda: LibCuda) -> Iterator[KVCache]:
    device = Device.open(names[1], capacity_bytes=CAPACITY, page_bytes=PAGE, namespace=namespace)
    client = device.client("target", background=False)
    yield client.alloc_kvcache(TINY, 8000)
    client.close()
    device.close()
    Device.unlink(namespace, names[1])


def test_from_another_process(namespace: str, names: tuple[str, str], target: KVCache) -> None:
    with Source(namespace, names[0], 40) as source:
        into = target.alloc_kv(40)
        assert into is not None
        address = source.line("offer 60")
        source.line("free")
        target.fetch_kv(address, into)
        assert (read(target, into) == content(target, 40)).all()
        assert source.line("open") == "0"
        assert source.line("live") == "0"


@pytest.mark.parametrize("names", [("host:0", "host:0"), ("cuda:0", "cuda:1")], ids="-".join)
def test_a_source_that_dies_is_charged_until_its_pages_are_not_read(
    namespace: str, names: tuple[str, str], target: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills the source while a window shows its pages. Its record stays until the window is closed,
    the fetch fails, and the ledger returns to its first state."""
    with Source(namespace, names[0], 400) as source:
        into = target.alloc_kv(400)
        assert into is not None
        address = source.line("offer 60")
        device = Device.open(names[0], namespace=namespace)
        copy_in, seen = _core.copy_in, []

        def kill_first(*arguments: object) -> None:
            source.process.send_signal(signal.SIGKILL)
            source.process.wait()
            seen.append([c.name for c in device.usage().clients])
            copy_in(*arguments)  # its memory is still there

        monkeypatch.setattr(fetch._core, "copy_in", kill_first)
        with pytest.raises(errors.HandoverError):
            target.fetch_kv(address, into)
        assert "source" in seen[0]
        assert "source" not in [c.name for c in device.usage().clients]
        device.close()


@pytest.mark.parametrize("names", [("host:0", "host:0")], ids="-".join)
def test_a_target_that_dies_ends_the_offer(namespace: str, names: tuple[str, str]) -> None:
    """Frees the source's blocks if the target dies before it reads or while it reads."""
    with Source(namespace, names[0], 40) as source:
        for moment in ("introduced", "reading"):
            address = source.line("offer 60")
            name, key = address.split("/")
            with connect(name) as link:
                say(link, wire.encode(wire.Hello(key, False, 0)))
                assert not wire.decode_terms(hear(link)[0]).refusal
                hear(link)
                if moment == "reading":
                    say(link, wire.pack_pairs([(0, 1)]))
                    wire.close_all(hear(link, 5)[1])
                assert source.line("open") == "1"
            soon(lambda: source.line("open") == "0")
        source.line("free")
        assert source.line("live") == "0"


@pytest.mark.parametrize(
    ("setting", "offers_made"),
    [("KVCACHED_TEST_CUDA_PEERS", True), ("KVCACHED_TEST_CUDA_EXPORTS", False)],
)
def test_gpus_that_share_nothing(
    namespace: str, libcuda: LibCuda, setting: str, offers_made: bool
) -> None:
    """Reports a missing link before the fetch and in it. A driver that shares no memory makes no
    offers."""
    with Source(namespace, "cuda:0", 8, **{setting: "0"}) as source:
        assert source.line("reach cuda:1") == "False"
        answer = source.line("offer 60")
        assert answer.startswith("error BackendUnavailableError") != offers_made
        if offers_made:
            done = subprocess.run(
                [*COMMAND, "fetch", namespace, "cuda:1", answer, "8"],
                env={**os.environ, setting: "0"},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.stdout.startswith("error HandoverError"), done.stderr
            assert source.line("open") == "0"
