"""Service-level objectives of generated and converted traces."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from prism.errors import ConfigError
from prism_replay.trace import Trace, TraceRequest


class Slo(msgspec.Struct, frozen=True):
    ttft_ms: float = 2000.0
    tpot_ms: float = 200.0
    whole_ms: float | None = None
    """End-to-end SLO; None for TTFT + TPOT x (output tokens - 1)."""

    def e2e_ms(self, output_tokens: int) -> float:
        if self.whole_ms is not None:
            return self.whole_ms
        return self.ttft_ms + self.tpot_ms * (output_tokens - 1)


def parse_slo(text: str) -> Slo:
    """Parses "TTFT/TPOT" or "TTFT/TPOT/E2E" in ms, such as "2000/200". Raises ConfigError."""
    try:
        ttft_ms, tpot_ms, *rest = times_ms = [float(part) for part in text.split("/")]
        (whole_ms,) = rest or (None,)
    except ValueError as error:
        raise ConfigError(
            f"SLO {text!r}: write TTFT/TPOT or TTFT/TPOT/E2E in ms, such as 2000/200"
        ) from error
    if not all(0 < time_ms < math.inf for time_ms in times_ms):
        raise ConfigError(f"SLO {text!r}: every time must be above 0 ms")
    return Slo(ttft_ms, tpot_ms, whole_ms)


def parse_slos(texts: list[str]) -> tuple[Slo, dict[str, Slo]]:
    """Parses SLOs such as "2000/200" and "tiny=1000/100" to (default, SLO of each model).

    Raises ConfigError.
    """
    default, per_model = Slo(), dict[str, Slo]()
    for text in texts:
        model, separator, times = text.rpartition("=")
        if separator:
            per_model[model] = parse_slo(times)
        else:
            default = parse_slo(times)
    return default, per_model


def with_slos(trace: Trace, default: Slo, per_model: Mapping[str, Slo]) -> list[TraceRequest]:
    return [_with_slo(request, per_model.get(request.model, default)) for request in trace]


def _with_slo(request: TraceRequest, slo: Slo) -> TraceRequest:
    return msgspec.structs.replace(
        request,
        slo_ttft_ms=slo.ttft_ms,
        slo_tpot_ms=slo.tpot_ms,
        slo_e2e_ms=slo.e2e_ms(request.output_length),
    )
