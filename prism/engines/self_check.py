"""Warm-up request of a model and the check of its answer."""

from __future__ import annotations

from prism.engines.weights.model_weights import FINGERPRINT_TOKENS
from prism.errors import SelfCheckError
from prism.messages.engine import ActivateEngine
from prism.messages.requests import Request, Sampling

WARM_UP_ID = "warm-up/"
_PROMPT_TOKENS = 4


def warm_up_request(order: ActivateEngine, vocab_size: int, sampling: Sampling) -> Request:
    model = order.model
    return Request(
        id=WARM_UP_ID,
        model=model.name,
        prompt_ids=[(7 * i + 1) % vocab_size for i in range(_PROMPT_TOKENS)],
        sampling=sampling,
        arrival_unix_s=0.0,
        slo_ttft_s=model.slo_ttft_s,
        slo_tpot_s=model.slo_tpot_s,
        frontend_id="",
    )


def check_answer(
    order: ActivateEngine, stored: tuple[int, ...], tokens: tuple[int, ...], messages: list[str]
) -> None:
    """Raises SelfCheckError unless the warm-up's tokens are complete and equal to known answers.

    Args:
        stored: tokens that were saved with the stored weights; empty for weights from files.
        messages: errors of the warm-up request.
    """
    name = order.model.name
    if len(tokens) != FINGERPRINT_TOKENS:
        said = "; ".join(messages) or "no error"
        raise SelfCheckError(
            f"model {name} gave {len(tokens)} of {FINGERPRINT_TOKENS} warm-up tokens ({said})"
        )
    known = ((order.fingerprint, "on a fresh engine"), (stored, "when loaded from its files"))
    for expected, where in known:
        if expected and tokens != expected:
            raise SelfCheckError(f"model {name} answers {tokens} here, but {expected} {where}")
