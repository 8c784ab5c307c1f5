"""torch._C's streams, events and CUDA graphs on the front."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

from torch import _C
from torchcuda_library import CUDA, checked, current_device, current_stream, library


class StreamBase(_C.Stream):  # type: ignore[misc]
    """torch._C._CudaStreamBase: a stream of the pool, a known one, or an external one."""

    def __new__(
        cls,
        priority: int = 0,
        stream_id: int = 0,
        device_index: int = 0,
        device_type: int = 0,
        stream_ptr: int = 0,
    ) -> Any:
        if device_type or stream_ptr:
            index = device_index if device_type else current_device()
            return super().__new__(
                cls, stream_id=stream_id or stream_ptr, device_index=index, device_type=CUDA
            )
        return super().__new__(cls, device=_torch_device(current_device()), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return int(self.stream_id)

    @property
    def priority(self) -> int:
        return 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, -5)


def _torch_device(index: int) -> Any:
    import torch

    return torch.device("cuda", index)


class EventBase(_C.Event):  # type: ignore[misc]
    """torch._C._CudaEventBase."""

    def __new__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> Any:
        return super().__new__(
            cls, device=_torch_device(current_device()), enable_timing=enable_timing
        )

    @property
    def cuda_event(self) -> int:
        return int(self.event_id)


_pool_ids = itertools.count(1)
_MODES = {"global": 0, "thread_local": 1, "relaxed": 2}


def graph_pool_handle() -> tuple[int, int]:
    return (0, next(_pool_ids))


_captured: list[Any] = []


def keep(callback: Any) -> None:
    """Keeps the callback for as long as the graph that is being captured."""
    _captured.append(callback)


class GraphBase:
    """torch._C._CUDAGraph over the front's list of kernels."""

    def __new__(cls, keep_graph: bool = False) -> Any:
        return super().__new__(cls)

    def __init__(self, keep_graph: bool = False) -> None:
        self._graph: int | None = None
        self._pool: tuple[int, int] | None = None
        self._device = 0
        self._callbacks: list[Any] = []

    def capture_begin(
        self, pool: tuple[int, int] | None = None, capture_error_mode: str = "global"
    ) -> None:
        if self._graph is not None:
            raise RuntimeError("This CUDAGraph instance already owns a captured graph")
        self._device = current_device()
        if current_stream(self._device) == 0:
            raise RuntimeError(
                "CUDA graphs must be captured on a non-default stream. (However, after capture, "
                "it's ok to replay them on the default stream.)"
            )
        self._pool = pool if pool is not None else (next(_pool_ids), 0)
        library.torchcuda_begin_pool(self._device, *self._pool)
        made = ctypes.c_void_p()
        error = library.torchcuda_capture_begin(_MODES[capture_error_mode], ctypes.byref(made))
        self._graph = made.value
        self._raise(error)

    def capture_end(self) -> None:
        if self._graph is None or self._pool is None:
            raise RuntimeError("capture_end without capture_begin")
        library.torchcuda_end_pool(self._device, *self._pool)
        self._callbacks += _captured
        _captured.clear()
        self._raise(library.torchcuda_capture_end(self._graph))

    def _raise(self, error: int) -> None:
        if error:
            self.reset()
            raise _C.AcceleratorError(f"CUDA error: {library.torchcuda_error(error).decode()}")

    def instantiate(self) -> None:
        """Does nothing: the end of the capture instantiates."""

    def replay(self) -> None:
        if self._graph is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        checked(library.torchcuda_replay, self._graph)

    def reset(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            library.torchcuda_graph_free(graph)
        self._callbacks.clear()
        pool, self._pool = self._pool, None
        if pool is not None:
            library.torchcuda_release_pool(self._device, *pool)

    def pool(self) -> tuple[int, int] | None:
        return self._pool

    def __del__(self) -> None:
        self.reset()

    def enable_debug_mode(self) -> None:
        """Does nothing: the graph has no debug data."""

    def debug_dump(self, debug_path: str) -> None:
        """Does nothing: the graph has no debug data."""
