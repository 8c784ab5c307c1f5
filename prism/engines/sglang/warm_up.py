"""A model's first tokens, before anybody waits for them: pages are touched, lazy set-up is done,
and the answer tells whether this model is right on this engine."""

from __future__ import annotations

from prism.engines.sglang import requests
from prism.engines.sglang.scheduler import InProcessScheduler
from prism.engines.sglang.weights import FINGERPRINT_TOKENS
from prism.errors import SelfCheckError
from prism.messages import Activate, Request, Sampling

_PROMPT_TOKENS = 4
_STEPS_MAX = 16
_RID = "warm-up/"


def run(scheduler: InProcessScheduler, order: Activate, stored: tuple[int, ...]) -> tuple[int, ...]:
    """Greedy tokens for a fixed prompt: the model's fingerprint.

    Raises SelfCheckError when there is no answer, or it is neither the one that `order` expects nor
    the one that was `stored` with the weights (empty: they are not from the store).
    REQUIRES: nothing else runs.
    """
    converted = requests.convert(
        _request(order, scheduler.model_config.vocab_size),
        _RID,
        context_length=order.model.context_length,
        vocab_size=scheduler.model_config.vocab_size,
    )
    scheduler.process_input_requests([converted])
    for _ in range(_STEPS_MAX):
        if scheduler.is_fully_idle():
            break
        scheduler.step()
    emissions = scheduler.outbox.take()
    tokens = tuple(token for emission in emissions for token in emission.token_ids)
    _check(order, stored, tokens, [e.message for e in emissions if e.message])
    return tokens


def _request(order: Activate, vocab_size: int) -> Request:
    model = order.model
    return Request(
        id=_RID,
        model=model.name,
        prompt_ids=[(7 * i + 1) % vocab_size for i in range(_PROMPT_TOKENS)],
        sampling=Sampling(max_tokens=FINGERPRINT_TOKENS, temperature=0.0, ignore_eos=True),
        arrival_unix_s=0.0,
        slo_ttft_s=model.slo_ttft_s,
        slo_tpot_s=model.slo_tpot_s,
        frontend_id="",
        reply_to="",
    )


def _check(
    order: Activate, stored: tuple[int, ...], tokens: tuple[int, ...], messages: list[str]
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
