"""Loads onto GPUs of the test libcuda: pinned buffers, several links, relayed over peers.

Each test is a separate process with as many GPUs as it needs. The test libcuda makes a copy only
when a caller waits for it, so a buffer that is reused too early shows as wrong bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kvcached.compiling import build_libcuda

PROGRAM = """
import ctypes, json, os, sys, time
import numpy as np
import kvcached
from kvcached import LoadOptions, WeightKey

MB = 1 << 20
directory, namespace = sys.argv[1:]
cuda = ctypes.CDLL(os.environ["KVCACHED_LIBCUDA"])
for name in ("from_host_bytes", "from_peer_bytes", "busy_devices_max", "violations", "used_bytes",
             "calls", "kernel_distance"):
    getattr(cuda, "test_cuda_" + name).restype = ctypes.c_uint64
cuda.test_cuda_leaks.restype = ctypes.c_char_p

def devices(count):
    return [kvcached.Device.open(f"cuda:{n}", capacity_bytes=64 * MB, page_bytes=64 << 10,
                                 namespace=namespace) for n in range(count)]

def produce(builder):
    rng = np.random.default_rng(0)
    for n in range(5):
        builder.put(f"t{n}", rng.integers(0, 256, 3 * MB + n, np.uint8))

def content(arena):
    distance = cuda.test_cuda_kernel_distance()
    return b"".join(ctypes.string_at(arena[name].address + distance,
                                     arena.layout.specs[name].size_bytes) for name in arena)

store = kvcached.WeightStore.open(directory)
weights = store.get(WeightKey("c", "e", "uint8"), produce)
wanted = b"".join(weights.path(name).read_bytes() for name in weights.specs)
opened = []
"""

END = """
for device in opened:
    device.destroy(force=True)
"""


def run(tmp_path: Path, namespace: str, code: str, **env: str) -> Any:
    """Runs the program and returns its JSON output."""
    libcuda = str(build_libcuda())
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + code + END, str(tmp_path / "store"), namespace],
        env={**os.environ, "KVCACHED_LIBCUDA": libcuda, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_one_link_is_filled_while_it_is_read(tmp_path: Path, namespace: str) -> None:
    code = """
opened = devices(1)
client = opened[0].client("a")
links = client.open_weight_links(threads=2, staging_bytes=MB)
right = []
for _ in range(3):
    arena = client.alloc_weights(weights.layout(), "m")
    arena.load(weights, LoadOptions(chunk_bytes=200_000), links=links)
    right.append(content(arena) == wanted)
    arena.free()
pinned = cuda.test_cuda_calls(b"cuMemAllocHost")
del arena
links.close()
client.close()
del client
print(json.dumps([right, pinned, cuda.test_cuda_from_host_bytes(0), cuda.test_cuda_violations(),
                  cuda.test_cuda_used_bytes(0), cuda.test_cuda_leaks().decode()]))
"""
    right, pinned, copied, violations, used, leaks = run(tmp_path, namespace, code)
    assert right == [True] * 3
    assert pinned == 4  # two lanes, two buffers each, over all three loads
    assert copied == 3 * sum((3 << 20) + n for n in range(5))
    assert (violations, used, leaks) == (0, 0, "")


def test_four_links_fill_one_gpu_at_once(tmp_path: Path, namespace: str) -> None:
    code = """
opened = devices(4)
clients = [device.client("a") for device in opened]
links = clients[0].open_weight_links(clients[1:], threads=2, staging_bytes=MB)
leased = [device.usage().committed_bytes for device in opened]
arena = clients[0].alloc_weights(weights.layout(), "m")
begin_s = time.monotonic()
load = arena.start_load(weights, LoadOptions(bytes_per_s=40 * MB), links=links)
load.result()
seconds = time.monotonic() - begin_s
right = content(arena) == wanted
arena.free()
hosts = [cuda.test_cuda_from_host_bytes(n) for n in range(4)]
peer = cuda.test_cuda_from_peer_bytes(0)
links.close()
print(json.dumps([right, leased, hosts, peer, cuda.test_cuda_busy_devices_max(),
                  cuda.test_cuda_violations(), [d.usage().reserved_bytes for d in opened],
                  len(wanted), list(load.link_bytes.values()) == hosts, seconds]))
"""
    env = {"KVCACHED_TEST_CUDA_DEVICES": "4"}
    right, leased, hosts, peer, busy, violations, after, total, told, seconds = run(
        tmp_path, namespace, code, **env
    )
    assert right
    assert told
    assert seconds > 0.9 * total / (40 << 20)  # the rate holds over all of them together
    assert leased == [0, 1 << 20, 1 << 20, 1 << 20]  # a small buffer on each helper, leased
    assert sum(hosts) == total
    assert peer == sum(hosts[1:])
    assert all(0 < part < total for part in hosts)
    assert busy == 4  # all links had copies under way at once
    assert (violations, after) == (0, [0, 0, 0, 0])


def test_a_cancelled_load_touches_the_gpu_no_more(tmp_path: Path, namespace: str) -> None:
    code = """
opened = devices(2)
clients = [device.client("a") for device in opened]
links = clients[0].open_weight_links(clients[1:], threads=2, staging_bytes=MB)
said = []
for victim in ("cancel", "truncate"):
    arena = clients[0].alloc_weights(weights.layout(), "m")
    load = arena.start_load(weights, LoadOptions(bytes_per_s=20 * MB), links=links)
    while load.started_bytes == 0:
        pass
    if victim == "cancel":
        load.cancel()
    else:
        os.truncate(weights.path("t4"), 1000)
    try:
        load.result()
    except kvcached.errors.WeightError as error:
        said.append(type(error).__name__)
    said.append(opened[0].usage().static_bytes)
print(json.dumps([said, cuda.test_cuda_used_bytes(0), cuda.test_cuda_violations()]))
"""
    said, used, violations = run(tmp_path, namespace, code)
    assert said == ["LoadCancelledError", 0, "WeightFileError", 0]
    assert (used, violations) == (0, 0)


def test_what_cannot_be_linked_is_named(tmp_path: Path, namespace: str) -> None:
    code = """
opened = devices(2)
a, b = (device.client("a") for device in opened)
host = kvcached.Device.open("host:0", capacity_bytes=MB, page_bytes=4096, namespace=namespace)
h = host.client("h")
said = []
def refused(call):
    try:
        call()
    except kvcached.KvcachedError as error:
        said.append(f"{type(error).__name__}: {error}")
refused(lambda: a.open_weight_links([b]))
refused(lambda: a.open_weight_links([h]))
refused(lambda: a.open_weight_links([a]))
refused(lambda: a.open_weight_links(threads=0))
links = a.open_weight_links()
arena = b.alloc_weights(weights.layout(), "m")
refused(lambda: arena.start_load(weights, links=links))
links.close()
refused(lambda: arena.start_load(weights, links=links))
h.close()
host.destroy()
print(json.dumps([said, [d.usage().static_bytes for d in opened], arena.size_bytes]))
"""
    said, static, arena_bytes = run(tmp_path, namespace, code, KVCACHED_TEST_CUDA_PEERS="0")
    for words, line in zip(
        (
            "BackendUnavailableError: cuda:0 cannot read the memory of cuda:1",
            "InvalidArgumentError: a host device does not have a link",
            "InvalidArgumentError: cuda:0 is named twice",
            "InvalidArgumentError: threads is 0",
            "InvalidArgumentError: these links are for another device",
            "ClosedError: the links are closed",
        ),
        said,
        strict=True,
    ):
        assert line.startswith(words)
    assert static == [0, arena_bytes]


def test_a_link_that_fails_leaves_its_part_to_the_others(tmp_path: Path, namespace: str) -> None:
    """Refuses every driver call for one of three GPUs from the nth on, in mid-load."""
    code = """
opened = devices(3)
clients = [device.client("a") for device in opened]
seen = []
for nth in (0, 2, 5):  # two lanes make three calls each at least
    links = clients[0].open_weight_links(clients[1:], threads=2, staging_bytes=MB)
    arena = clients[0].alloc_weights(weights.layout(), "m")
    cuda.test_cuda_lose(1, ctypes.c_uint64(nth))
    load = arena.start_load(weights, links=links)
    load.result()
    cuda.test_cuda_lose(1, ctypes.c_uint64(1 << 60))
    seen.append([content(arena) == wanted, sum(load.link_bytes.values()) == len(wanted),
                 load.lost_links])
    arena.free()
    links.close()
print(json.dumps([seen, cuda.test_cuda_violations(), [d.usage().reserved_bytes for d in opened]]))
"""
    seen, violations, left = run(tmp_path, namespace, code, KVCACHED_TEST_CUDA_DEVICES="3")
    for right, whole, lost in seen:
        assert (right, whole) == (True, True)
        assert list(lost) == ["cuda:1"]
        assert "CUDA_ERROR_LAUNCH_FAILED" in lost["cuda:1"]
    assert (violations, left) == (0, [0, 0, 0])


def test_helpers_come_and_go_between_loads(tmp_path: Path, namespace: str) -> None:
    code = """
