"""Prints transformers' outputs of prepared models as JSON. Runs in a separate process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from prism.models.hugging_face import import_transformers

QUESTION = "What is the capital of France?"


def describe(path: Path) -> dict[str, Any]:
    transformers = import_transformers()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    network = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    message = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(
        message, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    output = network.generate(prompt, max_new_tokens=24, do_sample=False)
    return {
        "parameters": sum(p.numel() for p in network.parameters()),
        "dtype": str(network.dtype),
        "quantized": getattr(network.config, "quantization_config", None) is not None,
        "vocabulary": len(tokenizer),
        "config_vocabulary": network.config.vocab_size,
        "eos": [tokenizer.eos_token_id, network.generation_config.eos_token_id],
        "prompt": tokenizer.decode(prompt[0]),
        "output_ids": output[0, prompt.shape[1] :].tolist(),
        "output": tokenizer.decode(output[0, prompt.shape[1] :]),
    }


if __name__ == "__main__":
    print(json.dumps([describe(Path(path)) for path in sys.argv[1:]]))
