"""Makes requests and records with the fields a test does not care about filled in."""

from __future__ import annotations

from typing import Any

from prism_replay.results import RequestRecord
from prism_replay.trace import TraceRequest


def a_request(arrival_s: float = 0.0, model: str = "good", **fields: Any) -> TraceRequest:
    lengths = {"input_length": 10, "output_length": 5}
    return TraceRequest(timestamp=arrival_s * 1000, model=model, **(lengths | fields))


def a_record(index: int = 0, model: str = "good", **fields: Any) -> RequestRecord:
    default: dict[str, Any] = {
        "arrival_s": float(index),
        "send_lag_ms": 1.0,
        "input_tokens": 10,
        "expected_tokens": 5,
        "output_tokens": 5,
        "ttft_ms": 100.0,
        "tpot_ms": 20.0,
        "e2e_ms": 180.0,
        "slo_ttft_ms": 100.0,
        "slo_tpot_ms": 20.0,
        "slo_e2e_ms": 180.0,
    }
    return RequestRecord(index=index, model=model, **(default | fields))
