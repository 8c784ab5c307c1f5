"""Converts the fields of a body to the engine's `Sampling`."""

from __future__ import annotations

from prism.frontend.http.error_bodies import bad_request
from prism.frontend.protocol.openai_types import CompletionBody, GenerationBody
from prism.frontend.text.tokenizers import ModelTokenizer
from prism.messages.requests import Grammar, Sampling

# Engines store it in 32 bits, where smaller values become 0. At this value only the likeliest token
# is left.
_TOP_P_MIN = 1e-6
_REPETITION_MIN = 1e-6


def sampling_of(
    body: GenerationBody,
    tokenizer: ModelTokenizer,
    max_tokens: int,
    eos_ids: tuple[int, ...],
    grammar: Grammar | None = None,
) -> Sampling:
    """Returns the sampling parameters. Defaults are from the model's generation_config.json.

    Raises BadRequestError for a logit_bias outside the vocabulary.
    """
    defaults, vocab_size = tokenizer.sampling_defaults, tokenizer.vocab_size

    def asked(name: str, neutral: float) -> float:
        value: float | None = getattr(body, name)
        return defaults.get(name, neutral) if value is None else value

    stop_ids = () if body.ignore_eos else eos_ids
    top_k = int(asked("top_k", -1))
    best_of = body.choices_made > body.choices_asked
    return Sampling(
        max_tokens=max_tokens,
        temperature=asked("temperature", 1.0),
        top_p=max(asked("top_p", 1.0), _TOP_P_MIN),
        # -1 for all tokens.
        top_k=-1 if top_k >= vocab_size else top_k,
        seed=body.seed,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        ignore_eos=body.ignore_eos,
        # Ids outside the vocabulary are never generated.
        stop_token_ids=tuple(
            dict.fromkeys((*stop_ids, *(i for i in body.stop_token_ids if i < vocab_size)))
        ),
        min_p=asked("min_p", 0.0),
        repetition_penalty=max(asked("repetition_penalty", 1.0), _REPETITION_MIN),
        logit_bias=_logit_bias(body, vocab_size),
        min_tokens=min(body.min_tokens or 0, max_tokens),
        # best_of ranks the choices by log probability.
        logprobs=0 if best_of and body.logprobs_asked is None else body.logprobs_asked,
        prompt_logprobs=_echoes(body) and body.logprobs_asked is not None,
        grammar=grammar,
    )


def _echoes(body: GenerationBody) -> bool:
    return isinstance(body, CompletionBody) and bool(body.echo)


def _logit_bias(body: GenerationBody, vocab_size: int) -> dict[int, float]:
    biases = {int(name): bias for name, bias in (body.logit_bias or {}).items()}
    if (largest := max(biases, default=0)) >= vocab_size:
        raise bad_request(
            f"logit_bias: token id {largest} is outside the vocabulary of {vocab_size} tokens",
            "logit_bias",
        )
    return biases
