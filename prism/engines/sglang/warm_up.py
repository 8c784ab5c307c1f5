"""A model's first tokens, before its first request: they touch pages, do lazy set-up, and tell
whether this model is right on this engine."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from prism.engines.sglang import requests
from prism.engines.sglang.scheduler import Emission, InProcessScheduler
from prism.engines.sglang.weights import FINGERPRINT_TOKENS
from prism.errors import SelfCheckError
from prism.messages.engine import ActivateEngine
from prism.messages.requests import Request, Sampling

_PROMPT_TOKENS = 4
_STEPS_MAX = 16
_RID = "warm-up/"


def run(
    scheduler: InProcessScheduler, order: ActivateEngine, stored: tuple[int, ...]
) -> tuple[int, ...]:
    """Greedy tokens for a fixed prompt: the model's fingerprint.

    Raises SelfCheckError when there is no answer, or it is neither the one that `order` expects nor
    the one that was `stored` with the weights (empty: they are not from the store).
    REQUIRES: nothing else runs.
    """
    greedy = Sampling(max_tokens=FINGERPRINT_TOKENS, temperature=0.0, ignore_eos=True)
    emissions = _answers(scheduler, order, [greedy])
    tokens = tuple(token for emission in emissions for token in emission.token_ids)
    _check(order, stored, tokens, [e.message for e in emissions if e.message])
    return tokens


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
            requests.convert(
                _request(order, vocab_size, sampling),
                f"{_RID}{index}",
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


def _request(order: ActivateEngine, vocab_size: int, sampling: Sampling) -> Request:
    model = order.model
    return Request(
        id=_RID,
        model=model.name,
        prompt_ids=[(7 * i + 1) % vocab_size for i in range(_PROMPT_TOKENS)],
        sampling=sampling,
        arrival_unix_s=0.0,
        slo_ttft_s=model.slo_ttft_s,
        slo_tpot_s=model.slo_tpot_s,
        frontend_id="",
    )


def _check(
    order: ActivateEngine, stored: tuple[int, ...], tokens: tuple[int, ...], messages: list[str]
) -> None:
    name = order.model.name
    if len(tokens) != FINGERPRINT_TOKENS:
        said = "; ".join(messages) or "no error"
        raise SelfCheckError(
            f"model {name} gave {len(tokens)} of {FINGERPRINT_TOKENS} warm-up tokens ({said})"
        )
    known = ((order.fingerprint, "on a fresh engine"), (stored, "when loaded from its files"))
    for expected, where in known:
        if expected and tokens != expected:
            raise SelfCheckError(f"model {name} answers {tokens} here, and {expected} {where}")
