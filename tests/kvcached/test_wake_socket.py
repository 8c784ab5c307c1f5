"""A process that sleeps in poll wakes up when other clients ask a rank's client for memory."""

from __future__ import annotations

import secrets
from select import POLLIN, poll

from kvcached import Device
from kvcached.engines import wake_socket

from .conftest import TINY

WAIT_MS = 60_000


def test_each_request_wakes_the_process_until_it_is_answered(device: Device) -> None:
    number = secrets.randbelow(wake_socket.NUMBER_MAX)
    client = device.client("rank 1")
    kv = client.alloc_kvcache(TINY, 1 << 14)
    with wake_socket.bound_socket(number) as bound:
        polled = poll()
        polled.register(bound, POLLIN)
        watch = wake_socket.RequestWatch(client, number)
        assert not polled.poll(0)
        for _ in range(3):
            ids = kv.alloc_kv(64)
            assert ids is not None
            device.set_limit(client.name, kv.floor_bytes())
            assert polled.poll(WAIT_MS)
            wake_socket.drain(bound)
            assert not polled.poll(0)
            kv.free_kv(ids)
            client.answer_requests(kv.shrink)
            watch.notify_answered()
            device.set_limit(client.name, None)
    client.close()
