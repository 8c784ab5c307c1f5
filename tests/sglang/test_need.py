"""The start-up check's claim is equal to the lease of an activation of SGLang."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest

from prism.config.checks.memory_needs import layout_of, memory_need
from prism.config.schema.cluster_config import DeviceConfig, EngineConfig
from prism.engines.model_memory import plan
from prism.engines.sglang.platform.gpu import needs
from prism.messages.engine import ActivateEngine, Deactivate, Deactivated
from prism.messages.model_spec import ModelSpec
from prism.models import tiny
from tests.agent.harness import model_spec
from tests.sglang.conftest import ledger_of, opened_device
from tests.sglang.models import spec_of

KIB = 1 << 10
CONTEXTS = (1, 15, 16, 17, 496, 512, 1000, 4096)
PAGES = (4 * KIB, 64 * KIB, 2048 * KIB)
SHAPES = ((2, 2), (3, 1), (30, 3))


def model(layers: int, heads: int, context_length: int) -> ModelSpec:
    spec = model_spec("m", num_layers=layers, num_kv_heads=heads)
    spec = msgspec.structs.replace(
        spec, context_length=context_length, weight_bytes=12_345_678, dtype="float32"
    )
    return msgspec.structs.replace(spec, token_bytes=layout_of(spec).token_bytes)


@pytest.mark.parametrize("name", ["host:0", "cuda:0"])
def test_check_claims_what_an_activation_leases(name: str) -> None:
    engine, idle_bytes = EngineConfig(), needs(name).idle_bytes
    for shape, context_length, page_bytes in itertools.product(SHAPES, CONTEXTS, PAGES):
        device = DeviceConfig(name, 64 << 30, page_bytes, 2, idle_bytes=idle_bytes)
        spec = model(*shape, context_length)
        claim = memory_need(spec, device, engine)
        leased = plan(
            ActivateEngine(spec),
            capacity_bytes=device.capacity_bytes,
            page_bytes=page_bytes,
            # The result of `GpuShare.model_bytes` when the context is as planned.
            static_bytes=engine.static_on(name) - idle_bytes,
            chunk_tokens=engine.prefill_chunk_tokens,
        )
        assert claim.kv_bytes == leased.reserve_bytes, (shape, context_length, page_bytes)
        assert claim.weight_bytes == leased.weight_bytes
        assert claim.static_bytes == leased.share_bytes
        assert claim.total_bytes == leased.total_bytes


@pytest.mark.sglang
def test_a_live_activation_leases_what_check_claims(tmp_path: Path) -> None:
    """Runs on a host device with the models' real parameters; pages beyond the guaranteed are
    spare."""
    with opened_device(64 << 20, weight_store=str(tmp_path)) as device:
        device.fork("e0")
        ledger, place = ledger_of(device), device.config.devices[0]
        for name in tiny.TINY_MODELS:
            spec = spec_of(name.name)
            activated = device.activate(spec)
            claim = memory_need(spec, place, device.config.engine)
            [client] = ledger.usage().clients
            assert client.min_bytes == activated.reserve_bytes == claim.kv_bytes
            assert client.static_bytes == claim.static_bytes + claim.weight_bytes, name.name
            device.send(Deactivate())
            device.wait_for(Deactivated)
            assert ledger.usage().reserved_bytes == 0
        ledger.close()
        device.end("e0")
