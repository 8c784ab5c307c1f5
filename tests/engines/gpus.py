"""A node of four GPUs of the test libcuda, and a model for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import msgspec
import numpy as np
from safetensors.numpy import save_file

import kvcached
from prism.config.schema.cluster_config import ClusterConfig, DeviceConfig, EngineConfig
from prism.messages.engine import Deactivate, Deactivated
from prism.messages.model_spec import ModelSpec
from tests.engines.harness import DeviceUnderTest
from tests.engines.subjects import Shape, model_spec
from tests.kvcached.compiling import build_libcuda

NAMES = ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
PAGE = 64 << 10
LINK_BYTES = 1 << 20
TENSORS, TENSOR_BYTES = 6, 1 << 20
OPTIONS = {"load_weights": True, "cpu_reads_gpu": True}


class Node:
    """Four GPUs, an engine's fork server on the first."""

    def __init__(self, config: ClusterConfig, environment: dict[str, str]) -> None:
        self.engine = DeviceUnderTest("fake", config, environment, NAMES[0])
        self.ledgers = [self.ledger(config, place) for place in config.devices]

    @staticmethod
    def ledger(config: ClusterConfig, place: DeviceConfig) -> kvcached.Device:
        return kvcached.Device.open(
            place.name,
            capacity_bytes=place.capacity_bytes,
            page_bytes=place.page_bytes,
            namespace=config.namespace,
        )

    def charged(self) -> list[int]:
        return [ledger.usage().reserved_bytes for ledger in self.ledgers]

    def lent(self) -> list[int]:
        """Returns the bytes that engines hold for loads on each GPU."""
        return [
            sum(c.committed_bytes for c in ledger.usage().clients if c.name.endswith(".links"))
            for ledger in self.ledgers
        ]

    def until(self, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, (self.charged(), self.engine._logs())
            time.sleep(0.005)

    def deactivate(self) -> None:
        self.engine.send(Deactivate())
        self.engine.wait_for(Deactivated)

    def close(self) -> None:
        for ledger in self.ledgers[1:]:
            ledger.destroy(force=True)
        self.engine.close()


def make_model(folder: Path) -> ModelSpec:
    rng = np.random.default_rng(0)
    tensors = {f"t{n}": rng.integers(0, 256, TENSOR_BYTES, np.uint8) for n in range(TENSORS)}
    save_file(tensors, folder / "model.safetensors")
    shape = Shape("Plain", 2, 2, 32, TENSORS * TENSOR_BYTES, str(folder))
    return model_spec("m", shape, context_length=128)


def config_of(
    model: ModelSpec, folder: Path, capacities: tuple[int, ...], **engine: object
) -> ClusterConfig:
    settings = EngineConfig(
        adapter="fake",
        static_bytes=PAGE,
        weight_store=str(folder / "store"),
        weight_store_bytes=32 << 20,
        link_bytes=LINK_BYTES,
        links_from_bytes=TENSORS * TENSOR_BYTES,
    )
    return ClusterConfig(
        namespace=f"t{uuid4().hex[:10]}",
        run_dir=str(folder),
        redis_url="",
        policy="prism",
        devices=[DeviceConfig(n, c, PAGE, 2) for n, c in zip(NAMES, capacities, strict=False)],
        models=[model],
        engine=msgspec.structs.replace(settings, **engine),
    )


@contextmanager
def opened(
    model: ModelSpec,
    folder: Path,
    capacities: tuple[int, ...] = (32 << 20,) * 4,
    environment: dict[str, str] | None = None,
    **engine: object,
) -> Iterator[Node]:
    node = Node(
        config_of(model, folder, capacities, **engine),
        {
            "PRISM_FAKE": msgspec.json.encode(OPTIONS).decode(),
            "KVCACHED_LIBCUDA": str(build_libcuda()),
            "KVCACHED_TEST_CUDA_DEVICES": "4",
            **(environment or {}),
        },
    )
    try:
        yield node
    finally:
        node.close()
