"""Elastic KV-cache memory that engines on one device share safely.

A `Device` is opened by name, and a process registers as a `Client`. The client reserves address
space (`alloc_kvcache`, `alloc_virtual_tensor`), which is backed by pages only while it is used. No
page is mapped before the device's ledger, which all processes share, has granted it.
"""

from typing import TYPE_CHECKING

from kvcached.distribution import refuse_conflicting_distribution, refuse_uncompiled_checkout

refuse_conflicting_distribution()

from kvcached import errors  # noqa: E402

try:
    from kvcached._core import TensorView
except ModuleNotFoundError:
    refuse_uncompiled_checkout()
    raise

from kvcached.balloon import (  # noqa: E402
    Demand,
    Holder,
    PrefixCache,
    ShrinkAnswer,
    ShrinkPolicy,
    ShrinkRequest,
    Shrunk,
    spares_then_idle_caches,
)
from kvcached.client import Client, StaticLease  # noqa: E402
from kvcached.device import Device, segment_path  # noqa: E402
from kvcached.driver.driver_memory import MemoryDrift, gpu_facts  # noqa: E402
from kvcached.errors import KvcachedError, NoRoomError  # noqa: E402
from kvcached.group import KVCacheGroup  # noqa: E402
from kvcached.handover.offer import Offer  # noqa: E402
from kvcached.kvcache import KVCache  # noqa: E402
from kvcached.layouts import (  # noqa: E402
    Heads,
    HybridLayout,
    KVLayout,
    Latent,
    LayerGroup,
    Layout,
    LayoutChoice,
    MixedLayout,
    MLALayout,
    choose_layout,
)
from kvcached.memory_requests import ShrinkOrder  # noqa: E402
from kvcached.monitoring.segments import (  # noqa: E402
    Segment,
    SegmentClient,
    collect_garbage,
    segments,
)
from kvcached.ranks import RankKV  # noqa: E402
from kvcached.tensor import VirtualTensor  # noqa: E402
from kvcached.usage import (  # noqa: E402
    ClientUsage,
    DeviceUsage,
    DriverMemory,
    Fragmentation,
    GpuFacts,
    KVCounters,
    ProcessMemory,
)
from kvcached.weights.arena import (  # noqa: E402
    AddressUsage,
    LoadOptions,
    WeightArena,
    WeightLoad,
)
from kvcached.weights.builder import WeightBuilder  # noqa: E402
from kvcached.weights.checkpoint import Checkpoint  # noqa: E402
from kvcached.weights.entry import StoredWeights, WeightKey  # noqa: E402
from kvcached.weights.links import WeightLinks  # noqa: E402
from kvcached.weights.prefetch import Prefetch  # noqa: E402
from kvcached.weights.spec import CheckpointTensor, TensorSpec, WeightLayout  # noqa: E402
from kvcached.weights.store import StoreCounters, WeightStore  # noqa: E402

__all__ = [
    "AddressUsage",
    "Checkpoint",
    "CheckpointTensor",
    "Client",
    "ClientUsage",
    "Demand",
    "Device",
    "DeviceUsage",
    "DriverMemory",
    "Fragmentation",
    "GpuFacts",
    "Heads",
    "Holder",
    "HybridLayout",
    "KVCache",
    "KVCacheGroup",
    "KVCounters",
    "KVLayout",
    "KvcachedError",
    "Latent",
    "LayerGroup",
    "Layout",
    "LayoutChoice",
    "LoadOptions",
    "MLALayout",
    "MemoryDrift",
    "MixedLayout",
    "NoRoomError",
    "Offer",
    "Prefetch",
    "PrefixCache",
    "ProcessMemory",
    "RankKV",
    "Segment",
    "SegmentClient",
    "ShrinkAnswer",
    "ShrinkOrder",
    "ShrinkPolicy",
    "ShrinkRequest",
    "Shrunk",
    "StaticLease",
    "StoreCounters",
    "StoredWeights",
    "TensorSpec",
    "TensorView",
    "VirtualTensor",
    "WeightArena",
    "WeightBuilder",
    "WeightKey",
    "WeightLayout",
    "WeightLinks",
    "WeightLoad",
    "WeightStore",
    "choose_layout",
    "collect_garbage",
    "errors",
    "gpu_facts",
    "segment_path",
    "segments",
    "spares_then_idle_caches",
]

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        """Returns `__version__` lazily, since importlib.metadata is slow to import."""
        if name != "__version__":
            raise AttributeError(f"module 'kvcached' has no attribute {name!r}")
        from importlib.metadata import version

        return version("prism-kvcached")
