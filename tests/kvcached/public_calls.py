"""Every public call of kvcached that takes arguments, with right ones and with wrong ones."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import kvcached
from kvcached import (
    Device,
    HybridLayout,
    KVCache,
    LayerGroup,
    LoadOptions,
    RankKV,
    ShrinkRequest,
    Shrunk,
    TensorSpec,
    WeightBuilder,
    WeightKey,
    WeightLayout,
    WeightStore,
    prometheus,
    testing,
)
from kvcached.models import layout_of_config
from kvcached.monitoring import snapshot

from .conftest import CAPACITY, PAGE, TINY

HYBRID = HybridLayout.sliding(TINY, [1], 64)
KEY = WeightKey("content", "engine", "float32")
SPECS = {"w": TensorSpec("float32", (4, 4))}
# With right arguments these end the objects that the others are called on.
ENDING = {"Device.destroy", "Device.unlink", "Client.free_kvcache", "Client.free_weights"}
ENDING |= {"Client.free_virtual_tensor"}
WRONG: tuple[Any, ...] = (
    *(None, True, -1, 1.5, float("nan"), float("inf"), 2**70, 10**5000),
    *("no\0name", "\ud800", b"bytes", (), [], {}, object(), np.array([1.5])),
)
# A value of these may be right where the annotation says so.
FITTING: dict[str, tuple[type, ...]] = {
    "None": (type(None),),
    "float": (int,),
    "bool": (bool,),
    "tuple": (tuple, list, np.ndarray),
    "Sequence": (list, tuple, np.ndarray),
    "Iterable": (list, tuple, dict, bytes, np.ndarray),
    "Collection": (list, tuple, np.ndarray),
    "Mapping": (dict,),
    "NDArray": (np.ndarray,),
    "Any": (bytes, np.ndarray),
}


class NoCache:
    """A prefix cache that holds nothing."""

    def evictable(self) -> tuple[Any, Any]:
        return np.empty(0, np.int64), np.empty(0, np.int64)

    def evict(self, _ids: Any) -> int:
        return 0


@dataclass(frozen=True)
class Call:
    """A function or method, and right arguments for it by name."""

    function: Callable[..., object]
    right: dict[str, Any]
    annotations: dict[str, str]

    def __call__(self, arguments: dict[str, Any]) -> object:
        return self.function(**arguments)


def is_wrong(annotation: str, value: object) -> bool:
    """Returns whether no argument of this type may be `value`."""
    kinds = [part.partition("[")[0].rpartition(".")[2] for part in annotation.split(" | ")]
    fitting = tuple(kind for name in kinds for kind in FITTING.get(name, ()))
    if isinstance(value, bool) or value is None:
        return type(value) not in fitting
    if isinstance(value, int | float):
        return not 0 <= value < 2**63 or int not in fitting
    return not isinstance(value, fitting)


class World:
    """A right argument for each parameter, and an object of each public class."""

    def __init__(self, device: Device, folder: Path) -> None:
        self.device = device
        self.client, self.other = device.client("test"), device.client("other")
        self.kv: KVCache = self.client.alloc_kvcache(TINY, 1 << 10)
        self.group = self.client.alloc_kvcache(HYBRID, 1 << 10)
        self.tensor = self.client.alloc_virtual_tensor(4 * PAGE)
        self.store = WeightStore.open(folder / "store", max_bytes=1 << 24)
        self.weights = self.store.get(KEY, self._produce)
        self.arena = self.client.alloc_weights(self.weights.layout(), "test")
        self.arena.fill()
        self.links = self.client.open_weight_links()
        self.folder = folder
        self.ids = self.kv.alloc_kv(2)
        self.group_ids = self.group.alloc_kv({"full": 2})
        self.right = self._right()

    def _produce(self, builder: WeightBuilder) -> None:
        builder.put("w", np.zeros((4, 4), np.float32))

    def _right(self) -> dict[str, Any]:
        """Returns right arguments by parameter, or by call and parameter where that differs."""
        room = {"capacity_bytes": CAPACITY, "page_bytes": PAGE, "device_bytes": CAPACITY}
        few = dict.fromkeys(
            ("num_blocks", "num_pages", "num_tokens", "low", "high", "models", "reserved_blocks"), 1
        )
        return {
            **room,
            **few,
            **dict.fromkeys(("wait_s", "within_s", "timeout_s", "max_wait_s", "deadline_s"), 0.0),
            **dict.fromkeys(("size_bytes", "staging_bytes", "missing_bytes", "min_bytes"), PAGE),
            **{"name": "w", "what": "w", "client": "test", "for_client": "test", "pid": None},
            **{"number": None, "limit_bytes": None, "force": False, "dry_run": True},
            **{"background": False, "guard_holes": False, "dtype": "float32", "part": "k"},
            **{"offset_bytes": 0, "layer": 0, "skip": 0, "byte": 1, "share_bytes": 0, "threads": 1},
            **{
                "shape": [4],
                "handles": [],
                "others": [],
                "holders": [],
                "last_used": self.ids,
                "ids": self.ids,
            },
            **{"namespace": self.device.namespace, "device": "host:0", "address": "nobody/1"},
            **{"layout": TINY, "kvcache": self.kv, "tensor": self.tensor, "arena": self.arena},
            **{"request": ShrinkRequest(1, None), "shrunk": Shrunk(), "cache": NoCache()},
            **{"shrink": lambda _size: Shrunk(), "policy": kvcached.spares_then_idle_caches},
            **{"shrink_policy": kvcached.spares_then_idle_caches, "other": self.other},
            **{"weights": self.weights, "options": LoadOptions(), "links": self.links},
            **{"key": KEY, "produce": self._produce, "content": "content", "expected": None},
            **{"specs": SPECS, "model": self.folder, "cancel": threading.Event(), "unless": None},
            **{"path": self.folder, "checkpoint": kvcached.Checkpoint((), {}), "caches": {}},
            **{"layers": [0], "step_tokens": 1, "window_layers": [1], "window_tokens": 64},
            **{"alignment_bytes": 256, "accepted": ["per_layer"], "directory": self.folder / "s"},
            **{"max_bytes": 1 << 24, "array": np.zeros(4, np.float32), "kv": self.kv},
            **{"all_true": bool, "evict": lambda _tokens: 0, "num_layers": 2, "chunk_bytes": 4096},
            **{"num_kv_heads": 1, "head_dim": 64, "v_head_dim": None, "kv_lora_rank": 64},
            **{
                "rope_dim": 8,
                "index_bytes": 0,
                "index_dim": 0,
                "block_tokens": 16,
                "arrangement": "per_layer",
                "engine": "engine",
            },
            **{"padded_token_bytes": None, "rank": 0, "ranks": 1, "bytes_per_s": None},
            **{"groups": HYBRID.groups, "config": {"num_hidden_layers": 1}, "prefix": "x"},
            **{"returned_bytes": 0, "evicted_tokens": 0, "evicted_bytes": 0, "first": None},
            "KVCacheGroup.num_blocks": {"full": 1},
            "KVCacheGroup.ids": self.group_ids,
            "KVCacheGroup.name": "full",
            "HybridLayout.name": "full",
            "KVLayout.name": "k",
            "LayerGroup.layers": (0, 1),
            "Device.name": "host:0",
            "Device.client.name": "third",
            "segment_path.name": "host:0",
            "MixedLayout.layers": (kvcached.Heads(1, 64),),
            "TensorSpec.shape": (4, 4),
            "Client.alloc_weights.layout": WeightLayout.of(SPECS),
        }

    def calls(self) -> Iterator[tuple[str, Call]]:
        """Yields all calls by name: methods of the objects and functions of the package."""
        rank = RankKV(self.kv, bool)
        full = HYBRID.groups[0]
        objects = (self.device, self.client, self.kv, self.group, self.tensor, self.store, rank)
        for each in (*objects, self.weights, self.arena, self.links, TINY, HYBRID, full):
            for name, method in inspect.getmembers(each, inspect.ismethod):
                if name[0] != "_" and f"{type(each).__name__}.{name}" not in _INTERNAL:
                    yield from self._call(type(each), name, method)
        yield from self._call(Device, "unlink", Device.unlink)
        makers = (kvcached.Layout, kvcached.MLALayout, kvcached.MixedLayout, LayerGroup)
        plain = (HybridLayout, LoadOptions, WeightKey, TensorSpec, kvcached.Heads, kvcached.Latent)
        for made in (*makers, *plain, Shrunk, RankKV):
            yield from self._call(made, "", made)
        yield from self._call(kvcached.Checkpoint, "open", kvcached.Checkpoint.open)
        yield from self._call(WeightLayout, "of", WeightLayout.of)
        functions = (kvcached.segment_path, kvcached.segments, kvcached.collect_garbage)
        others = (kvcached.choose_layout, kvcached.gpu_facts, layout_of_config)
        policies = (kvcached.spares_then_idle_caches,)
        reading = (prometheus.families, prometheus.exposition)
        reading += (snapshot.take_snapshots, snapshot.read_devices)
        for function in (*functions, *others, *policies, *reading, testing.read_tensor):
            yield from self._call(None, function.__name__, function)

    def _call(
        self, owner: type | None, name: str, function: Callable[..., object]
    ) -> Iterator[tuple[str, Call]]:
        parameters = inspect.signature(function).parameters
        if not parameters or "self" in parameters:
            return
        classes = [] if owner is None else [each.__name__ for each in owner.__mro__]
        full_names = [f"{each}.{name}." for each in classes] + [f"{name}."]
        full_names += [f"{each}." for each in classes] + [""]
        right = {
            parameter: next(
                self.right[start + parameter]
                for start in full_names
                if start + parameter in self.right
            )
            for parameter in parameters
        }
        annotations = {each: str(value.annotation) for each, value in parameters.items()}
        yield ".".join([*classes[:1], name]), Call(function, right, annotations)


# Not for users: made and called by kvcached alone.
_INTERNAL = {"StoredWeights.open"}


def other_errors(calls: Iterable[tuple[str, Call]]) -> list[str]:
    """Makes the calls with right arguments. Returns those that raised anything but a
    KvcachedError."""
    found = []
    for name, call in calls:
        try:
            call(call.right)
        except kvcached.KvcachedError:
            pass
        except Exception as error:  # noqa: BLE001 (the subject of the test)
            found.append(f"{name} raised {error!r}")
    return found
