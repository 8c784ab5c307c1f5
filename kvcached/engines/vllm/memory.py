"""KV memory of one vLLM engine, laid out by its worker and used by its scheduler."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from select import POLLIN, poll
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcached.client import Client
from kvcached.device import Device
from kvcached.engines.device_share import DeviceShare
from kvcached.engines.settings import Settings
from kvcached.kvcache import KVCache
from kvcached.layouts import KVLayout, PackedLayout, choose_layout

# Number of engines that a device is laid out for. More engines need smaller slabs.
SHARED_BY = 4


class Share(Protocol):
    """Part of `DeviceShare` that vLLM's worker and block pool use."""

    @property
    def device(self) -> Device: ...

    @property
    def client(self) -> Client: ...

    def lease_static(self, measured_bytes: int) -> None: ...

    def ask_for(self, size_bytes: int, more_bytes: int = 0) -> None: ...

    def find_room(self, kv: KVCache, num_blocks: int) -> NDArray[np.int64] | None: ...


class Memory(Protocol):
    """Part of `EngineMemory` that vLLM's worker, scheduler and block pool use."""

    @property
    def share(self) -> Share: ...

    @property
    def kv(self) -> KVCache | None: ...

    def layout(self, block_bytes: int, block_tokens: int) -> KVLayout: ...

    def alloc_kvcache(self, layout: KVLayout, num_tokens: int, request_tokens: int) -> KVCache: ...

    def answer_requests(self, shrink: Callable[[int | None], Any]) -> None: ...

    def publish_evictable(self, size_bytes: int) -> None: ...


class EngineMemory:
    """Memory of a process's engine. Thread rule: the thread that steps the engine."""

    def __init__(self, config: Any, rank: int) -> None:
        """Opens the rank's device. Raises the errors of `DeviceShare`."""
        settings = Settings.from_environment(os.environ).of_device(rank)
        model = Path(config.model_config.served_model_name or config.model_config.model).name
        self.share = DeviceShare(settings, f"{model}:{os.getpid()}")
        self.kv: KVCache | None = None
        self._answered = threading.Event()
        self._published_bytes = 0

    def layout(self, block_bytes: int, block_tokens: int) -> KVLayout:
        """Returns a layout for blocks of `block_bytes`, with the smallest gaps that give small
        slabs.
        """
        dense = PackedLayout(
            dtype="int8",
            block_tokens=block_tokens,
            arrangement="block_interleaved",
            packed_token_bytes=block_bytes // block_tokens,
        )
        device = self.share.device
        return choose_layout(
            dense,
            page_bytes=device.page_bytes,
            device_bytes=device.capacity_bytes,
            models=SHARED_BY,
            accepted=["block_interleaved"],
        ).layout

    def alloc_kvcache(self, layout: KVLayout, num_tokens: int, request_tokens: int) -> KVCache:
        """Reserves the KV space. Raises the errors of `DeviceShare.alloc_kvcache`."""
        self.kv = self.share.alloc_kvcache(layout, num_tokens, request_tokens)
        return self.kv

    def answer_requests(self, shrink: Callable[[int | None], Any]) -> None:
        """Answers other engines' requests."""
        self.share.client.answer_requests(shrink)
        self._answered.set()

    def publish_evictable(self, size_bytes: int) -> None:
        """Publishes the bytes that could be evicted, if they have changed."""
        if size_bytes != self._published_bytes:
            self.share.client.publish_evictable(size_bytes)
            self._published_bytes = size_bytes

    def wake_on_requests(self, wake: Callable[[], None]) -> None:
        """Calls `wake` on a separate thread when other engines send requests, for a sleeping
        engine. See `watch_input`."""

        def wake_and_wait() -> None:
            self._answered.clear()
            wake()
            self._answered.wait()

        watch_input(self.share.client.fileno(), wake_and_wait)


def watch_input(descriptor: int, handle: Callable[[], None]) -> None:
    """Calls `handle` on a separate thread whenever the descriptor is readable.

    Ends the process with its parent, even a killed one, since it would hold memory without use.
    """
    parent, polled = os.pidfd_open(os.getppid()), poll()
    polled.register(parent, POLLIN)
    polled.register(descriptor, POLLIN)

    def watch() -> None:
        while True:
            if any(ready == parent for ready, _ in polled.poll()):
                os._exit(1)
            handle()

    threading.Thread(target=watch, name="kvcached-requests", daemon=True).start()


_active: Any = None


def use_memory(memory: Memory | None) -> None:
    """Sets the memory for callers that step vLLM in their own process, until the next call. None:
    the engine is gone."""
    global _active  # noqa: PLW0603 (vLLM cannot pass it from its worker to its scheduler)
    _active = memory


def open_memory(config: Any, rank: int) -> Any:
    """Returns the worker's memory, opened at the first call.

    Raises NotImplementedError for a second engine in the process.
    """
    if isinstance(_active, EngineMemory):
        raise NotImplementedError("a second engine in one process is not supported on kvcached")
    if _active is None:
        use_memory(EngineMemory(config, rank))
    return _active


def active_memory() -> Any:
    """Returns the memory that this process's worker has opened, or that `use_memory` has set.

    Raises RuntimeError if there is none.
    """
    if _active is None:
        raise RuntimeError("vLLM's worker and scheduler are not in the same process")
    return _active
