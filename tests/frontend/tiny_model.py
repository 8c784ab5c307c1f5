"""A model directory of a few KB in Hugging Face's layout, with the files that Prism reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EOS = "<|end|>"
VOCAB_SIZE = 300
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "dtype": "float32",
}


def tokenizer() -> Tokenizer:
    """Returns a byte-level BPE tokenizer whose id 0 is the end-of-sequence token.

    Characters outside ASCII take several tokens.
    """
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[EOS],
        show_progress=False,
    )
    made.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 4, trainer)
    return made


def make_model(directory: Path, chat: bool = True, **config: Any) -> Path:
    """Writes the files; `config` overrides keys of config.json (None removes one)."""
    directory.mkdir(parents=True, exist_ok=True)
    merged = {k: v for k, v in {**CONFIG, **config}.items() if v is not None}
    (directory / "config.json").write_text(json.dumps(merged))
    tokenizer().save(str(directory / "tokenizer.json"))
    settings = {"eos_token": EOS, **({"chat_template": CHAT_TEMPLATE} if chat else {})}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    tensors = {
        "model.embed_tokens.weight": np.zeros((VOCAB_SIZE, 32), np.float16),
        "model.norm.weight": np.zeros(32, np.float16),
        "lm_head.weight": np.zeros((VOCAB_SIZE, 32), np.float16),
    }
    save_file(tensors, str(directory / "model.safetensors"))
    return directory


def make_whole_model(directory: Path, **config: Any) -> Path:
    """Writes a model as `make_model` does, with the weights of every layer, which a Llama of this
    config.json has."""
    make_model(directory, **config)
    sizes = {**CONFIG, **config}
    hidden, inner, heads = (
        sizes[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    kv = hidden // heads * sizes["num_key_value_heads"]
    layer = {
        **{f"self_attn.{name}_proj": (hidden, hidden) for name in "qo"},
        **{f"self_attn.{name}_proj": (kv, hidden) for name in "kv"},
        **{f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")},
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes = {
        f"model.layers.{number}.{name}.weight": shape
        for number in range(sizes["num_hidden_layers"])
        for name, shape in layer.items()
    }
    shapes |= {"model.embed_tokens.weight": (VOCAB_SIZE, hidden), "model.norm.weight": (hidden,)}
    tensors = {name: np.zeros(shape, np.float16) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    return directory
