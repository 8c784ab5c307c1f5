"""Requests for queue and agent tests."""

from __future__ import annotations

from prism.messages.requests import Request, Sampling


def request(
    id: str,
    model: str = "a",
    *,
    attempt: int = 1,
    prompt_tokens: int = 4,
    max_tokens: int = 4,
    arrival_unix_s: float = 1000.0,
    frontend_id: str = "f0",
) -> Request:
    return Request(
        id=id,
        model=model,
        prompt_ids=list(range(1, prompt_tokens + 1)),
        sampling=Sampling(max_tokens=max_tokens, temperature=0.0),
        arrival_unix_s=arrival_unix_s,
        slo_ttft_s=2.0,
        slo_tpot_s=0.2,
        frontend_id=frontend_id,
        attempt=attempt,
    )
