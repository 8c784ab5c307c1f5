"""Devices whose engines are real SGLang processes, forked from a real fork server."""

from __future__ import annotations

import contextlib
import gc
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest

import kvcached
from prism.config.schema.cluster_config import ClusterConfig, DeviceConfig, EngineConfig
from prism.engines.core import EngineContext
from prism.messages.requests import Failure, Request
from tests.engines.harness import DEVICE, DeviceUnderTest

PAGE_BYTES = 64 << 10
STATIC_BYTES = 1 << 20

PEER = "host:1"

MakeDevice = Callable[..., DeviceUnderTest]


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("slow")


@pytest.fixture(scope="module")
def preloaded() -> None:
    """Loads SGLang into this process, for tests that look into the adapter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's own, of its imports
        from prism.engines.sglang import preload

        gc.disable()  # as the fork server does; it takes a third of the imports' time
        preload()
        gc.freeze()
        gc.enable()


def config_of(run_dir: Path, capacity_bytes: int, chunk_tokens: int = 64) -> ClusterConfig:
    return ClusterConfig(
        namespace=f"t{uuid4().hex[:10]}",
        run_dir=str(run_dir),
        redis_url="",
        policy="prism",
        devices=[DeviceConfig(DEVICE, capacity_bytes, PAGE_BYTES, 2)],
        models=[],
        engine=EngineConfig(
            static_bytes=STATIC_BYTES, prefill_chunk_tokens=chunk_tokens, weight_store=""
        ),
    )


@contextlib.contextmanager
def opened_device(
    capacity_bytes: int, chunk_tokens: int = 64, weight_store: str = ""
) -> Iterator[DeviceUnderTest]:
    """Opens a device with a fork server and no engine; asserts at the end that nothing remains."""
    with tempfile.TemporaryDirectory(prefix="prism-") as directory:
        config = config_of(Path(directory), capacity_bytes, chunk_tokens)
        engine = msgspec.structs.replace(config.engine, weight_store=weight_store)
        config = msgspec.structs.replace(config, engine=engine)
        ledger = kvcached.Device.open(
            DEVICE,
            capacity_bytes=capacity_bytes,
            page_bytes=PAGE_BYTES,
            namespace=config.namespace,
        )
        device = DeviceUnderTest("sglang", config, {"OMP_NUM_THREADS": "1"})
        try:
            yield device
        finally:
            device.close()
            ledger.destroy()


@contextlib.contextmanager
def opened_pair(
    capacity_bytes: int, chunk_tokens: int = 64, weight_store: str = "", **settings: Any
) -> Iterator[DeviceUnderTest]:
    """Opens two devices, and an engine "e0" with a rank on each. `settings`: of the cluster."""
    with tempfile.TemporaryDirectory(prefix="prism-") as directory:
        config = config_of(Path(directory), capacity_bytes, chunk_tokens)
        [first] = config.devices
        devices = [first, msgspec.structs.replace(first, name=PEER)]
        engine = msgspec.structs.replace(config.engine, weight_store=weight_store)
        config = msgspec.structs.replace(config, devices=devices, engine=engine, **settings)
        device = DeviceUnderTest("sglang", config, {"OMP_NUM_THREADS": "1"})
        try:
            device.fork(peers=(PEER,))
            yield device
        finally:
            device.close()
            kvcached.Device.unlink(config.namespace, PEER)


def ledger_of(device: DeviceUnderTest) -> kvcached.Device:
    return kvcached.Device.open(DEVICE, namespace=device.config.namespace)


def kv_committed_bytes(device: DeviceUnderTest) -> int:
    """Returns the KV pages of all engines; weights are leased as static memory."""
    return ledger_of(device).usage().committed_bytes


def charged_bytes(device: kvcached.Device) -> int:
    """Returns the resident pages (weights included) plus the synthetic shares of active engines."""
    active = [c for c in device.usage().clients if c.static_bytes]
    return device.resident_bytes() + STATIC_BYTES * len(active)


@pytest.fixture(scope="module")
def device() -> Iterator[DeviceUnderTest]:
    """Yields a roomy device with one engine, shared by the tests of a module."""
    with opened_device(256 << 20) as opened:
        opened.fork()
        yield opened


@pytest.fixture(scope="module")
def core(preloaded: None) -> Iterator[Any]:
    with tempfile.TemporaryDirectory(prefix="prism-") as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from prism.engines.sglang import create

        config = config_of(Path(directory), 256 << 20)
        core = create(EngineContext("e0", DEVICE, config))
        yield core
        core.close()
        kvcached.Device.unlink(config.namespace, DEVICE)


@pytest.fixture
def idle(core: Any) -> Any:
    core.deactivate()
    return core


def run(core: Any, requests: list[Request]) -> tuple[dict[str, list[Any]], list[Failure]]:
    """Returns the chunks of each request, and the failures."""
    core.submit(requests)
    chunks: dict[str, list[Any]] = {}
    failures: list[Failure] = []
    busy = True
    while busy:
        output = core.step()
        failures += output.failures
        for chunk in output.chunks:
            chunks.setdefault(chunk.request_id, []).append(chunk)
        busy = output.busy
    return chunks, failures
