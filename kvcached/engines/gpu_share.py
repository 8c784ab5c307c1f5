"""A stock engine's share of a GPU other than its KV.

The device's ledger promises pages to all engines, so each engine must stay within its leases. The
memory other than KV is leased before the engine allocates it, and torch, which allocates weights,
activations and graphs, is kept below a cap.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from kvcached.client import Client
from kvcached.engines.device_share import DeviceShare
from kvcached.errors import InvalidArgumentError, NoRoomError
from kvcached.tools.sizes import format_size

# CUDA context, code of the engine's and torch's kernels, and graphs; estimated for an H200.
DRIVER_BYTES = 1 << 30
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


def lease(share: DeviceShare, index: int, need_bytes: int) -> None:
    """Leases `need_bytes` of cuda:`index` in addition to KV, and keeps torch within them.

    Raises NoRoomError, InvalidArgumentError.
    """
    if need_bytes <= DRIVER_BYTES:
        raise InvalidArgumentError(
            f"KVCACHED_STATIC is {format_size(need_bytes)}, but CUDA alone takes up to "
            f"{format_size(DRIVER_BYTES)} of it: raise it, or unset it"
        )
    share.lease_static(need_bytes)
    adopt(share.client, index, need_bytes - DRIVER_BYTES)


def adopt(client: Client, index: int, torch_cap_bytes: int) -> None:
    """Prepares torch for a model on cuda:`index`, before it is built. Idempotent.

    torch's allocator (activations, workspaces, graphs) reserves at most `torch_cap_bytes`. Freed
    pages wait for the default stream, on which engines build.
    """
    torch.cuda.set_device(index)
    total_bytes = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, torch_cap_bytes / total_bytes), index)
    client.set_streams([torch.cuda.default_stream(index).cuda_stream])


@contextmanager
def within(need_bytes: int, flag: str) -> Iterator[None]:
    """Raises NoRoomError if torch needs more than was leased. `flag`: the engine's argument for the
    GPU's memory that is not leased."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise NoRoomError(
            f"the model does not fit into the {format_size(need_bytes)} leased in addition to its "
            f"KV: set KVCACHED_STATIC, or lower {flag}",
            need_bytes,
            need_bytes,
        ) from error


def need_bytes(folder: str, index: int, fraction: float) -> int:
    """Returns the size of the weights' files plus the engine's reserve for memory other than KV.

    `fraction` is the share of the GPU's memory for weights and KV, so the reserve is the rest:
    contexts, activations, graphs. Raises InvalidArgumentError without weights.
    """
    total_bytes = torch.cuda.get_device_properties(index).total_memory
    return _files_bytes(folder) + int((1 - fraction) * total_bytes)


def _files_bytes(folder: str) -> int:
    for pattern in WEIGHTS:  # engines take the first format that they find
        sizes = [path.stat().st_size for path in Path(folder).glob(pattern)]
        if sizes:
            return sum(sizes)
    raise InvalidArgumentError(
        f"{folder} does not have weights to measure ({', '.join(WEIGHTS)}): set KVCACHED_STATIC "
        "to the server's memory other than KV"
    )
