"""Writes a random model of Llama's architecture at the speed of memory.

    python -m lab.gpu_check.serving.large_model FOLDER CONFIG

CONFIG: JSON of the sizes in config.json. The weights are made on the GPU and written into one file,
without transformers. The last line on stdout is JSON. `short` says why memory did not suffice.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.gpu_check.kv import CUDA, torch_or_skip
from lab.gpu_check.serving import shard
from lab.gpu_check.serving.engine_models import write_tokenizer

SPREAD = 0.02  # of the weights, as transformers initialises them
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "initializer_range": SPREAD,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}


def write(folder: Path, sizes: dict[str, int]) -> dict[str, Any]:
    """Writes the model. Returns its bytes, and the seconds to make and to write it."""
    torch = torch_or_skip()
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    tensors = {name: _tensor(torch, shape) for name, shape in shapes_of(sizes)}
    torch.cuda.synchronize()
    made_s = time.monotonic()
    total_before = shard.meminfo("MemTotal")
    try:
        size_bytes = shard.save(torch, tensors, folder)
    except shard.MemoryShort as error:
        return {"short": str(error)}
    write_s = time.monotonic() - made_s
    (folder / "config.json").write_text(json.dumps(CONFIG | sizes))
    write_tokenizer(folder, sizes["vocab_size"], sizes["max_position_embeddings"])
    return {
        "bytes": size_bytes,
        "make_s": made_s - began_s,
        "write_s": write_s,
        "memory_grew": shard.meminfo("MemTotal") > total_before,
        "short": "",
    }


def shapes_of(sizes: dict[str, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the name and the shape of each parameter."""
    hidden, ffn, vocabulary = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    head_dim = hidden // sizes["num_attention_heads"]
    kv = sizes["num_key_value_heads"] * head_dim
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for number in range(sizes["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        for name, rows, columns in (
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", ffn, hidden),
            ("mlp.up_proj", ffn, hidden),
            ("mlp.down_proj", hidden, ffn),
        ):
            yield f"{layer}.{name}.weight", (rows, columns)
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def size_of(sizes: dict[str, int]) -> int:
    """Returns the bytes of all parameters."""
    return sum(2 * math.prod(shape) for _, shape in shapes_of(sizes))


def _tensor(torch: Any, shape: tuple[int, ...]) -> Any:
    made = torch.empty(shape, dtype=torch.bfloat16, device=CUDA)
    return made.fill_(1.0) if len(shape) == 1 else made.normal_(0.0, SPREAD)


if __name__ == "__main__":
    print(json.dumps(write(Path(sys.argv[1]), json.loads(sys.argv[2]))))
