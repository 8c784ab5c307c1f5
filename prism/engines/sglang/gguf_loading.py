"""Load of weights in GGUF by SGLang's methods, which make parameters while they read a file.

The memory of a model is laid out before that. So SGLang first loads tensors of the same types and
shapes on the meta device, and joins fused ones there. The file is then read into these parameters.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping

import torch
from gguf import GGMLQuantizationType
from sglang.srt.layers.quantization.gguf import GGUFEmbeddingMethod, GGUFLinearMethod
from torch import nn

from kvcached import CheckpointTensor
from prism.models.gguf.gguf_weights import PLAIN, hf_name

METHODS = (GGUFEmbeddingMethod, GGUFLinearMethod)
Tensors = Mapping[str, CheckpointTensor]


def make_parameters(model: nn.Module, tensors: Tensors, dtype: torch.dtype) -> None:
    """Gives the parameters of a model that was built on the meta device the types and shapes of the
    file's tensors, of which those in 16 or 32 bits are loaded in `dtype`."""
    matrices = {name: tensor for name, tensor in tensors.items() if len(tensor.shape) > 1}
    empty = ((name, _empty(tensor)) for name, tensor in matrices.items())
    model.load_weights(_as_loaded(matrices, empty, dtype))
    for module in model.modules():
        if isinstance(method := getattr(module, "quant_method", None), METHODS):
            method.process_weights_after_loading(module)
            if module.qweight.shard_id:
                module.qweight.weight_loader = _write


def read(
    model: nn.Module,
    tensors: Tensors,
    dtype: torch.dtype,
    prefetched: Iterable[tuple[str, torch.Tensor]] | None,
) -> None:
    """Writes the parameters that `make_parameters` made, from the file if it was not prefetched."""
    found = _from_file(tensors.values()) if prefetched is None else prefetched
    model.load_weights(_as_loaded(tensors, found, dtype))


def _as_loaded(
    tensors: Tensors,
    found: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the types of all matrices, then the contents of all tensors, with the names that
    SGLang's loaders expect."""
    for name, tensor in tensors.items():
        if len(tensor.shape) > 1 and (known := hf_name(name)):
            number = GGMLQuantizationType[tensor.ggml_type].value
            yield known.replace("weight", "qweight_type"), torch.tensor(number)
    for name, content in found:
        if (known := hf_name(name)) is None:
            continue
        if len(tensors[name].shape) == 1:
            yield known, content
        else:
            is_plain = tensors[name].ggml_type in PLAIN
            yield known.replace("weight", "qweight"), content.to(dtype) if is_plain else content


def _empty(tensor: CheckpointTensor) -> torch.Tensor:
    dtype = getattr(torch, tensor.spec.dtype)
    return torch.empty(tensor.spec.shape, dtype=dtype, device="meta")


def _from_file(tensors: Iterable[CheckpointTensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for tensor in tensors:
        with tensor.path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        yield tensor.name, _values(tensor, content)


def _values(tensor: CheckpointTensor, file: mmap.mmap) -> torch.Tensor:
    """Returns a tensor over the pages of its file."""
    size_bytes, dtype = tensor.spec.size_bytes, getattr(torch, tensor.spec.dtype)
    flat = torch.frombuffer(file, dtype=torch.uint8, count=size_bytes, offset=tensor.offset_bytes)
    return flat.view(dtype).view(tensor.spec.shape)


def _write(parameter: nn.Parameter, content: torch.Tensor, shard: str | int) -> None:
    """Writes one matrix of a fused parameter, whose rows may be longer."""
    begin, end, columns = parameter.shard_offset_map[shard]
    parameter.data[begin:end, :columns] = content
    parameter.data[begin:end, columns:] = 0
