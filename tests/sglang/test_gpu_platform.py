"""The CUDA side of the adapter without a GPU: the settings for SGLang, the errors, and its memory
on the test libcuda."""

from __future__ import annotations

import ctypes
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

import msgspec
import pytest

import kvcached
from prism.engines.core import EngineContext
from prism.engines.model_memory import MemoryPlan, plan
from prism.engines.sglang.platform import gpu
from prism.engines.timeline import Timeline
from prism.messages.engine import ActivateEngine
from tests.kvcached.arrays import kernel_view
from tests.kvcached.conftest import libcuda  # noqa: F401 (a fixture)
from tests.kvcached.libcuda import LibCuda
from tests.sglang.conftest import config_of
from tests.sglang.models import LLAMA, spec_of

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("preloaded")]

DEVICE = "cuda:0"
PAGE = 64 << 10
CAPACITY = 64 << 20


@pytest.fixture
def device(namespace: str, libcuda: LibCuda) -> Iterator[kvcached.Device]:  # noqa: F811
    opened = kvcached.Device.open(
        DEVICE, capacity_bytes=CAPACITY, page_bytes=PAGE, namespace=namespace
    )
    yield opened
    opened.destroy(force=True)
    assert libcuda.used_bytes() == 0


def planned(order: ActivateEngine) -> MemoryPlan:
    sizes = {"capacity_bytes": CAPACITY, "page_bytes": PAGE, "static_bytes": 1 << 20}
    return plan(order, **sizes, chunk_tokens=64)