opened = devices(2)
a, b = (device.client("a") for device in opened)
links = a.open_weight_links(threads=2, staging_bytes=MB)
leased, said, right = [], [], []
for share in (0, 3 * MB):
    links.add(b, share_bytes=share)
    leased.append(opened[1].usage().committed_bytes)
    arena = a.alloc_weights(weights.layout(), "m")
    load = arena.start_load(weights, LoadOptions(bytes_per_s=40 * MB), links=links)
    for refused in (lambda: links.drop(b), lambda: b.close()):
        try:
            refused()
        except kvcached.KvcachedError as error:
            said.append(type(error).__name__)
    load.result()
    right.append(content(arena) == wanted and set(load.link_bytes) == {"cuda:0", "cuda:1"})
    arena.free()
    links.drop(b)
    leased.append(opened[1].usage().reserved_bytes)
try:
    links.add(b, share_bytes=64 * MB)
except kvcached.NoRoomError:
    leased.append(opened[1].usage().reserved_bytes)
links.add(b)
links.close()
b.close()
print(json.dumps([leased, said, right, cuda.test_cuda_violations()]))
"""
    leased, said, right, violations = run(tmp_path, namespace, code)
    mib = 1 << 20
    assert leased == [mib, 0, 4 * mib, 0, 0]
    assert said == ["DeviceBusyError", "PagesInUseError"] * 2
    assert right == [True, True]
    assert violations == 0


@pytest.mark.parametrize("nth", range(1, 60, 7))
def test_a_driver_that_fails_leaves_nothing_leased(
    tmp_path: Path, namespace: str, nth: int
) -> None:
    code = f"""
opened = devices(2)
clients = [device.client("a") for device in opened]
links = clients[0].open_weight_links(clients[1:], threads=2, staging_bytes=MB)
arena = clients[0].alloc_weights(weights.layout(), "m")
cuda.test_cuda_fail_at(ctypes.c_uint64({nth}), ctypes.c_uint64(1), 1)
said = ""
load = arena.start_load(weights, links=links)
try:
    load.result()
    said = load.lost_links.get("cuda:1", "") if content(arena) == wanted else "wrong bytes"
    arena.free()
except kvcached.KvcachedError as error:
    said = str(error)
cuda.test_cuda_fail_at(ctypes.c_uint64(0), ctypes.c_uint64(0), 0)
leased = opened[0].usage().static_bytes
again = clients[0].alloc_weights(weights.layout(), "m")
again.load(weights, links=links)
print(json.dumps([said, leased, content(again) == wanted, cuda.test_cuda_violations()]))
"""
    said, leased, right, violations = run(tmp_path, namespace, code)
    assert "CUDA_ERROR_INVALID_VALUE" in said
    assert (leased, right, violations) == (0, True, 0)


def test_models_of_any_shape_take_turns_in_one_reservation(tmp_path: Path, namespace: str) -> None:
    """Asks the driver for addresses once, and returns them at the end.

    KV regions and arenas of six models, per layer and interleaved, share the reservation.
    """
    said = run(
        tmp_path,
        namespace,
        """
def calls(name):
    return cuda.test_cuda_calls(name.encode())

opened = devices(1)
client = opened[0].client("engine")
cuda.test_cuda_reset_calls()
client.reserve_addresses(512 * MB)
shapes = [(2, 2, 64, "per_layer"), (5, 1, 96, "token_interleaved"), (3, 4, 32, "per_layer")]
seen, free = [], []
for layers, heads, dim, arrangement in shapes * 2:
    layout = kvcached.Layout(layers, heads, dim, dtype="bfloat16", arrangement=arrangement)
    arena = client.alloc_weights(weights.layout(), "m")
    kv = client.alloc_kvcache(layout, 1 << 13)
    arena.load(weights)
    kv.free_kv(kv.alloc_kv(9))
    seen.append((content(arena) == wanted, calls("cuMemAddressReserve")))
    client.free_kvcache(kv)
    client.free_weights(arena)
    del kv, arena
    usage = client.addresses()
    free.append((usage.free_bytes, usage.largest_free_bytes) == (512 * MB, 512 * MB))
held = cuda.test_cuda_used_bytes(0)
client.close()
del client
print(json.dumps([seen, free, held, calls("cuMemAddressFree")]))
""",
    )
    seen, free, held, freed = said
    assert seen == [[True, 1]] * 6
    assert free == [True] * 6
    assert (held, freed) == (0, 1)
