"""The KV memory of one vLLM engine, which its worker lays out and its scheduler uses."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from select import POLLIN, poll
from typing import Any

from kvcached.engines.packed import PackedLayout
from kvcached.engines.settings import Settings
from kvcached.engines.stake import Stake
from kvcached.kvcache import KVCache
from kvcached.layouts import KVLayout, choose_layout

# How many engines a device is laid out for: the more, the smaller are the slabs of each.
SHARED_BY = 4


class EngineMemory:
    """One for a process. Thread rule: the thread that steps the engine."""

    def __init__(self, config: Any) -> None:
        """Raises what `Stake` raises."""
        settings = Settings.from_environment(os.environ)
        model = Path(config.model_config.served_model_name or config.model_config.model).name
        self.stake = Stake(settings, f"{model}:{os.getpid()}")
        self.kv: KVCache | None = None
        self._answered = threading.Event()
        self._published_bytes = 0

    def layout(self, block_bytes: int, block_tokens: int) -> KVLayout:
        """Of blocks of so many bytes, with as small a gap behind each as small slabs need."""
        dense = PackedLayout(
            dtype="int8",
            block_tokens=block_tokens,
            arrangement="block_interleaved",
            packed_token_bytes=block_bytes // block_tokens,
        )
        device = self.stake.device
        return choose_layout(
            dense,
            page_bytes=device.page_bytes,
            device_bytes=device.capacity_bytes,
            models=SHARED_BY,
            accepted=["block_interleaved"],
        ).layout

    def alloc_kvcache(self, layout: KVLayout, num_tokens: int, request_tokens: int) -> KVCache:
        """Raises what `Stake.alloc_kvcache` raises."""
        self.kv = self.stake.alloc_kvcache(layout, num_tokens, request_tokens)
        return self.kv

    def answer_requests(self, shrink: Callable[[int | None], Any]) -> None:
        """Gives others what they ask for."""
        self.stake.client.answer_requests(shrink)
        self._answered.set()

    def publish_evictable(self, size_bytes: int) -> None:
        """Says what the engine could do without, where that has changed."""
        if size_bytes != self._published_bytes:
            self.stake.client.publish_evictable(size_bytes)
            self._published_bytes = size_bytes

    def call_when_asked(self, wake: Callable[[], None]) -> None:
        """`wake` is called on a thread of its own whenever others ask: an idle engine sleeps. The
        process ends with its parent, even a killed one: it would hold memory for nobody."""
        parent = os.pidfd_open(os.getppid())
        asked = poll()
        for descriptor in (parent, self.stake.client.fileno()):
            asked.register(descriptor, POLLIN)

        def watch() -> None:
            while True:
                if any(descriptor == parent for descriptor, _ in asked.poll()):
                    os._exit(1)
                self._answered.clear()
                wake()
                self._answered.wait()

        threading.Thread(target=watch, name="kvcached-requests", daemon=True).start()


_active: Any = None


def use_memory(memory: Any) -> None:
    """For who steps vLLM in its own process: what looks to vLLM's worker, scheduler and block pool
    as an EngineMemory does, until the next call. None: the engine is gone."""
    global _active  # noqa: PLW0603 (vLLM hands nothing from its worker to its scheduler)
    _active = memory


def open_memory(config: Any) -> Any:
    """The worker's, of which a process has one. Raises NotImplementedError for a second."""
    if isinstance(_active, EngineMemory):
        raise NotImplementedError("a second engine in one process is not served on kvcached")
    if _active is None:
        use_memory(EngineMemory(config))
    return _active


def active_memory() -> Any:
    """The one that the worker of this process has opened, or that is used."""
    if _active is None:
        raise RuntimeError("vLLM's worker is in another process than its scheduler")
    return _active
