"""Warm-up of a model before its first request. Its tokens touch pages, trigger lazy set-up, and
show whether the model computes correctly on this engine."""

from __future__ import annotations

import contextlib
import logging
import textwrap
import traceback
from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from prism.engines.ranks.group import RankGroup
from prism.engines.self_check import WARM_UP_ID, check_answer, warm_up_request
from prism.engines.sglang.scheduling import request_conversion
from prism.engines.sglang.scheduling.scheduler import Emission, InProcessScheduler
from prism.engines.weights.model_weights import FINGERPRINT_TOKENS
from prism.errors import RankLostError, SelfCheckError
from prism.messages.engine import ActivateEngine
from prism.messages.requests import Sampling

_STEPS_MAX = 16
_ERROR_CHARACTERS = 1000
_DRAWN, _FAILED, _NO_MEMORY = 1, 0, -1  # votes of a rank: the smallest decides

log = logging.getLogger("prism.engine")


def run(
    scheduler: InProcessScheduler, order: ActivateEngine, stored: tuple[int, ...]
) -> tuple[int, ...]:
    """Returns the model's fingerprint: greedy tokens for a fixed prompt. For an embedding model, it
    is the indices of the largest values in the prompt's vector.

    Raises SelfCheckError without an answer, and for an answer that differs from the one in `order`
    or from the one `stored` with the weights (empty for weights from files).
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


def sample(scheduler: InProcessScheduler, order: ActivateEngine, ranks: RankGroup) -> None:
    """Samples tokens, so that the first request that samples does not wait for the compilation of
    kernels.

    A failed draw is a warning, since greedy requests do not need those kernels. It is repeated
    without torch.compile, which stays off in this process if the second draw succeeds. A
    collective of the ranks: if a draw fails on one, all repeat it.

    Raises torch.OutOfMemoryError and RankLostError. REQUIRES: nothing else runs.
    """
    name = order.model.name
    if _draw(scheduler, order, ranks):
        return
    with contextlib.ExitStack() as eager:
        eager.enter_context(torch.compiler.set_stance("force_eager"))
        if _draw(scheduler, order, ranks):
            eager.pop_all()
            log.warning("model %s: torch.compile is off in this engine from now on", name)
            return
    log.warning("model %s is served, but its requests with sampling may fail", name)


def _draw(scheduler: InProcessScheduler, order: ActivateEngine, ranks: RankGroup) -> bool:
    """Returns whether every rank drew tokens: alone and in a batch, which SGLang compiles
    separately, and with and without top_p."""
    plain = Sampling(max_tokens=1, temperature=1.0, ignore_eos=True, seed=1)
    for drawn in ([plain], [plain, plain], [msgspec.structs.replace(plain, top_p=0.9)] * 2):
        error = _draw_error(scheduler, order, drawn)
        # All ranks vote after each draw, since a rank that continued alone would wait for others.
        worst = ranks.least(_vote(error))
        if worst == _DRAWN:
            continue
        scheduler.drop_all()
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        if worst == _NO_MEMORY:
            raise torch.OutOfMemoryError("another rank ran out of memory in its warm-up")
        if error is not None:
            said = textwrap.shorten(f"{type(error).__name__}: {error}", _ERROR_CHARACTERS)
            log.warning("model %s cannot draw tokens at random (%s)", order.model.name, said)
        return False
    return True


def _draw_error(
    scheduler: InProcessScheduler, order: ActivateEngine, drawn: Sequence[Sampling]
) -> Exception | None:
    """Returns the error of a draw, None if it succeeded. Compilers and their kernels raise errors
    of every kind."""
    try:
        emissions = _answers(scheduler, order, drawn)
    except RankLostError:
        raise
    except Exception as error:  # noqa: BLE001
        log.info("sampling failed in the warm-up\n%s", traceback.format_exc())
        return error.with_traceback(None)  # a traceback would keep the step's tensors
    if sum(len(emission.token_ids) for emission in emissions) == len(drawn):
        return None
    said = "; ".join(e.message for e in emissions if e.message) or "no error"
    return SelfCheckError(f"the draw gave no tokens: {said}")


def _vote(error: Exception | None) -> int:
    if error is None:
        return _DRAWN
    return _NO_MEMORY if isinstance(error, torch.OutOfMemoryError) else _FAILED


def _answers(
    scheduler: InProcessScheduler, order: ActivateEngine, samplings: Sequence[Sampling]
) -> list[Emission]:
    """Runs requests with the fixed prompt together until they end. Returns their emissions."""
    vocab_size = scheduler.model_config.vocab_size
    scheduler.process_input_requests(
        [
            request_conversion.converter(order.model)(
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
