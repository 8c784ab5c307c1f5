"""kvcached and torch on device 0, for the steps that use them."""

from __future__ import annotations

import fcntl
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from lab.gpu_check.driver import SEEN_GPU
from lab.gpu_check.report import Skip
from lab.gpu_check.sizes import PAGE_BYTES

if TYPE_CHECKING:
    from kvcached import Device, VirtualTensor

CUDA = "cuda:0"
OFD_SETLK = 37


def require_kvcached() -> None:
    """Raises Skip where kvcached cannot run on any GPU."""
    if find_spec("kvcached") is None or find_spec("kvcached._core") is None:
        raise Skip("kvcached is not built: see the step build")
    if why := why_no_locks():
        raise Skip(why)


def why_no_locks() -> str:
    """Returns "" if this kernel grants the locks by which the ledger knows which clients live."""
    lock = struct.pack("hhqqixxxx", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    with tempfile.TemporaryFile(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as file:
        try:
            fcntl.fcntl(file, OFD_SETLK, lock)
        except OSError as error:
            return (
                f"this kernel refuses locks of open file descriptions ({error.strerror}), as gVisor"
                " does, and kvcached's ledger needs them: run on a Linux kernel"
            )
    return ""


def torch_or_skip() -> Any:
    """Returns torch with CUDA. Raises Skip, or RuntimeError where the step "facts" found a GPU."""
    try:
        import torch
    except ImportError as error:
        raise Skip(f"torch cannot be imported: {error}") from error
    if not torch.cuda.is_available():
        if os.environ.get(SEEN_GPU):
            raise RuntimeError("torch sees no GPU any more")
        raise Skip(f"torch {torch.__version__} sees no GPU")
    torch.cuda.set_device(0)
    return torch


@contextmanager
def ledger(pages: int, namespace: str = "") -> Iterator[Device]:
    """Yields a ledger of device 0 for this step, which is removed after the block."""
    from kvcached import Device

    device = Device.open(
        CUDA,
        capacity_bytes=pages * PAGE_BYTES,
        page_bytes=PAGE_BYTES,
        namespace=namespace or f"gpu-check-{uuid4().hex[:8]}",
    )
    try:
        yield device
    finally:
        device.destroy(force=True)


def map_if_room(tensor: VirtualTensor, size_bytes: int) -> bool:
    """Maps the beginning of a tensor. Returns False where the ledger lacks room for it now."""
    from kvcached import NoRoomError

    try:
        tensor.map(0, size_bytes)
    except NoRoomError:
        return False
    return True
