"""`kvctl` on real devices, with typer's runner in this process and as a separate process."""

from __future__ import annotations

import json
import os
import pty
import signal
import struct
import subprocess
import sys
import time
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcached import Device, NoRoomError, segment_path
from kvcached.errors import InvalidArgumentError
from kvcached.monitoring.snapshot import take_snapshots
from kvcached.tools.commands import app
from kvcached.tools.rates import Rates
from kvcached.tools.sizes import format_size, parse_size

from .conftest import CAPACITY, PAGE, Spawn
from .pid_namespace import LOCK_OFFSET, segment_of
from .test_admin import Taker, usage_of

KVCTL = [sys.executable, "-m", "kvcached.tools.cli"]


def kvctl(*arguments: str) -> str:
    done = CliRunner().invoke(app, [*arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def kvctl_json(*arguments: str) -> Any:
    return json.loads(kvctl(*arguments, "--json"))


def refused(*arguments: str) -> str:
    """Returns the single line of a call that is refused."""
    done = subprocess.run([*KVCTL, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kvctl: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_list_shows_what_is_used_and_what_is_stale(device: Device, namespace: str) -> None:
    with device.client("engine"):
        (found,) = kvctl_json("list", "--namespace", namespace)
        shown = kvctl("list", "--namespace", namespace)
    assert (found["device"], found["capacity_bytes"], found["clients_alive"]) == (
        "host:0",
        CAPACITY,
        1,
    )
    assert found["clients"] == [{"name": "engine", "pid": os.getpid(), "alive": True}]
    assert "64 MiB" in shown
    assert "in use" in shown
    device.close()
    assert "stale: no living process" in kvctl("list", "--namespace", namespace)


def test_top_names_the_holder_of_a_locked_ledger(device: Device, namespace: str) -> None:
    device.usage()  # takes the lock last, so that the lock is this process's below
    segment = segment_of(namespace)
    struct.pack_into("<I", segment, LOCK_OFFSET, 1)
    started = time.monotonic()
    refusal = refused("top", "--once", "--namespace", namespace)
    assert time.monotonic() - started < 10
    assert f"kvctl: {namespace}/host:0: the ledger has been locked for too long" in refusal
    assert f"by process {os.getpid()}, which makes no progress" in refusal
    struct.pack_into("<I", segment, LOCK_OFFSET, 0)
    assert f"{namespace}/host:0 [" in kvctl("top", "--once", "--namespace", namespace)


def test_gc_removes_what_the_dry_run_names(device: Device, namespace: str) -> None:
    assert kvctl_json("gc", "--namespace", namespace) == []
    assert kvctl("gc", "--namespace", namespace) == "nothing is stale\n"
    device.close()
    dry = kvctl("gc", "--dry-run", "--namespace", namespace)
    assert dry == f"would remove {namespace}/host:0: no living process has it open\n"
    assert segment_path("host:0", namespace).exists()
    (gone,) = kvctl_json("gc", "--namespace", namespace)
    assert gone["namespace"] == namespace
    assert not segment_path("host:0", namespace).exists()


def test_limit_governs_a_running_process(device: Device, spawn: Spawn, namespace: str) -> None:
    taker = Taker(spawn)
    said = kvctl("limit", "taker", f"{2 * PAGE}", "--namespace", namespace)
    assert said == f"taker on {namespace}/host:0: limit 128 KiB\n"
    assert taker.take(3) == f"refused, {2 * PAGE} free"
    pid = str(taker.process.pid)
    done = kvctl_json("limit", pid, "NONE", "--namespace", namespace, "--device", "host:0")
    assert done == {"namespace": namespace, "device": "host:0", "client": pid, "limit_bytes": None}
    assert taker.take(3) == "got 3"
    assert kvctl_json("min", "taker", "1MiB", "-n", namespace)["min_bytes"] == 1 << 20
    assert usage_of(device, "taker").min_bytes == 1 << 20


def test_trim_says_what_each_client_gave(device: Device, spawn: Spawn, namespace: str) -> None:
    where = ("--namespace", namespace)
    assert kvctl("trim", *where) == "no clients\n"
    engine = spawn("shrink", "engine", 32, 0, 16)
    assert engine.stdout is not None
    assert engine.stdout.readline() == "ready\n"
    (found,) = kvctl_json("top", "--once", "--interval", "0.05", *where)
    given = {key: found["clients"][0][key] for key in ("spare_bytes", "evictable_bytes")}
    assert given == {"spare_bytes": 8 * PAGE, "evictable_bytes": 16 * PAGE}
    (answer,) = kvctl_json("trim", "engine", "--bytes", f"{12 * PAGE}", "--wait", "30", *where)
    assert answer["outcome"] == "answered"
    assert (answer["returned_bytes"], answer["evicted_tokens"]) == (12 * PAGE, 8 * 16)
    shown = kvctl("trim", str(engine.pid), "--wait", "30", *where)
    assert shown.splitlines()[1].split() == [
        str(engine.pid),
        "engine",
        "768",
        "KiB",
        "384",
        "answered",
    ]
    assert "no such client; clients: engine" in refused("trim", "nobody", *where)
    assert "size '5 pages' is not valid" in refused("trim", "engine", "--bytes", "5 pages", *where)
    os.kill(engine.pid, signal.SIGSTOP)
    done = CliRunner().invoke(app, ["trim", "--wait", "0.05", "--json", *where])
    assert (done.exit_code, json.loads(done.output)[0]["outcome"]) == (1, "no answer")


def test_twins_of_one_process_are_named_by_number(device: Device, namespace: str) -> None:
    where = ("--namespace", namespace)
    with device.client("twin") as first, device.client("twin") as second:
        assert "by its number: " in refused("limit", "twin", "1MiB", *where)
        kvctl("limit", "twin", "1MiB", "--number", str(second.usage().number), *where)
        assert (first.usage().limit_bytes, second.usage().limit_bytes) == (None, 1 << 20)
        assert "no such client" in refused("trim", "--pid", "999999", *where)
        assert (first.shrink_request(), second.shrink_request()) == (None, None)


@pytest.mark.parametrize("device_name", ["cuda:0"])
def test_a_gpu_is_administered_without_its_driver(
    device: Device, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ("--namespace", namespace)
    with device.client("engine") as client:
        tensor = client.alloc_virtual_tensor(4 * PAGE)
        tensor.map(0, 2 * PAGE)
        monkeypatch.setenv("KVCACHED_LIBCUDA", "/nowhere/libcuda.so")
        command = [*KVCTL, "top", "--once", "--interval", "0.05", "--json", *where]
        (found,) = json.loads(subprocess.check_output(command))
        assert found["clients"][0]["resident_bytes"] == 2 * PAGE
        subprocess.check_call([*KVCTL, "limit", "engine", "128KiB", *where])
        with pytest.raises(NoRoomError):
            tensor.map(2 * PAGE, PAGE)


def test_one_of_two_twins_is_named_by_its_pid(device: Device, spawn: Spawn, namespace: str) -> None:
    pid = Taker(spawn, "twin").process.pid
    Taker(spawn, "twin")
    kvctl("limit", "twin", "1MiB", "--namespace", namespace, "--pid", str(pid))
    assert [c.pid for c in device.usage().clients if c.limit_bytes == 1 << 20] == [pid]
    assert "name one by its pid" in refused("limit", "twin", "1MiB", "--namespace", namespace)


def test_top_once_says_what_each_client_holds(device: Device, spawn: Spawn, namespace: str) -> None:
    taker = Taker(spawn)
    taker.take(16)
    device.set_limit("taker", CAPACITY // 2)
    device.set_min("taker", CAPACITY // 4)
    arguments = ("top", "--once", "--interval", "0.05", "--namespace", namespace)
    shown = kvctl(*arguments)
    assert f"{namespace}/host:0 [|::::" in shown
    assert "16 MiB of 64 MiB (25%), 48 MiB free" in shown
    line = shown.splitlines()[2].split("  ")
    cells = [cell.strip() for cell in line if cell.strip()]
    assert cells[0].split()[-1] in {str(taker.process.pid), "taker"}
    assert cells[-8:] == ["1 MiB", "1 MiB", "0 B", "32 MiB", "16 MiB", "0 B", "1 MiB", "0"]
    (found,) = kvctl_json(*arguments)
    assert found["free_bytes"] == CAPACITY * 3 // 4
    assert found["clients"][0]["resident_bytes"] == 16 * PAGE
    assert found["clients"][0]["maps_per_s"] == 0
    assert kvctl_json(*arguments, "--device", "host:1") == []
    assert kvctl(*arguments, "--device", "host:1") == "no devices in use\n"


def test_rates_are_differences_over_time(device: Device, namespace: str) -> None:
    rates = Rates()
    with device.client("mover") as client:
        tensor = client.alloc_virtual_tensor(8 * PAGE)
        rates.update(10.0, take_snapshots(namespace))
        for page in range(6):
            tensor.map(page * PAGE, PAGE)
        (snapshot,) = take_snapshots(namespace)
        assert rates.maps_per_s(snapshot, snapshot.usage.clients[0]) is None
        rates.update(12.0, [snapshot])
        assert rates.maps_per_s(snapshot, snapshot.usage.clients[0]) == 3.0


def test_top_is_live_on_a_terminal_and_ends_on_ctrl_c(
    device: Device, spawn: Spawn, namespace: str
) -> None:
    taker = Taker(spawn)
    master, slave = pty.openpty()
    command = [*KVCTL, "top", "--interval", "0.05", "--namespace", namespace]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    live = subprocess.Popen(command, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    read_until(master, b"taker")
    taker.take(1024 - 1)
    read_until(master, b"63.9 MiB")
    live.send_signal(signal.SIGINT)
    drain(master)
    assert live.wait(timeout=30) == 0
    os.close(master)


def read_until(terminal: int, text: bytes) -> None:
    seen = b""
    while text not in seen:
        seen += os.read(terminal, 65536)


def drain(terminal: int) -> None:
    """Reads to the end, which Linux reports as an error."""
    try:
        while os.read(terminal, 65536):
            pass
    except OSError:
        return


def test_top_into_a_pipe_prints_one_json_line_a_read(device: Device, namespace: str) -> None:
    command = [*KVCTL, "top", "--json", "--interval", "0.05", "--namespace", namespace]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as piped:
        assert piped.stdout is not None
        reads = [json.loads(piped.stdout.readline()) for _ in range(3)]
        piped.send_signal(signal.SIGINT)
        piped.communicate(timeout=30)
    assert piped.returncode == 0
    assert [read[0]["namespace"] for read in reads] == [namespace] * 3


def test_what_cannot_be_done_ends_with_one_line(device: Device, namespace: str) -> None:
    where = ("--namespace", namespace)
    assert "no live client" not in refused("limit", "ghost", "5X", *where)
    assert "write 512MiB" in refused("limit", "ghost", "5X", *where)
    assert "no such client; there are none" in refused("limit", "ghost", "5MiB", *where)
    assert "see kvctl list" in refused("limit", "ghost", "5MiB", "--namespace", f"{namespace}x")
    second = Device.open("host:1", capacity_bytes=PAGE, page_bytes=PAGE, namespace=namespace)
    assert f"--namespace {namespace} --device host:1" in refused("limit", "x", "5MiB", *where)
    second.destroy()


def test_without_the_extra_one_line_says_what_to_install() -> None:
    for missing in ("typer", "rich"):
        code = (
            f"import sys; sys.modules[{missing!r}] = None\n"
            "from kvcached.tools.cli import main; main()"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert f"the package {missing} is missing; run pip install '.[tools]'" in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["list", "top", "limit", "min", "gc"])
def test_help_has_examples(command: str) -> None:
    said = kvctl(command, "--help")
    assert "Examples" in said
    assert f"kvctl {command}" in said
    assert "--json" in said


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4096", 4096),
        ("512MiB", 512 << 20),
        ("1.5 GiB", 3 << 29),
        ("2g", 2 << 30),
        ("4MB", 4_000_000),
        ("0.5KiB", 512),
        ("1TiB", 1 << 40),
        ("0", 0),
    ],
)
def test_sizes_are_read(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "x", "-5", "5X", "1.2.3", "0.3B", "1e9", "MiB"])
def test_bad_sizes_are_named(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"size '{text}'"):
        parse_size(text)


@pytest.mark.parametrize("size_bytes", [0, 1, 1023, 1024, 1536, 512 << 20, 3 << 29, 1 << 40])
def test_sizes_are_written_as_they_are_read(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes
