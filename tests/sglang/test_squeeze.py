"""Memory that an engine counted on is taken by another client in the middle of a prompt."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest

import kvcached
from prism.messages.engine import Activated, SetLimit, Submit
from tests.engines.harness import DeviceUnderTest, request
from tests.sglang.conftest import PAGE_BYTES, ledger_of, opened_device
from tests.sglang.models import LLAMA, TIE, largest_gap, prompts, spec_of

pytestmark = pytest.mark.sglang

CONTEXT = 2048
QUANTUM_BYTES = 8 * PAGE_BYTES  # K and V of 4 layers


@pytest.fixture(scope="module")
def roomy() -> Iterator[tuple[DeviceUnderTest, Activated]]:
    """Yields one engine with small chunks and room for two requests of the full context."""
    spec = spec_of(LLAMA, CONTEXT)
    capacity = spec.weight_bytes + (2 << 20) + 2 * (CONTEXT + 256) * spec.token_bytes
    with opened_device(-(-capacity // PAGE_BYTES) * PAGE_BYTES, chunk_tokens=32) as device:
        device.fork()
        yield device, device.activate(spec)


def own_usage(device: DeviceUnderTest) -> kvcached.ClientUsage:
    return next(c for c in ledger_of(device).usage().clients if c.name == "e0")


@contextlib.contextmanager
def stopped(device: DeviceUnderTest) -> Iterator[None]:
    """Stops the engine's process."""
    os.kill(device.pids["e0"], signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(device.pids["e0"], signal.SIGCONT)


@contextlib.contextmanager
def everything_taken(device: DeviceUnderTest) -> Iterator[None]:
    """Takes every free page for another client while the engine is stopped."""
    ledger = ledger_of(device)
    with ledger.client("thief") as client:
        with stopped(device):
            free_bytes = ledger.usage().free_bytes // PAGE_BYTES * PAGE_BYTES
            loot = client.alloc_virtual_tensor(free_bytes)
            loot.map(0, free_bytes)
        yield
        client.free_virtual_tensor(loot)


def start_two(device: DeviceUnderTest, tag: str) -> dict[str, list[int]]:
    """Starts a request that decodes for long, and one whose prompt is partly computed."""
    [short] = prompts(LLAMA, 1, (20, 20))
    [long] = prompts(LLAMA, 1, (1960, 1960), seed=len(tag))
    device.send(Submit([request(f"{tag}-decodes", LLAMA, short, 700)]))
    device.wait_until(lambda: len(device.stream(f"{tag}-decodes").token_ids) > 250)
    before_bytes = own_usage(device).committed_bytes
    device.send(Submit([request(f"{tag}-prefills", LLAMA, long, 80)]))
    while own_usage(device).committed_bytes <= before_bytes + 2 * QUANTUM_BYTES:
        time.sleep(0.001)
    return {f"{tag}-decodes": short, f"{tag}-prefills": long}


def check_both(device: DeviceUnderTest, asked: dict[str, list[int]]) -> None:
    streams = device.finish(*asked)
    assert [s.finish_reason for s in streams] == ["length", "length"]
    assert [len(s.token_ids) for s in streams] == [700, 80]
    for stream, prompt in zip(streams, asked.values(), strict=True):
        assert largest_gap(LLAMA, prompt, stream.token_ids) < TIE


def test_the_half_computed_prompt_steps_back_for_the_running_request(
    roomy: tuple[DeviceUnderTest, Activated],
) -> None:
    device, activated = roomy
    before = device.fresh_status().retractions_total
    asked = start_two(device, "stolen")
    with everything_taken(device):
        device.finish("stolen-decodes")
        assert not device.stream("stolen-prefills").chunks  # so a prefill was retracted
        assert own_usage(device).committed_bytes <= activated.reserve_bytes
        check_both(device, asked)
    status = device.settled_status(lambda s: not s.running and not s.waiting)
    assert status.retractions_total == before + 1


def test_a_lowered_limit_squeezes_and_a_raised_one_lets_go(
    roomy: tuple[DeviceUnderTest, Activated],
) -> None:
    device, activated = roomy
    device.trim()
    asked = start_two(device, "limited")
    with stopped(device):
        device.send(SetLimit(kv_limit_bytes=1))  # raised by the engine to one request's need
    check_both(device, asked)
    usage = own_usage(device)
    assert usage.limit_bytes == activated.reserve_bytes
    assert usage.committed_bytes <= activated.reserve_bytes
    device.send(SetLimit(kv_limit_bytes=None))
    device.settled_status(lambda s: s.available_tokens > CONTEXT * 3 // 2)
