"""ProcessGroupNCCL over gloo: collectives on what kernels see of CUDA tensors."""

from __future__ import annotations

import itertools
import threading
from datetime import timedelta
from typing import Any

from torch import _C

NCCL_VERSION = (2, 27, 5)


def install() -> None:
    """Adds ProcessGroupNCCL to torch._C._distributed_c10d as soon as torch makes that module."""
    make = _C._c10d_init

    def with_nccl() -> Any:
        made = make()
        _C._distributed_c10d.ProcessGroupNCCL = _process_group(_C._distributed_c10d)
        return made

    _C._c10d_init = with_nccl
    _C._nccl_version = lambda: NCCL_VERSION[0] * 10000 + NCCL_VERSION[1] * 100 + NCCL_VERSION[2]
    _C._nccl_version_suffix = lambda: b""


class Options:
    """ProcessGroupNCCL.Options, stored and not used."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)


class Done:
    """Finished collective: kernels of this front run at once."""

    def wait(self, *_timeout: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def result(self) -> list[Any]:
        return []


def _views(tensors: Any) -> Any:
    import torchcuda_front

    if isinstance(tensors, list | tuple):
        return [_views(tensor) for tensor in tensors]
    if not tensors.is_cuda:
        raise RuntimeError("No backend type associated with device type cpu")
    return torchcuda_front.host_view(tensors)


def _flat(tensors: Any) -> list[Any]:
    if not isinstance(tensors, list | tuple):
        return [tensors]
    return [flat for tensor in tensors for flat in _flat(tensor)]


def _collective(name: str, tensor_arguments: int) -> Any:
    """Returns the gloo collective `name`. Its first arguments are tensors or lists of tensors."""

    def run(self: Any, *arguments: Any, **named: Any) -> Done:
        import torchcuda_front

        tensors = arguments[:tensor_arguments]
        views = [_views(argument) for argument in tensors]
        rest = arguments[tensor_arguments:]
        function = getattr(self._gloo, _RENAMED.get(name, name))
        torchcuda_front.kernel(
            _flat(list(tensors)), lambda: function(*views, *rest, **named).wait()
        )
        return Done()

    return run


# torch's newer names for gloo's own.
_RENAMED = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
}
_TENSOR_ARGUMENTS = {
    "all_gather_single": 2,
    "reduce_scatter_single": 2,
    "allreduce": 1,
    "broadcast": 1,
    "reduce": 1,
    "allgather": 2,
    "_allgather_base": 2,
    "gather": 2,
    "scatter": 2,
    "reduce_scatter": 2,
    "_reduce_scatter_base": 2,
    "alltoall_base": 2,
    "send": 1,
    "recv": 1,
}


class Heartbeat:
    """Thread of the first group of a process. It asks the store every second whether a rank wants
    debugging information."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(1.0):
            self._store.check(["should_dump"])

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()


def _process_group(c10d: Any) -> type[Any]:
    numbers = itertools.count()

    class ProcessGroupNCCL(c10d.ProcessGroup):  # type: ignore[misc, name-defined]
        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            super().__init__(rank, size)
            self._gloo = c10d.ProcessGroupGloo(store, rank, size, timeout=options._timeout)
            self._heartbeat = Heartbeat(store) if next(numbers) == 0 else None

        @property
        def group_name(self) -> str:
            return str(self._name)

        def _set_group_name(self, name: str) -> None:
            self._name = name

        def _set_group_desc(self, description: str) -> None:
            """Ignores the description, which only logs use."""

        def getBackendName(self) -> str:
            return "nccl"

        supports_splitting = False
        supports_coalescing = False

        def _get_backend(self, device: Any) -> Any:
            if device.type != "cuda":
                raise RuntimeError(f"No backend type associated with device type {device.type}")
            return self

        def _set_sequence_number_for_group(self) -> None:
            """Ignores the call: the number matters only where ranks are compared."""

        def barrier(self, *_arguments: Any, **_named: Any) -> Done:
            self._gloo.barrier().wait()
            return Done()

        def abort(self) -> None:
            """Does nothing: no collective is pending."""

        def shutdown(self, *_arguments: Any) -> None:
            """Stops the heartbeat. gloo ends with its object."""
            if self._heartbeat is not None:
                self._heartbeat.stop()

    ProcessGroupNCCL.Options = Options  # type: ignore[attr-defined]
    for name, count in _TENSOR_ARGUMENTS.items():
        setattr(ProcessGroupNCCL, name, _collective(name, count))
    return ProcessGroupNCCL
