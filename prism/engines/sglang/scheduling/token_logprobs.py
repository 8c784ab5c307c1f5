"""Log probabilities of a request's tokens, as SGLang keeps them."""

from __future__ import annotations

from sglang.srt.managers.schedule_batch import Req

from prism.messages.requests import Logprobs


def of_output(req: Req, start: int, end: int) -> Logprobs | None:
    """Returns those of the output tokens from `start` to `end`, None if they are not requested."""
    kept = req.logprob.output_token_logprobs_val
    if not req.return_logprob or kept is None:
        return None
    # SGLang has no log probabilities of output that came with the request.
    offset = len(req.output_ids) - len(kept)
    cut = slice(max(0, start - offset), max(0, end - offset))
    if not req.logprob.top_logprobs_num:
        return Logprobs(kept[cut])
    top_values = req.logprob.output_top_logprobs_val[cut]
    return Logprobs(kept[cut], req.logprob.output_top_logprobs_idx[cut], top_values)


def of_prompt(req: Req) -> Logprobs | None:
    """Returns those of the prompt's tokens after the first; None at all further calls."""
    values = req.logprob.input_token_logprobs_val
    if not req.return_logprob or req.input_logprob_sent or not values:
        return None
    req.input_logprob_sent = True
    # After a retraction they are not computed again, so that the prefix may come from the cache.
    req.logprob_start_len = len(req.origin_input_ids)
    if not req.logprob.top_logprobs_num:
        return Logprobs(values[1:])
    top_ids, top_values = req.logprob.input_top_logprobs_idx, req.logprob.input_top_logprobs_val
    return Logprobs(values[1:], top_ids[1:], top_values[1:])


def without_prompt(req: Req) -> None:
    """Clears those of the prompt of a request that comes with output, which SGLang would treat as a
    part of the prompt."""
    kept = req.logprob
    kept.input_token_logprobs_val, kept.input_token_logprobs_idx = [], []
    kept.input_top_logprobs_val, kept.input_top_logprobs_idx = [], []
    kept.input_token_ids_logprobs_val, kept.input_token_ids_logprobs_idx = [], []
