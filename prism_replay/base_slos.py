"""Latencies of each model on dedicated engines, as SLOs and execution times of a replay.

The file of `prism-replay base-slos`, schema "prism-base-slos/1": one JSON object, {schema, config,
trace, models: {name: latencies}}.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from prism.errors import ConfigError
from prism_replay.results import read_json
from prism_replay.trace import Trace, TraceRequest, models_of

SCHEMA = "prism-base-slos/1"


class BaseLatencies(msgspec.Struct, frozen=True):
    """Latencies of one model. Its P95s at rate scale 1 are the SLOs at scale 1 (Prism §7.2)."""

    requests: int
    """Number of requests of the P95s."""
    ttft_ms: float
    """P95."""
    tpot_ms: float | None
    """P95; null if no request had a second token, and then not an SLO."""
    e2e_ms: float
    """P95."""
    execution_ms: float
    """Mean E2E of requests that run one at a time (SeaLLM equation 1)."""
    executions: int
    """Number of these requests."""


class BaseSlos(msgspec.Struct, frozen=True):
    config: str
    """Name of the cluster's YAML."""
    trace: str
    models: dict[str, BaseLatencies]
    schema: str = SCHEMA

    @property
    def execution_ms(self) -> dict[str, float]:
        """Model -> mean execution time of its requests alone."""
        return {name: found.execution_ms for name, found in self.models.items()}

    def apply(self, trace: Trace) -> list[TraceRequest]:
        """Returns the trace with these SLOs. Raises ConfigError for a model without latencies."""
        missing = [name for name in models_of(trace) if name not in self.models]
        if missing:
            raise ConfigError(
                f"--base-slos: does not have {', '.join(missing)}; measure a trace that has all"
                " models with `prism-replay base-slos`"
            )
        return [_with_slos(request, self.models[request.model]) for request in trace]


def read_base_slos(path: Path) -> BaseSlos:
    """Returns the contents of a file. Raises ConfigError if it does not have this schema."""
    return read_json(path, BaseSlos, SCHEMA, "a file of `prism-replay base-slos`")


def _with_slos(request: TraceRequest, found: BaseLatencies) -> TraceRequest:
    return msgspec.structs.replace(
        request, slo_ttft_ms=found.ttft_ms, slo_tpot_ms=found.tpot_ms, slo_e2e_ms=found.e2e_ms
    )
