"""Changes by an administrator for clients of other processes, without calls by those clients."""

from __future__ import annotations

import subprocess

import pytest

from kvcached import ClientUsage, Device, NoRoomError, errors

from .conftest import CAPACITY, EVERY_DEVICE, PAGE, Spawn

pytestmark = EVERY_DEVICE


class Taker:
    """Client in another process that reserves pages on command, and reports its pages."""

    def __init__(self, spawn: Spawn, name: str = "taker") -> None:
        self.process: subprocess.Popen[str] = spawn("take", name)
        assert self._read() == "ready"

    def take(self, pages: int) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{pages}\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


def usage_of(device: Device, name: str) -> ClientUsage:
    (found,) = [client for client in device.usage().clients if client.name == name]
    return found


def test_a_limit_of_another_process_goes_down_and_up(device: Device, spawn: Spawn) -> None:
    taker = Taker(spawn)
    assert taker.take(4) == "got 4"
    device.set_limit("taker", 6 * PAGE)
    assert taker.take(3) == f"refused, {2 * PAGE} free"
    assert taker.take(2) == "got 2"
    device.set_limit("taker", PAGE)  # below what it holds: no growth, nothing is taken away
    assert taker.take(1) == "refused, 0 free"
    assert usage_of(device, "taker").committed_bytes == 6 * PAGE
    device.set_limit("taker", 7 * PAGE)
    assert taker.take(1) == "got 1"
    device.set_limit("taker", None)
    assert taker.take(100) == "got 100"
    assert usage_of(device, "taker").limit_bytes is None


def test_a_minimum_of_another_process_is_kept_from_the_rest(device: Device, spawn: Spawn) -> None:
    taker = Taker(spawn)
    device.set_min("taker", 10 * PAGE)
    assert device.usage().free_bytes == CAPACITY - 10 * PAGE
    with device.client("rival") as rival:
        tensor = rival.alloc_virtual_tensor(CAPACITY)
        with pytest.raises(NoRoomError):
            tensor.map(0, CAPACITY - 9 * PAGE)
        tensor.map(0, CAPACITY - 10 * PAGE)
        with pytest.raises(NoRoomError, match="minimum is not free"):
            device.set_min("taker", 11 * PAGE)
        assert taker.take(10) == "got 10"
    device.set_min("taker", 0)
    assert usage_of(device, "taker").min_bytes == 0


def test_clients_are_found_by_name_and_pid(device: Device, spawn: Spawn) -> None:
    first, second = Taker(spawn, "twin"), Taker(spawn, "twin")
    with pytest.raises(errors.AmbiguousClientError, match=rf"pid {first.process.pid}.*its pid"):
        device.set_limit("twin", PAGE)
    device.set_limit(first.process.pid, PAGE)
    device.set_limit("twin", 2 * PAGE, pid=second.process.pid)
    limits = {client.pid: client.limit_bytes for client in device.usage().clients}
    assert limits == {first.process.pid: PAGE, second.process.pid: 2 * PAGE}
    assert (first.take(2), second.take(2)) == (f"refused, {PAGE} free", "got 2")


def test_clients_of_one_process_differ_by_name(device: Device) -> None:
    with device.client("a") as a, device.client("b"):
        with pytest.raises(errors.AmbiguousClientError, match=r"a \(pid \d+\), b \(pid"):
            device.set_min(a.usage().pid, PAGE)
        device.set_min("a", PAGE, pid=a.usage().pid)
        assert a.usage().min_bytes == PAGE


def test_clients_of_one_name_in_one_process_differ_by_number(device: Device) -> None:
    with device.client("twin") as first, device.client("twin") as second:
        numbers = [client.usage().number for client in (first, second)]
        advice = f"by its number: {numbers[0]}, {numbers[1]}"
        with pytest.raises(errors.AmbiguousClientError, match=advice):
            device.set_limit("twin", PAGE, pid=first.usage().pid)
        device.set_limit("twin", PAGE, number=numbers[1])
        device.set_min(first.usage().pid, 2 * PAGE, number=numbers[0])
        found = [(c.usage().limit_bytes, c.usage().min_bytes) for c in (first, second)]
        assert found == [(None, 2 * PAGE), (PAGE, 0)]
        device.order_shrink("twin", number=numbers[0], wait_s=60)
        asked = [client.shrink_request() is not None for client in (first, second)]
        assert asked == [True, False]


def test_a_pid_alone_names_its_clients(device: Device, spawn: Spawn) -> None:
    taker = Taker(spawn)
    with device.client("bystander") as bystander:
        for pid in (1, 999999):
            with pytest.raises(errors.UnknownClientError, match="no such client"):
                device.shrink(pid=pid)
            with pytest.raises(errors.UnknownClientError, match="no such client"):
                device.order_shrink(pid=pid)
        device.order_shrink(pid=taker.process.pid, wait_s=60)
        assert usage_of(device, "taker").asked_bytes > 0
        assert bystander.shrink_request() is None


def test_nobody_is_named(device: Device, spawn: Spawn) -> None:
    with pytest.raises(errors.UnknownClientError, match="there are none"):
        device.set_limit("ghost", PAGE)
    taker = Taker(spawn)
    with pytest.raises(errors.UnknownClientError, match=rf"taker \(pid {taker.process.pid}\)"):
        device.set_limit("ghost", PAGE)
    with pytest.raises(errors.UnknownClientError):
        device.set_min("taker", PAGE, pid=1)
    taker.process.kill()
    taker.process.wait()
    with pytest.raises(errors.UnknownClientError, match="there are none"):
        device.set_limit("taker", PAGE)


def test_bad_values_change_nothing(device: Device) -> None:
    with device.client("a", min_bytes=2 * PAGE, limit_bytes=4 * PAGE) as client:
        with pytest.raises(errors.InvalidArgumentError, match="below min_bytes"):
            device.set_limit("a", PAGE)
        with pytest.raises(errors.InvalidArgumentError, match="above limit_bytes"):
            device.set_min("a", 5 * PAGE)
        for bad in (-1, 2**63, 1.5, True):
            with pytest.raises(errors.InvalidArgumentError, match="limit_bytes"):
                device.set_limit("a", bad)  # type: ignore[arg-type]
            with pytest.raises(errors.InvalidArgumentError, match="min_bytes"):
                device.set_min("a", bad)  # type: ignore[arg-type]
        with pytest.raises(errors.InvalidArgumentError, match="client is already a pid"):
            device.set_min(5, PAGE, pid=5)
        with pytest.raises(errors.InvalidArgumentError, match=r"pid is 2147483648.*2\^31 - 1"):
            device.set_min("a", PAGE, pid=2**31)
        assert (client.usage().min_bytes, client.usage().limit_bytes) == (2 * PAGE, 4 * PAGE)


def test_residency_is_reported_per_client(device: Device, spawn: Spawn) -> None:
    taker = Taker(spawn)
    assert taker.take(3) == "got 3"
    with device.client("idle"):
        usage, resident_bytes = device.residency()
        assert usage == device.usage()
    by_name = {c.name: b for c, b in zip(usage.clients, resident_bytes, strict=True)}
    assert by_name == {"taker": 3 * PAGE, "idle": 0}
