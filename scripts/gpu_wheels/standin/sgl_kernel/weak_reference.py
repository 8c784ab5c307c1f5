"""Tensors that do not keep their memory alive."""

from __future__ import annotations

import torch


def weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the same memory, type, shape and strides that does not own the storage.

    The caller guarantees that the memory outlives the result: it belongs to a CUDA graph's pool.
    On a CPU, which does not have graphs, returns the tensor itself.
    """
    if tensor.device.type != "cuda":
        return tensor
    storage = tensor.untyped_storage()
    weak = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(weak, tensor.storage_offset(), tensor.size(), tensor.stride())
