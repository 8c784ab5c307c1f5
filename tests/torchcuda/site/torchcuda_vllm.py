"""Double of vLLM's kernels for CUDA: those of its CPU build, which the front runs on CUDA tensors.

Attention is in Triton, which another module here replaces.
"""

from __future__ import annotations

import torch
import vllm._C  # noqa: F401
from torchcuda_library import current_device, kernel_distance

# Questions whether there are kernels for quantised weights.
_SUPPORTS = (
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_group_gemm_supported",
)


def _rms_norm(
    output: torch.Tensor, values: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> None:
    """Normalises the last dimension. vLLM's kernel for CPUs needs tensors without gaps."""
    kept = torch.nn.functional.rms_norm(values.float(), values.shape[-1:], None, epsilon)
    output.copy_(kept if weight is None else kept * weight)


def _view_of_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a CUDA tensor over pinned memory, which lives as long as `tensor`."""
    address = (tensor.data_ptr() - kernel_distance()) & (2**64 - 1)
    device = torch.device("cuda", current_device())
    storage = torch._C._construct_storage_from_data_pointer(address, device, tensor.nbytes)
    view = torch.empty(0, dtype=tensor.dtype, device=device)
    return view.set_(storage, 0, tensor.shape, tensor.stride())


_library = torch.library.Library("_C", "FRAGMENT")
_library.impl("rms_norm", _rms_norm, "CUDA")
_library.define("get_cuda_view_from_cpu_tensor(Tensor(a!) tensor) -> Tensor(a!)")
_library.impl("get_cuda_view_from_cpu_tensor", _view_of_pinned, "CPU")
for _name in _SUPPORTS:
    _library.define(f"{_name}(int capability) -> bool")
    _library.impl(_name, lambda _capability: False, "CompositeExplicitAutograd")
