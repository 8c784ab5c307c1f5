"""Section of the YAML for latencies."""

from __future__ import annotations

from prism.config.schema.machines import Strict
from prism.config.schema.units import Seconds


class SloYaml(Strict, frozen=True, kw_only=True):
    """The latencies that a request should meet."""

    # From a request's arrival to its first token. The queue is ordered by it.
    ttft: Seconds = Seconds("2s")
    # The mean time of each further token.
    tpot: Seconds = Seconds("200ms")


class ModelSloYaml(SloYaml, frozen=True):
    """The latencies of one model's requests."""

    # The tightest TTFT that a request may ask for. Default: any.
    least_ttft: Seconds | None = None
    # The same for TPOT.
    least_tpot: Seconds | None = None
