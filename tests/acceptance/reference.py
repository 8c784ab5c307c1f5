"""Greedy output of Hugging Face transformers on the same weights, the oracle of these tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from prism.models.hugging_face import import_transformers
from tests.acceptance.harness import MODELS, Answer

TIE = 1e-4


def prompts(model: str, count: int, lengths: Sequence[int] = (5, 40), seed: int = 7) -> list[Any]:
    """Returns random token-id prompts in the vocabulary of `model`, seeded."""
    rng = random.Random(f"{model}/{seed}")
    top = min(load(model).config.get_text_config().vocab_size, 2000)
    return [
        tuple(rng.randrange(10, top) for _ in range(rng.randint(*lengths))) for _ in range(count)
    ]


@lru_cache(maxsize=4)
def load(model: str) -> Any:
    import torch

    torch.set_num_threads(1)
    return (
        import_transformers()
        .AutoModelForCausalLM.from_pretrained(MODELS / model, dtype=torch.float32)
        .eval()
    )


@lru_cache(maxsize=4096)
def greedy(model: str, prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """Returns `tokens` greedy token ids after `prompt`, without a stop at end-of-sequence ids."""
    import torch

    network = load(model)
    generated: list[int] = []
    with torch.inference_mode():
        out = network(torch.tensor([prompt]), use_cache=True)
        while True:
            generated.append(int(out.logits[0, -1].argmax()))
            if len(generated) == tokens:
                return tuple(generated)
            step = torch.tensor([[generated[-1]]])
            out = network(step, past_key_values=out.past_key_values, use_cache=True)


@lru_cache(maxsize=4096)
def is_greedy(model: str, prompt: tuple[int, ...], served: tuple[int, ...]) -> bool:
    """Returns whether `served` is what greedy decoding gives, a tie decided either way.

    One pass over all tokens gives the best one after each prefix. Batches sum in another order than
    a single stream, so logits differ by rounding. Where the two best tokens are closer than TIE,
    both are greedy, and the rest is judged after the token that was served.
    """
    import torch

    with torch.inference_mode():
        logits = load(model)(torch.tensor([[*prompt, *served]])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(served).unsqueeze(1)).squeeze(1)
    return bool((logits.max(dim=1).values - chosen).max() < TIE)


def judge(jobs: Sequence[tuple[str, tuple[int, ...], int]], answers: Sequence[Answer]) -> list[str]:
    """Returns the faults of these answers to (model, prompt, tokens)."""
    wrong = []
    for (model, prompt, tokens), answer in zip(jobs, answers, strict=True):
        if answer.error is not None or len(answer.ids) != tokens:
            wrong.append(f"{model}: {len(answer.ids)} of {tokens} tokens, {answer.error}")
        elif not is_greedy(model, prompt, tuple(answer.ids)):
            wrong.append(f"{model}: {answer.ids} after {prompt} is not greedy")
    return wrong
