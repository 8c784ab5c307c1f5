"""Service-level objectives that a generated or converted trace carries."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from prism.errors import ConfigError
from prism.replay.trace import Trace, TraceRequest


class Slo(msgspec.Struct, frozen=True):
    """Objectives of one model. The end-to-end one follows: TTFT + TPOT x (output - 1)."""

    ttft_ms: float = 2000.0
    tpot_ms: float = 200.0

    def e2e_ms(self, output_tokens: int) -> float:
        return self.ttft_ms + self.tpot_ms * (output_tokens - 1)


def parse_slo(text: str) -> Slo:
    """`"2000/200"` is TTFT and TPOT in ms. Raises ConfigError."""
    try:
        ttft_ms, tpot_ms = (float(part) for part in text.split("/"))
    except ValueError as error:
        raise ConfigError(f"SLO {text!r}: write TTFT/TPOT in ms, such as 2000/200") from error
    if not (0 < ttft_ms < math.inf and 0 < tpot_ms < math.inf):
        raise ConfigError(f"SLO {text!r}: both times must be above 0 ms")
    return Slo(ttft_ms, tpot_ms)


def parse_slos(texts: list[str]) -> tuple[Slo, dict[str, Slo]]:
    """`["2000/200", "tiny=1000/100"]` to (default, per model). Raises ConfigError."""
    default, per_model = Slo(), dict[str, Slo]()
    for text in texts:
        model, separator, times = text.rpartition("=")
        if separator:
            per_model[model] = parse_slo(times)
        else:
            default = parse_slo(times)
    return default, per_model


def with_slos(trace: Trace, default: Slo, per_model: Mapping[str, Slo]) -> list[TraceRequest]:
    """Give every request the objectives of its model."""
    return [_with_slo(request, per_model.get(request.model, default)) for request in trace]


def _with_slo(request: TraceRequest, slo: Slo) -> TraceRequest:
    return msgspec.structs.replace(
        request,
        slo_ttft_ms=slo.ttft_ms,
        slo_tpot_ms=slo.tpot_ms,
        slo_e2e_ms=slo.e2e_ms(request.output_length),
    )
