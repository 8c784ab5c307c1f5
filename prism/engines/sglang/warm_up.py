"""A model's first tokens, before its first request: they touch pages, do lazy set-up, and tell
whether this model is right on this engine."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from prism.engines.model_weights import FINGERPRINT_TOKENS
from prism.engines.self_check import WARM_UP_ID, check_answer, warm_up_request
from prism.engines.sglang import requests
from prism.engines.sglang.scheduler import Emission, InProcessScheduler
from prism.errors import SelfCheckError
from prism.messages.engine import ActivateEngine
from prism.messages.requests import Sampling

_STEPS_MAX = 16


def run(
    scheduler: InProcessScheduler, order: ActivateEngine, stored: tuple[int, ...]
) -> tuple[int, ...]:
    """Greedy tokens for a fixed prompt: the model's fingerprint. Of an embedding model: where the
    largest values of the prompt's vector are.

    Raises SelfCheckError when there is no answer, or it is neither the one that `order` expects nor
    the one that was `stored` with the weights (empty: they are not from the store).
    REQUIRES: nothing else runs.
    """
    greedy = Sampling(max_tokens=FINGERPRINT_TOKENS, temperature=0.0, ignore_eos=True)
    emissions = _answers(scheduler, order, [greedy])
    tokens = tuple(token for emission in emissions for token in emission.token_ids)
    if order.model.embedding:
        tokens = tuple(place for emission in emissions for place in _largest(emission.embedding))
    check_answer(order, stored, tokens, [e.message for e in emissions if e.message])
    return tokens


def _largest(vector: bytes) -> list[int]:
    order = np.argsort(-np.frombuffer(vector, "<f4"), kind="stable")
    return [int(place) for place in order[:FINGERPRINT_TOKENS]]


def sample(scheduler: InProcessScheduler, order: ActivateEngine) -> None:
    """Draw tokens at random, so that the first request that wants to does not wait for kernels to
    be compiled: alone and in a batch, since SGLang compiles for both, with and without top_p.

    Raises SelfCheckError when a draw has no answer. REQUIRES: nothing else runs.
    """
    plain = Sampling(max_tokens=1, temperature=1.0, ignore_eos=True, seed=1)
    for drawn in ([plain], [plain, plain], [msgspec.structs.replace(plain, top_p=0.9)] * 2):
        emissions = _answers(scheduler, order, drawn)
        if sum(len(emission.token_ids) for emission in emissions) != len(drawn):
            said = "; ".join(e.message for e in emissions if e.message) or "no error"
            raise SelfCheckError(f"model {order.model.name} draws no tokens at random ({said})")


def _answers(
    scheduler: InProcessScheduler, order: ActivateEngine, samplings: Sequence[Sampling]
) -> list[Emission]:
    """What comes of requests with the fixed prompt, run together to their end."""
    vocab_size = scheduler.model_config.vocab_size
    scheduler.process_input_requests(
        [
            requests.converter(order.model)(
                warm_up_request(order, vocab_size, sampling),
                f"{WARM_UP_ID}{index}",
                context_length=order.model.context_length,
                vocab_size=vocab_size,
            )
            for index, sampling in enumerate(samplings)
        ]
    )
    for _ in range(_STEPS_MAX):
        if scheduler.is_fully_idle():
            break
        scheduler.step()
    return scheduler.outbox.take()