def test_a_stock_sglang_keeps_its_own_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports of SGLang fail if both plugins are active."""
    from prism.engines import platforms

    for activate, name in (
        (platforms.sglang_cpu, "prism_cpu"),
        (platforms.sglang_cuda, "prism_cuda"),
    ):
        monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
        assert activate() is None
        monkeypatch.setenv("SGLANG_PLATFORM", name)
        assert hasattr(resolve_name(str(activate())), "get_kv_pool_cls")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    text = gpu.lacks(DEVICE)
    assert "sgl_kernel, triton cannot be imported" in text
    assert gpu.lacks("host:0") == ""
    monkeypatch.setattr(gpu, "find_spec", lambda name: object())
    assert gpu.lacks(DEVICE) == ""


def test_the_platform_is_chosen_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that the named entry point exists and leads to SGLang's own platform."""
    from importlib.metadata import entry_points

    for name in ("SGLANG_PLATFORM", "CUDA_HOME", "LIBRARY_PATH", *gpu._ENVIRONMENT):
        monkeypatch.setenv(name, "as it was")  # and is again, after the test
    gpu.prepare("host:0")
    assert os.environ["SGLANG_PLATFORM"] == "as it was"
    gpu.prepare(DEVICE)
    wanted = os.environ["SGLANG_PLATFORM"]
    assert os.environ["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] == "0"
    [found] = [e for e in entry_points(group="sglang.srt.platforms") if e.name == wanted]
    from sglang.srt.platforms.cuda import CudaSRTPlatform
    from sglang.srt.platforms.device_mixin import PlatformEnum

    module, _, name = found.load()().rpartition(".")
    platform = getattr(__import__(module, fromlist=[name]), name)
    assert issubclass(platform, CudaSRTPlatform)
    assert platform._enum is PlatformEnum.CUDA
    assert platform.capabilities == CudaSRTPlatform.capabilities
    for kept in ("get_dispatch_key_name", "get_default_attention_backend"):
        assert getattr(platform, kept) is getattr(CudaSRTPlatform, kept)


def test_sglangs_own_kernels_and_graphs_are_asked_for() -> None:
    """Passes torch's sampling (FlashInfer's takes no seeds) and no prefill graphs, which would be
    captured at each activation."""
    from prism.config.schema.cluster_config import EngineConfig
    from prism.engines.sglang import server_args

    order = ActivateEngine(spec_of(LLAMA, 512), max_running=7)
    layout = planned(order)
    common = server_args.settings(order, layout, 64, 1)
    on_gpu = server_args.on_gpu(order, EngineConfig())
    assert on_gpu == {
        "device": "cuda",
        "sampling_backend": "pytorch",
        "attention_backend": "triton",
        "disable_prefill_cuda_graph": True,
        "cuda_graph_max_bs_decode": 7,
        "enable_cudagraph_gc": True,
    }
    from sglang.srt.server_args import ServerArgs

    assert common.keys() | on_gpu.keys() <= inspect.signature(ServerArgs).parameters.keys()
    assert not common.keys() & (on_gpu.keys() | server_args.on_host({}).keys())


def test_weights_for_other_kernels_are_other_weights() -> None:
    """Stores that host devices and GPUs share never give one the other's weights."""
    from prism.engines.sglang import weight_key

    spec = spec_of(LLAMA, 512)
    keys = {weight_key("content", spec, device=name) for name in (DEVICE, "cuda:1", "host:0")}
    assert len(keys) == 2


def test_an_engines_memory_on_cuda(device: kvcached.Device) -> None:
    """Reserves, allocates KV blocks and releases through the driver's calls."""
    from prism.engines.sglang.memory import EngineMemory
    from prism.engines.weights.model_weights import ModelWeights, StoreAccess

    order = ActivateEngine(spec_of(LLAMA, 512))
    layout = planned(order)
    with device.client("e0") as client:
        weights = ModelWeights(client, StoreAccess(), order.model)
        memory = EngineMemory(
            client, device, weights, order=order, plan=layout, timeline=Timeline()
        )
        ids = memory.rank_kv(memory.kv).alloc_kv(20)
        assert ids is not None
        assert device.usage().committed_bytes >= 20 * 16 * layout.layout.token_bytes
        memory.kv.free_kv(ids)
        memory.release()
        assert device.usage().reserved_bytes == 0


def test_weights_come_over_the_links_of_all_gpus(
    device: kvcached.Device, namespace: str, tmp_path: Path
) -> None:
    """Compares every byte of a copy in SGLang's layout, at tensor level: parameters on the meta
    device, arenas on cuda:0."""
    import torch

    from prism.engines.sglang import weight_key
    from prism.engines.weights.links import LoadLinks
    from prism.engines.weights.model_weights import ModelWeights, StoreAccess

    spec = spec_of(LLAMA, 512)
    wanted = {f"layer.{n}": torch.randn(700, 300 + n) for n in range(4)}
    other = kvcached.Device.open(
        "cuda:1", capacity_bytes=CAPACITY, page_bytes=PAGE, namespace=namespace
    )
    config = config_of(tmp_path, CAPACITY)
    places = [msgspec.structs.replace(config.devices[0], name=f"cuda:{n}") for n in range(2)]
    engine = msgspec.structs.replace(config.engine, link_bytes=1 << 20, links_from_bytes=1)
    config = msgspec.structs.replace(config, namespace=namespace, devices=places, engine=engine)
    store = kvcached.WeightStore.open(tmp_path / "store")
    key = weight_key(store.content_of(kvcached.Checkpoint.open(spec.path)), spec, device=DEVICE)

    def put_all(builder: kvcached.WeightBuilder) -> None:
        for name, tensor in wanted.items():
            builder.put(name, tensor)
        builder.put("prism.fingerprint", torch.tensor([5, 6]))

    store.get(key, put_all).close()
    with device.client("e0") as client:
        links = LoadLinks(EngineContext("e0", DEVICE, config), client)
        weights = ModelWeights(
            client, StoreAccess(store, links, device=DEVICE, weight_key=weight_key), spec
        )
        assert weights.find_copy()
        weights.lay_out({name: tensor.to("meta") for name, tensor in wanted.items()})
        weights.load(lambda: None)
        for name, tensor in wanted.items():
            address = weights.pages.arena_of(name)[name].address
            arrived = ctypes.string_at(kernel_view(address), tensor.numel() * 4)
            assert arrived == tensor.numpy().tobytes()
        assert sorted(weights.link_bytes) == ["cuda:0", "cuda:1"]
        assert sum(weights.link_bytes.values()) == 16 + sum(t.numel() * 4 for t in wanted.values())
        weights.release()
        links.close()
    assert device.usage().reserved_bytes == other.usage().reserved_bytes == 0
    other.destroy()
