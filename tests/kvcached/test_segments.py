"""Detection of ledgers that no process uses, and removal of these alone."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator

import pytest

from kvcached import Device, Segment, collect_garbage, errors, segment_path, segments

from .conftest import CAPACITY, PAGE, Spawn
from .test_sharing import wait_for


@pytest.fixture
def left_behind(namespace: str) -> Iterator[str]:
    """Yields the namespace of a ledger that no process has open."""
    Device.open("host:0", capacity_bytes=CAPACITY, page_bytes=PAGE, namespace=namespace).close()
    yield namespace
    segment_path("host:0", namespace).unlink(missing_ok=True)


def segment_of(namespace: str) -> Segment:
    (found,) = segments(namespace)
    return found


def collected(namespace: str, dry_run: bool = False) -> bool:
    """Returns whether the namespace's segment was garbage, which is removed unless `dry_run`."""
    path = segment_path("host:0", namespace)
    existed = path.is_symlink() or path.exists()
    garbage = [segment.path for segment in collect_garbage(dry_run, namespace)]
    assert garbage in ([], [path])
    assert (path.is_symlink() or path.exists()) is (existed and (dry_run or not garbage))
    return bool(garbage)


def overwrite(namespace: str, offset: int, content: bytes) -> None:
    with segment_path("host:0", namespace).open("r+b") as segment:
        segment.seek(offset)
        segment.write(content)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def test_a_device_in_use_is_described_and_stays(device: Device, namespace: str) -> None:
    with device.client("engine"):
        found = segment_of(namespace)
        assert (found.device, found.path) == ("host:0", segment_path("host:0", namespace))
        assert (found.version, found.capacity_bytes, found.page_bytes) == (4, CAPACITY, PAGE)
        assert [(c.name, c.pid, c.alive) for c in found.clients] == [("engine", os.getpid(), True)]
        assert found.stale_reason is None
        assert not collected(namespace)


def test_a_device_that_is_open_without_clients_stays(device: Device, namespace: str) -> None:
    assert segment_of(namespace).stale_reason is None
    assert not collected(namespace)
    assert device.usage().free_bytes == CAPACITY


def test_a_device_that_another_process_has_open_stays_until_it_dies(
    left_behind: str, spawn: Spawn
) -> None:
    watcher = spawn("watch")
    wait_for(watcher, "ready")
    assert segment_of(left_behind).stale_reason is None
    assert not collected(left_behind)
    end(watcher)
    assert segment_of(left_behind).stale_reason == "no living process has it open"
    assert collected(left_behind, dry_run=True)
    assert collected(left_behind)
    assert not collected(left_behind)


def test_a_killed_client_is_shown_dead_and_its_segment_goes(left_behind: str, spawn: Spawn) -> None:
    holder = spawn("hold", PAGE)
    wait_for(holder, "ready")
    assert segment_of(left_behind).clients_alive == 1
    end(holder)
    found = segment_of(left_behind)
    assert (found.clients_alive, found.clients_dead) == (0, 1)
    assert [(client.name, client.alive) for client in found.clients] == [("holder", False)]
    assert collected(left_behind)


def test_an_earlier_boot_is_recognised(left_behind: str) -> None:
    overwrite(left_behind, 16, b"00000000-0000")
    assert segment_of(left_behind).stale_reason == "it is of an earlier boot"
    assert collected(left_behind)


def test_another_version_is_stale_once_nobody_uses_it(left_behind: str) -> None:
    user = Device.open("host:0", namespace=left_behind)
    overwrite(left_behind, 8, (99).to_bytes(4, "little"))
    found = segment_of(left_behind)
    assert (found.version, found.capacity_bytes, found.stale_reason) == (99, None, None)
    assert not collected(left_behind)
    user.close()
    assert "version 99" in (segment_of(left_behind).stale_reason or "")
    assert collected(left_behind)


def test_another_size_is_no_other_version(left_behind: str) -> None:
    overwrite(left_behind, 12, (16).to_bytes(4, "little"))
    said = segment_of(left_behind).stale_reason or ""
    assert said.startswith("a ledger of 16 bytes, that of this library has ")
    with pytest.raises(
        errors.LedgerVersionError, match="has a ledger of 16 bytes, that of this library"
    ):
        Device.open("host:0", namespace=left_behind)
    assert collected(left_behind)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "its creator died before it was finished"),
        (bytes(5000), "its creator died before it was finished"),
        (b"not one.", "it is not a ledger"),
        (b"KVLEDGER\x01\0\0\0", "version 1 of the ledger"),
    ],
)
def test_damaged_files_are_named(left_behind: str, content: bytes, reason: str) -> None:
    segment_path("host:0", left_behind).write_bytes(content)
    assert reason in (segment_of(left_behind).stale_reason or "")
    assert collected(left_behind)


def test_random_damage_is_listed_and_collected(left_behind: str) -> None:
    path = segment_path("host:0", left_behind)
    whole = path.read_bytes()
    chooser = random.Random(3)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(chooser.randrange(1, 40)):
            damaged[chooser.randrange(chooser.choice((128, len(whole))))] = chooser.randrange(256)
        path.write_bytes(damaged[: chooser.choice((len(whole), chooser.randrange(len(whole))))])
        found = segment_of(left_behind)
        assert found.problem is None
        assert found.stale_reason or found.clients_alive  # damage may name a live process
    path.write_bytes(b"")
    assert collected(left_behind)


def test_names_with_dots_are_split_rightly(namespace: str) -> None:
    dotted = f"{namespace}.a.b"
    device = Device.open("host:12", capacity_bytes=PAGE, page_bytes=PAGE, namespace=dotted)
    found = segment_of(dotted)
    assert (found.namespace, found.device) == (dotted, "host:12")
    device.destroy()


def test_what_cannot_be_read_is_shown_and_stays(namespace: str) -> None:
    path = segment_path("host:0", namespace)
    path.symlink_to("/etc/hostname")
    found = segment_of(namespace)
    assert found.stale_reason is None
    assert "open" in (found.problem or "")
    assert not collected(namespace)
    path.unlink()


@pytest.mark.skipif(os.getuid() != 0, reason="becoming another user takes root")
def test_others_files_are_shown_but_stay(left_behind: str, spawn: Spawn) -> None:
    segment_path("host:0", left_behind).chmod(0o600)
    said, _ = spawn("look_around_as_nobody").communicate(timeout=60)
    assert said.splitlines() == ["no permission", "removed False False"]
    assert segment_path("host:0", left_behind).exists()


def test_every_namespace_is_listed_in_order(device: Device, namespace: str) -> None:
    others = [f"{namespace}-{letter}" for letter in "ba"]
    made = [
        Device.open("host:0", capacity_bytes=PAGE, page_bytes=PAGE, namespace=other)
        for other in others
    ]
    found = [s.namespace for s in segments() if s.namespace.startswith(namespace)]
    assert found == [namespace, *sorted(others)]
    for opened in made:
        opened.destroy()
