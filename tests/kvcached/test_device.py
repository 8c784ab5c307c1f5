"""Opening, sharing and removing devices, and all their failures."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvcached import Device, errors, segment_path

from .conftest import CAPACITY, PAGE, TINY, Spawn


def test_a_second_open_attaches(device: Device, namespace: str) -> None:
    attached = Device.open("host:0", namespace=namespace)
    assert (attached.capacity_bytes, attached.page_bytes) == (CAPACITY, PAGE)
    with device.client("a"):
        assert [client.name for client in attached.usage().clients] == ["a"]
    assert attached.usage().free_bytes == CAPACITY


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("tpu:0", errors.UnknownDeviceError),
        ("host", errors.UnknownDeviceError),
        ("host:-1", errors.UnknownDeviceError),
        ("", errors.UnknownDeviceError),
    ],
)
def test_names(name: str, error: type[Exception]) -> None:
    with pytest.raises(error, match="host:0"):
        Device.open(name, capacity_bytes=CAPACITY, page_bytes=PAGE)


@pytest.mark.parametrize(
    ("capacity_bytes", "page_bytes", "error", "says"),
    [
        (PAGE - 1, PAGE, errors.InvalidArgumentError, "below one page"),
        (PAGE + 1, PAGE, errors.AlignmentError, "multiple of page_bytes"),
        (0, PAGE, errors.InvalidArgumentError, "capacity_bytes is 0"),
        (-PAGE, PAGE, errors.InvalidArgumentError, "capacity_bytes is -"),
        (2**70, PAGE, errors.InvalidArgumentError, "capacity_bytes is"),
        (CAPACITY, 1000, errors.AlignmentError, "page_bytes 1000"),
        (CAPACITY, 0, errors.InvalidArgumentError, "page_bytes is 0"),
        (1 << 20, None, errors.InvalidArgumentError, "below one page of 2097152"),
    ],
)
def test_bad_geometry_creates_nothing(
    namespace: str, capacity_bytes: int, page_bytes: int | None, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        Device.open(
            "host:0", capacity_bytes=capacity_bytes, page_bytes=page_bytes, namespace=namespace
        )
    assert not segment_path("host:0", namespace).exists()


def test_types_and_namespaces_are_checked(namespace: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="must be an integer, not float"):
        Device.open("host:0", capacity_bytes=1e9, namespace=namespace)  # type: ignore[arg-type]
    for bad in ("", "a/b", "x" * 65):
        with pytest.raises(errors.InvalidArgumentError, match="namespace"):
            Device.open("host:0", capacity_bytes=CAPACITY, namespace=bad)


def test_attaching_needs_a_ledger(namespace: str) -> None:
    with pytest.raises(errors.UnknownDeviceError, match="capacity_bytes to create"):
        Device.open("host:0", namespace=namespace)
    assert not Device.unlink(namespace, "host:0")


@pytest.mark.parametrize("changed", [{"capacity_bytes": 2 * CAPACITY}, {"page_bytes": 2 * PAGE}])
def test_another_geometry_is_refused(
    device: Device, namespace: str, changed: dict[str, int]
) -> None:
    wanted = {"capacity_bytes": CAPACITY, "page_bytes": PAGE, **changed}
    with pytest.raises(errors.DeviceMismatchError, match=f"capacity_bytes {CAPACITY} and"):
        Device.open("host:0", namespace=namespace, **wanted)
    assert device.usage().free_bytes == CAPACITY


def overwrite(namespace: str, offset: int, content: bytes) -> None:
    with segment_path("host:0", namespace).open("r+b") as segment:
        segment.seek(offset)
        segment.write(content)


def test_another_library_version_is_refused(device: Device, namespace: str) -> None:
    overwrite(namespace, 8, (99).to_bytes(4, "little"))
    with pytest.raises(errors.LedgerVersionError, match=r"version 99.*stop all engines"):
        Device.open("host:0", capacity_bytes=CAPACITY, page_bytes=PAGE, namespace=namespace)
    with pytest.raises(errors.DeviceBusyError, match=r"open and may hold memory.*end it"):
        Device.unlink(namespace, "host:0")
    assert segment_path("host:0", namespace).exists()
    device.close()
    assert Device.unlink(namespace, "host:0")
    assert not Device.unlink(namespace, "host:0")


def test_what_is_no_ledger_is_refused(device: Device, namespace: str) -> None:
    overwrite(namespace, 0, b"not one.")
    with pytest.raises(errors.LedgerCorruptError, match="not a kvcached ledger"):
        Device.open("host:0", namespace=namespace)
    overwrite(namespace, 0, b"KVLEDGER")
    with segment_path("host:0", namespace).open("r+b") as segment:
        segment.truncate(1000)
    with pytest.raises(errors.LedgerCorruptError, match="wrong size"):
        Device.open("host:0", namespace=namespace)
    segment_path("host:0", namespace).write_bytes(b"short")
    with pytest.raises(errors.LedgerCorruptError, match="not a kvcached ledger"):
        Device.open("host:0", namespace=namespace)


def test_a_ledger_of_an_earlier_boot_is_used_by_nobody(namespace: str) -> None:
    stale = Device.open("host:0", capacity_bytes=CAPACITY, page_bytes=PAGE, namespace=namespace)
    overwrite(namespace, 16, b"00000000-0000")
    with pytest.raises(errors.LedgerCorruptError, match="in use, but it is of another boot"):
        Device.open("host:0", capacity_bytes=PAGE, page_bytes=PAGE, namespace=namespace)
    stale.close()
    with pytest.raises(errors.UnknownDeviceError, match="capacity_bytes to create"):
        Device.open("host:0", namespace=namespace)
    assert not segment_path("host:0", namespace).exists()


def test_a_ledger_of_an_earlier_boot_is_replaced(namespace: str) -> None:
    Device.open("host:0", capacity_bytes=CAPACITY, page_bytes=PAGE, namespace=namespace).close()
    overwrite(namespace, 16, b"00000000-0000")
    fresh = Device.open("host:0", capacity_bytes=PAGE, page_bytes=PAGE, namespace=namespace)
    assert fresh.capacity_bytes == PAGE
    fresh.destroy()


def test_a_creator_that_died_half_way_is_replaced(namespace: str) -> None:
    segment_path("host:0", namespace).write_bytes(bytes(5000))
    device = Device.open("host:0", capacity_bytes=PAGE, page_bytes=PAGE, namespace=namespace)
    assert device.usage().free_bytes == PAGE
    device.destroy()


@pytest.mark.skipif(os.getuid() != 0, reason="becoming another user takes root")
def test_no_permission_is_named(device: Device, spawn: Spawn, namespace: str) -> None:
    segment_path("host:0", namespace).chmod(0o600)
    said, _ = spawn("open_as_nobody").communicate(timeout=60)
    assert "no permission on" in said
    assert "another namespace" in said


def test_full_shared_memory_is_named_and_leaves_nothing(
    device: Device, namespace: str, tmp_path: Path
) -> None:
    unshare = shutil.which("unshare")
    flags = [] if os.getuid() == 0 else ["--map-root-user"]
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "none", str(tmp_path)]
    if unshare is None or subprocess.call([unshare, "-m", *flags, *mount]) != 0:
        pytest.skip("a small tmpfs cannot be mounted here")
    worker = [sys.executable, str(Path(__file__).parent / "worker.py")]
    command = " ".join([*mount, "&&", *worker, "create_in", namespace, "host:0", str(tmp_path)])
    done = subprocess.run(
        [unshare, "-m", *flags, "sh", "-c", command], capture_output=True, text=True, check=True
    )
    assert "no room for the ledger" in done.stdout, done.stderr
    assert done.stdout.strip().endswith("left:")


def test_a_host_device_is_no_larger_than_the_machine(namespace: str) -> None:
    opened = Device.open("host:0", capacity_bytes=16 << 40, namespace=namespace)
    with pytest.raises(errors.DeviceOccupiedError, match="16777216 MiB, but this machine"):
        opened.check_capacity()
    opened.destroy()


def test_a_file_that_was_removed_under_clients_is_named(device: Device, namespace: str) -> None:
    with device.client("engine") as client:
        segment_path("host:0", namespace).unlink()
        time.sleep(0.3)
        for call in (device.usage, lambda: client.reserve_static(PAGE, "weights")):
            with pytest.raises(errors.DeviceGoneError, match=r"restart all clients.*RemoveIPC"):
                call()


def test_destroy_waits_for_clients(device: Device, namespace: str) -> None:
    client = device.client("a")
    with pytest.raises(errors.DeviceBusyError, match="close them first"):
        device.destroy()
    with pytest.raises(errors.DeviceBusyError, match="close them first"):
        Device.unlink(namespace, "host:0")
    device.destroy(force=True)
    with pytest.raises(errors.DeviceGoneError, match="open it again"):
        client.reserve_static(1, "x")
    client.close()
    with pytest.raises(errors.ClosedError):
        device.usage()


def test_client_arguments_are_checked(device: Device) -> None:
    for bad in ("", "x" * 64):
        with pytest.raises(errors.InvalidArgumentError, match="1 to 63 bytes"):
            device.client(bad)
    with pytest.raises(errors.InvalidArgumentError, match="min_bytes is above limit_bytes"):
        device.client("a", min_bytes=2 * PAGE, limit_bytes=PAGE)
    with pytest.raises(errors.InvalidArgumentError, match="min_bytes is -1"):
        device.client("a", min_bytes=-1)
    with pytest.raises(errors.NoRoomError, match="minimum is not free"):
        device.client("a", min_bytes=CAPACITY + PAGE)
    assert device.usage().clients == ()


@pytest.mark.skipif(os.getuid() != 0, reason="becoming another user takes root")
def test_memory_that_may_not_be_looked_at_is_named(
    device: Device, spawn: Spawn, namespace: str
) -> None:
    segment_path("host:0", namespace).chmod(0o666)
    with device.client("owner"):
        said, _ = spawn("look_as_nobody").communicate(timeout=60)
    assert "no permission to read the memory of process" in said


def test_a_device_closes_with_its_block(namespace: str) -> None:
    with Device.open("host:0", capacity_bytes=CAPACITY, page_bytes=PAGE, namespace=namespace) as it:
        assert repr(it) == f"Device('host:0', namespace={namespace!r})"
        with it.client("engine") as client:
            kv = client.alloc_kvcache(TINY, 1)
            tensor = client.alloc_virtual_tensor(PAGE)
            assert [repr(each) for each in (client, tensor, client.reserve_static(1, "x"))] == [
                "Client('engine')",
                "VirtualTensor(65536 bytes, 0 mapped)",
                "StaticLease('x', 1 bytes)",
            ]
            assert repr(kv).startswith(f"KVCache({kv.num_blocks} blocks, 0 live, ")
    assert repr(it).endswith(", closed)")
    with pytest.raises(errors.ClosedError):
        it.usage()
    Device.unlink(namespace, "host:0")
