"""Tensors of models in GGUF: their names in transformers, and what an engine keeps of them.

Only decoders with the modules of Llama: llama.cpp changes the weights of other families, or gives
them names that SGLang's loaders do not have.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kvcached import Checkpoint, CheckpointTensor, TensorSpec
from kvcached.weights.gguf_file import SUFFIX

GGUF = "gguf"  # method of quantized weights, by SGLang's name
# Types of tensors that are loaded in the model's dtype.
PLAIN = frozenset({"F32", "F16", "BF16"})
# Frequencies of scaled rotary embeddings, which config.json has.
FREQUENCIES = "rope_freqs.weight"
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Modules that engines keep as one matrix, with rows as long as the longest.
_FUSED = {"attn_q": "attn_qkv", "attn_k": "attn_qkv", "attn_v": "attn_qkv"} | {
    "ffn_gate": "ffn_gate_up",
    "ffn_up": "ffn_gate_up",
}


def hf_name(name: str) -> str | None:
    """Returns a tensor's name in transformers, None for an unknown tensor."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _MODULES:
        return None
    return f"model.layers.{match[1]}.{_MODULES[match[2]]}.{match[3]}"


def has_gguf(path: Path) -> bool:
    """Returns whether a path is a file in GGUF, or a folder whose weights are."""
    if path.suffix == SUFFIX:
        return path.is_file()
    return any(path.glob(f"*{SUFFIX}")) and not any(path.glob("*.safetensors"))


def as_in_transformers(checkpoint: Checkpoint) -> dict[str, CheckpointTensor]:
    """Returns the known tensors with their names and shapes in transformers, as they would be in 16
    bits."""
    known = ((hf_name(name), tensor) for name, tensor in checkpoint.tensors.items())
    return {name: replace(_in_16_bits(tensor), name=name) for name, tensor in known if name}


def wrong_tensor(checkpoint: Checkpoint, known: Iterable[str]) -> str:
    """Returns a tensor that an engine cannot load, with the remedy, "" if there is none.

    Args:
        known: Quantized types that it computes.
    """
    types = {*known, *PLAIN}
    for name, tensor in checkpoint.tensors.items():
        if hf_name(name) is None and name != FREQUENCIES:
            return f"has {name}, which Llama and Qwen do not have; give *.safetensors"
        if tensor.ggml_type not in (types if len(tensor.shape) > 1 else PLAIN):
            return (
                f"has {tensor.name} in {tensor.ggml_type}, for which SGLang does not have a kernel;"
                " give a file in another type, such as Q4_K_M"
            )
    for matrices in _matrices(checkpoint.tensors).values():
        plain = {tensor.ggml_type in PLAIN for tensor in matrices}
        if len(plain) > 1:
            one, other = matrices[0], matrices[-1]
            return (
                f"has {one.name} in {one.ggml_type} and {other.name} in {other.ggml_type}, which"
                " SGLang cannot fuse; give a file in another type, such as Q4_K_M"
            )
    return ""


def kept(tensors: Mapping[str, CheckpointTensor]) -> list[CheckpointTensor]:
    """Returns the tensors that an engine keeps of a file's: fused matrices of blocks, a byte for
    the type of each matrix, and the others in 16 bits, which are loaded in the model's dtype."""
    found = [
        _in_16_bits(tensor)
        for tensor in tensors.values()
        if len(tensor.shape) == 1 and tensor.name != FREQUENCIES
    ]
    for name, matrices in _matrices(tensors).items():
        found.append(_fused(name, matrices))
        types = TensorSpec("uint8", (len(matrices),))
        found.append(replace(matrices[0], name=f"{name}.type", spec=types, numbers=()))
    return found


def _matrices(tensors: Mapping[str, CheckpointTensor]) -> dict[str, list[CheckpointTensor]]:
    """Returns the matrices by the one that an engine makes of them."""
    found = defaultdict(list)
    for name, tensor in tensors.items():
        if len(tensor.shape) > 1:
            match = _LAYER.fullmatch(name)
            module = match[2] if match else name
            place = match[1] if match else ""
            found[f"{_FUSED.get(module, module)}.{place}"].append(tensor)
    return found


def _fused(name: str, matrices: Sequence[CheckpointTensor]) -> CheckpointTensor:
    first = matrices[0]
    if first.ggml_type in PLAIN:
        rows, columns = sum(each.shape[0] for each in matrices), first.shape[1]
        return replace(first, name=name, spec=TensorSpec("float16", (rows, columns)))
    rows = sum(each.spec.shape[0] for each in matrices)
    row_bytes = max(each.spec.shape[1] for each in matrices)
    return replace(first, name=name, spec=TensorSpec("uint8", (rows, row_bytes)), numbers=())


def _in_16_bits(tensor: CheckpointTensor) -> CheckpointTensor:
    return replace(tensor, spec=TensorSpec("float16", tensor.shape), numbers=())
