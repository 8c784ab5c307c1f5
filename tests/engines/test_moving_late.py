"""Requests whose KV does not arrive in time; every adapter waits with the same code."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest

from prism.messages.engine import Deactivate, Deactivated, Submit
from tests.engines.harness import DEVICE, DeviceUnderTest
from tests.engines.subjects import Subject, fake_subject
from tests.engines.test_moving import check, export, start


@pytest.fixture(scope="module")
def subject() -> Subject:
    return fake_subject()


@pytest.fixture(scope="module")
def device(subject: Subject) -> Iterator[DeviceUnderTest]:
    """Yields a device whose engines wait for each other only a moment."""
    with tempfile.TemporaryDirectory(prefix="prism-") as directory:
        config = subject.config(Path(directory), f"t{uuid4().hex[:10]}")
        config = msgspec.structs.replace(config, kv_offer_s=0.2, kv_fetch_s=0.2)
        device = DeviceUnderTest(subject.adapter, config, subject.environment)
        yield device
        device.close()


@pytest.mark.parametrize("fault", ["late", "stopped"])
def test_requests_go_on_without_what_comes_too_late(
    subject: Subject, device: DeviceUnderTest, engine: str, second_engine: str, fault: str
) -> None:
    """Fetches nothing in time, or gets no answer from the first engine: KV is computed again, the
    output is the same, and the ledger is as before."""
    for name in (engine, second_engine):
        device.activate(subject.models[0], name)
    items = start(subject, device, engine, 2, 60)
    moved = export(device, engine, (DEVICE,))
    if fault == "stopped":
        os.kill(device.pids[engine], signal.SIGSTOP)
    else:
        device.send(Deactivate(), engine)
        device.wait_for(Deactivated, engine)
    device.send(Submit(moved), second_engine)
    check(subject, device, second_engine, items)
    assert device.fresh_status(second_engine).imported_tokens_total == 0
    if fault == "stopped":
        os.kill(device.pids[engine], signal.SIGCONT)
        device.send(Deactivate(), engine)
        device.wait_for(Deactivated, engine)
    assert (usage := device.client_usage(engine)) is None or usage.committed_bytes == 0
