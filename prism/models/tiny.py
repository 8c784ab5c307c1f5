"""Tiny models with random weights: real architectures that a laptop can serve.

Their output is nonsense, but is the same on every machine: weights are drawn with numpy's PCG64,
seeded by the names of the model and the tensor.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prism.models.hugging_face import import_transformers
from prism.models.store import Progress
from prism.models.tokenizer import END, PAD, SPECIAL_TOKENS, write_tokenizer

# Large enough that rounding in batched arithmetic does not change the largest logit.
WEIGHT_STD = 0.08


@dataclass(frozen=True, slots=True)
class TinyModel:
    name: str
    model_type: str
    summary: str
    context_length: int
    # Fields of the architecture's transformers config.
    settings: dict[str, Any]
    recipe: int = 1

    def make(self, directory: Path, progress: Progress) -> None:
        """Writes config, weights (float32 safetensors) and tokenizer to `directory`."""
        progress(f"{self.name}: training the tokenizer")
        write_tokenizer(directory, self.settings["vocab_size"], self.context_length)
        progress(f"{self.name}: drawing the weights")
        _save_weights(self, directory)


LLAMA = TinyModel(
    name="tiny-llama",
    model_type="llama",
    summary="Llama, 4 M parameters, random weights",
    context_length=2048,
    settings={
        "vocab_size": 1536,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    },
)
QWEN3 = TinyModel(
    name="tiny-qwen3",
    model_type="qwen3",
    summary="Qwen3, 10 M parameters, random weights",
    context_length=2048,
    settings={
        "vocab_size": 1792,
        "hidden_size": 320,
        "intermediate_size": 1152,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    },
)
GPT2 = TinyModel(
    name="tiny-gpt2",
    model_type="gpt2",
    summary="GPT-2, 2 M parameters, random weights",
    context_length=1024,
    settings={
        "vocab_size": 1280,
        "n_embd": 192,
        "n_layer": 3,
        "n_head": 6,
        "n_positions": 1024,
    },
)
TINY_MODELS = (LLAMA, QWEN3, GPT2)


def _save_weights(model: TinyModel, directory: Path) -> None:
    import torch

    transformers = import_transformers()
    ids = {name: SPECIAL_TOKENS.index(name) for name in (PAD, END)}
    config = transformers.AutoConfig.for_model(
        model.model_type,
        **model.settings,
        bos_token_id=None,
        eos_token_id=ids[END],
        pad_token_id=ids[PAD],
        dtype="float32",
    )
    network = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, tensor in network.named_parameters():
            tensor.copy_(torch.from_numpy(_draw(model.name, name, tuple(tensor.shape))))
    network.save_pretrained(directory, max_shard_size="50GB")


def _draw(model_name: str, tensor_name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Returns a tensor's values: normal for matrices; one for norms and zero for biases, as in a
    new network."""
    if len(shape) == 1:
        return np.full(shape, 0.0 if tensor_name.endswith("bias") else 1.0, dtype=np.float32)
    seed = zlib.crc32(f"{model_name}/{tensor_name}".encode())
    return np.random.default_rng(seed).normal(0.0, WEIGHT_STD, shape).astype(np.float32)
