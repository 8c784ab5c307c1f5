"""Models in GGUF as llama.cpp's converter writes them, and ggml's kernels in plain torch.

SGLang has kernels for these types on GPUs alone. Here, gguf's own reference dequantises a matrix
for each product.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file
from torch import nn

# Types of a mixed file: V in more bits than Q and K, which SGLang fuses.
Q4_0 = {"": Type.Q4_0, "attn_v": Type.Q8_0, "token_embd": Type.Q5_1, "output.": Type.Q8_0}
Q4_K = {"": Type.Q4_K, "attn_v": Type.Q6_K, "ffn_down": Type.Q6_K, "output.": Type.Q6_K}
F16 = {"": Type.F16}
BF16 = {"": Type.BF16}
_SCALES = {"Q4_K": (0, 4), "Q6_K": (208, 210)}  # bytes of a block with scales in 16 bits


def write_gguf(source: Path, file: Path, types: Mapping[str, Type], **more: Any) -> Path:
    """Writes a folder's model. Returns the path.

    Args:
        types: of matrices whose names contain a text, the last one that fits.
        more: further keys of the header, after the architecture.
    """
    config = json.loads((source / "config.json").read_text())
    kind = config["model_type"]
    writer = gguf.GGUFWriter(file, kind)
    _write_header(writer, config)
    _write_tokenizer(writer, source)
    for key, value in more.items():
        writer.add_string(f"{kind}.{key.replace('__', '.')}", value)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, tensor in load_file(source / "model.safetensors").items():
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        values = _permuted(tensor, known, config) if kind == "llama" else tensor
        form = Type.F32
        for part, wanted in types.items() if tensor.ndim > 1 else ():
            form = wanted if part in known else form
        writer.add_tensor(known, _stored(values, form, known), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _write_header(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if config.get("head_dim"):
        writer.add_rope_dimension_count(config["head_dim"])


def _write_tokenizer(writer: gguf.GGUFWriter, source: Path) -> None:
    model = json.loads((source / "tokenizer.json").read_text())
    settings = json.loads((source / "tokenizer_config.json").read_text())
    tokens = sorted(model["model"]["vocab"], key=model["model"]["vocab"].get)
    special = {each["content"]: each["id"] for each in model["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["model"]["merges"]])
    writer.add_eos_token_id(special[settings["eos_token"]])
    writer.add_pad_token_id(special[settings["pad_token"]])
    writer.add_bos_token_id(special[settings["eos_token"]])
    writer.add_chat_template(settings["chat_template"])


def _permuted(tensor: np.ndarray, name: str, config: Mapping[str, Any]) -> np.ndarray:
    """Returns Q and K with the rows of a head in the order of interleaved rotary embeddings."""
    key = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    heads = config.get(key.get(name.split(".")[-2], ""))
    if heads is None:
        return tensor
    halves = tensor.reshape(heads, 2, -1, tensor.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)


def _stored(values: np.ndarray, form: Type, name: str) -> np.ndarray:
    """Returns a tensor's bytes. gguf does not quantise to the types with groups of blocks, so
    their blocks are random, with small scales."""
    if form.name not in _SCALES:
        return gguf.quants.quantize(values.astype(np.float32), form)
    rng = np.random.default_rng(len(name) + values.size)
    numbers, size_bytes = gguf.GGML_QUANT_SIZES[form]
    rows, columns = values.shape
    blocks = rng.integers(0, 256, (rows, columns // numbers, size_bytes), dtype=np.uint8)
    begin, end = _SCALES[form.name]
    scales = rng.uniform(0.0001, 0.0003, (rows, columns // numbers, (end - begin) // 2))
    blocks[:, :, begin:end] = scales.astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


# --- kernels ---------------------------------------------------------------------------------


def dequantised(
    matrix: torch.Tensor, kind: int, rows: int, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    values = gguf.quants.dequantize(matrix.numpy(), Type(kind))
    return torch.from_numpy(values).to(dtype).reshape(rows, columns)


def product(matrix: torch.Tensor, x: torch.Tensor, kind: int, rows: int) -> torch.Tensor:
    return nn.functional.linear(x, dequantised(matrix, kind, rows, -1, x.dtype))


KERNELS = {
    "ggml_dequantize": dequantised,
    "ggml_mul_mat_a8": product,
    "ggml_mul_mat_vec_a8": product,
}
