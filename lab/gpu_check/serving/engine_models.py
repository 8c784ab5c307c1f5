"""Part of the step "engine": writes random models, and judges tokens by transformers.

    python -m lab.gpu_check.serving.engine_models write large|small FOLDER...
    python -m lab.gpu_check.serving.engine_models judge ROUNDS.json FOLDER...

A folder is named after its family. The last line on stdout is JSON.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

from lab.gpu_check.kv import CUDA, torch_or_skip
from lab.gpu_check.memory.models import config_of, prepare_transformers
from lab.gpu_check.serving import shard

TRAINED_TOKENS = 512


def write(size: str, *folders: str) -> dict[str, Any]:
    """Writes checkpoints for an engine, with a tokenizer for the frontend. Returns the parameters
    and seconds of each."""
    torch = torch_or_skip()
    facts = {}
    for seed, folder in enumerate(map(Path, folders)):
        began_s = time.monotonic()
        config = config_of(folder.name, is_large=size == "large")
        from transformers import AutoModelForCausalLM

        torch.manual_seed(seed)
        with torch.device(CUDA):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        folder.mkdir(parents=True, exist_ok=True)
        shard.save(torch, dict(model.named_parameters()), folder)
        config.architectures, config.dtype = [type(model).__name__], torch.bfloat16
        config.save_pretrained(folder)
        write_tokenizer(folder, config.vocab_size, config.max_position_embeddings)
        parameters = sum(p.numel() for p in model.parameters())
        facts[folder.name] = {
            "parameters": parameters,
            "write_s": round(time.monotonic() - began_s, 1),
        }
        del model
        gc.collect()
    return facts


def write_tokenizer(folder: Path, vocab_size: int, context_length: int) -> None:
    """Writes a tokenizer with as many tokens as the model has, since random weights may choose any.
    Tokens beyond those of the training text are named by their number."""
    from prism.models import tokenizer

    tokenizer.write_tokenizer(folder, TRAINED_TOKENS, context_length)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary |= {f"unused{n}": n for n in range(len(vocabulary), vocab_size)}
    file.write_text(json.dumps(content))


def judge(rounds_file: str, *folders: str) -> dict[str, Any]:
    """Judges the tokens of each served model, separately for those with decode graphs.

    Returns how many tokens are the first choice of transformers, and the largest gap between the
    logits of a token and of that choice. `spread` is the standard deviation of the logits.
    """
    torch = torch_or_skip()
    rounds = json.loads(Path(rounds_file).read_text())["rounds"]
    facts = {}
    for folder in map(Path, folders):
        served = [found for found in rounds if found["model"] == folder.name]
        if not served:
            continue
        model, judged = loaded(torch, folder), {}
        for name, answers in answers_of(served).items():
            for prompt, tokens in answers:  # equal in most rounds
                key = (tuple(prompt), tuple(tokens))
                if key not in judged:
                    judged[key] = gaps_of(torch, model, prompt, tokens)
            found = [judged[tuple(prompt), tuple(tokens)] for prompt, tokens in answers]
            facts[f"{folder.name}{name}"] = verdict(torch, found)
        del model
        gc.collect()
    return facts


def verdict(torch: Any, judged: list[tuple[Any, float]]) -> dict[str, Any]:
    gaps = torch.cat([found for found, _ in judged])
    return {
        "tokens": len(gaps),
        "equal": int((gaps == 0).sum()),
        "largest_gap": round(float(gaps.max()), 5),  # NaN if any is
        "spread": round(sum(spread for _, spread in judged) / len(judged), 5),
    }


def loaded(torch: Any, folder: Path) -> Any:
    """Returns a model of transformers with the weights of a file, read straight to the GPU. Weights
    with a scale (FP8) are multiplied by it."""
    prepare_transformers()
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device(CUDA):
        config = AutoConfig.from_pretrained(folder)
        vars(config).pop("quantization_config", None)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    parameters = dict(model.named_parameters())
    with torch.no_grad(), safe_open(folder / shard.NAME, framework="pt", device=CUDA) as file:
        names = set(file.keys())
        scales = {name for name in names if name.endswith("_scale")}
        if missing := parameters.keys() ^ (names - scales):
            raise RuntimeError(f"{folder}: not both in the file and the model: {sorted(missing)}")
        for name, parameter in parameters.items():
            parameter.copy_(file.get_tensor(name))
            if f"{name}_scale" in scales:
                parameter.mul_(file.get_tensor(f"{name}_scale"))
    return model


def answers_of(served: list[dict[str, Any]]) -> dict[str, list[tuple[list[int], list[int]]]]:
    """Returns prompts and tokens by the suffix of the model's name: with decode graphs or without.
    A suffix without tokens is left out."""
    found = {
        name: [
            answer
            for item in served
            for answer in zip(item["prompts"], item[key], strict=bool(item[key]))
            if answer[1]
        ]
        for name, key in (("", "tokens"), (", with graphs", "tokens_graphs"))
    }
    return {name: answers for name, answers in found.items() if answers}


def gaps_of(torch: Any, model: Any, prompt: list[int], tokens: list[int]) -> tuple[Any, float]:
    """Returns the gap of each token to the best logit after the tokens before it, and the spread of
    all logits. The logits stay on the GPU."""
    sequence = torch.tensor([prompt + tokens[:-1]], device=CUDA)
    with torch.inference_mode():
        answer = model(sequence, use_cache=False, logits_to_keep=len(tokens))
        logits = answer.logits[0].float()
        chosen = logits.gather(1, torch.tensor(tokens, device=CUDA)[:, None])[:, 0]
        return (logits.amax(1) - chosen).cpu(), float(logits.std())


if __name__ == "__main__":
    command = {"write": write, "judge": judge}[sys.argv[1]]
    print(json.dumps(command(*sys.argv[2:])))
