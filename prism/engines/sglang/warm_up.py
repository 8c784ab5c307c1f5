"""A model's first tokens, before anybody waits for them: pages are touched, lazy set-up is done,
and the answer tells whether this model is right on this engine."""

from __future__ import annotations

from prism.engines.sglang import requests
from prism.engines.sglang.scheduler import InProcessScheduler
from prism.errors import SelfCheckError
from prism.messages import Activate, Request, Sampling

_PROMPT_TOKENS = 4
_NEW_TOKENS = 2
_STEPS_MAX = 16
_RID = "warm-up/"


def run(scheduler: InProcessScheduler, order: Activate) -> tuple[int, ...]:
    """Greedy tokens for a fixed prompt: the model's fingerprint.

    Raises SelfCheckError when there is no answer or it is not the one that `order` expects.
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
    _check(order, tokens, [e.message for e in emissions if e.message])
    return tokens


def _request(order: Activate, vocab_size: int) -> Request:
    model = order.model
    return Request(
        id=_RID,
        model=model.name,
        prompt_ids=[(7 * i + 1) % vocab_size for i in range(_PROMPT_TOKENS)],
        sampling=Sampling(max_tokens=_NEW_TOKENS, temperature=0.0, ignore_eos=True),
        arrival_unix_s=0.0,
        slo_ttft_s=model.slo_ttft_s,
        slo_tpot_s=model.slo_tpot_s,
        frontend_id="",
        reply_to="",
    )


def _check(order: Activate, tokens: tuple[int, ...], messages: list[str]) -> None:
    name = order.model.name
    if len(tokens) != _NEW_TOKENS:
        said = "; ".join(messages) or "no error"
        raise SelfCheckError(
            f"model {name} gave {len(tokens)} of {_NEW_TOKENS} tokens in its warm-up ({said})"
        )
    if order.fingerprint and tokens != order.fingerprint:
        raise SelfCheckError(
            f"model {name} answers {list(tokens)} on this reused engine, and"
            f" {list(order.fingerprint)} on a fresh one"
        )
