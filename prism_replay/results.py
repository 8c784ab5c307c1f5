"""The results file of a replay, schema "prism-replay/1": one JSON object, written and read here.

{schema, config, records: [one per request sent], samples: [server state each second],
 counters: totals over the run, summary}. Absent values are null. Only config.started_unix_s is a
time of day.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from prism.errors import ConfigError

SCHEMA = "prism-replay/1"
METRICS = ("ttft", "tpot", "e2e")
LABELS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E", "all": "All"}


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the client saw it."""

    index: int
    model: str
    arrival_s: float
    """When the trace asks for it, in seconds since the replay's start."""
    send_lag_ms: float
    """How much later it was sent."""
    input_tokens: int
    expected_tokens: int
    output_tokens: int = 0
    ttft_ms: float | None = None
    """Like e2e_ms, it counts from arrival_s: a slow client makes results worse, never better."""
    tpot_ms: float | None = None
    """(last - first token) / (tokens - 1); null with fewer than 2 tokens."""
    e2e_ms: float | None = None
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    slo_e2e_ms: float | None = None
    priority: int = 0
    error: str | None = None
    """A code such as "timeout", "connection", "http_503" or "short", or the server's own;
    "interrupted" where the user ended the replay."""
    message: str = ""
    response_id: str | None = None
    """The server's name of its answer."""

    @property
    def ok(self) -> bool:
        return self.error is None

    def value_ms(self, metric: str) -> float | None:
        """One of METRICS."""
        return {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "e2e": self.e2e_ms}[metric]

    def slo_ms(self, metric: str) -> float | None:
        return {"ttft": self.slo_ttft_ms, "tpot": self.slo_tpot_ms, "e2e": self.slo_e2e_ms}[metric]


class Counters(msgspec.Struct, frozen=True):
    """By how much the server's counters grew."""

    maps: int = 0
    unmaps: int = 0
    retractions: int = 0
    activations: int = 0
    evictions: int = 0
    migrations: int = 0
    engine_restarts: int = 0


class StatusSample(msgspec.Struct, frozen=True):
    """The server's state at one moment, over all devices."""

    t_s: float
    """Since the replay's start."""
    kv_bytes: dict[str, int]
    """Model -> mapped KV memory."""
    resident_bytes: int
    capacity_bytes: int
    counters: Counters
    """Since the replay's start."""


class Latency(msgspec.Struct, frozen=True):
    """Milliseconds, over the requests that finished; null without any."""

    mean: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


class Attainment(msgspec.Struct, frozen=True):
    """Part (0..1) of the judged requests within their SLO; null where none has that SLO."""

    judged: int
    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None
    all: float | None = None


class GroupSummary(msgspec.Struct, frozen=True):
    """All requests, or those of one model."""

    requests: int
    completed: int
    errors: dict[str, int]
    input_tokens: int
    output_tokens: int
    ttft_ms: Latency
    tpot_ms: Latency
    e2e_ms: Latency
    attainment: dict[str, Attainment]
    """By `scale_key` of the SLO scale, such as "0.5"."""


class Summary(msgspec.Struct, frozen=True):
    """Of the whole replay. Rates are per `duration_s`."""

    duration_s: float
    """From the start to the last answer."""
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    maps_per_minute: float
    unmaps_per_minute: float
    send_lag_p99_ms: float
    total: GroupSummary
    models: dict[str, GroupSummary]

    @property
    def groups(self) -> dict[str, GroupSummary]:
        """The models, and last the total."""
        return {**self.models, "total": self.total}


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the replay was run; enough to run it again."""

    trace: str
    url: str
    requests: int
    rate_scale: float = 1.0
    time_scale: float = 1.0
    slo_scales: tuple[float, ...] = (1.0,)
    seed: int = 0
    timeout_s: float = 600.0
    block_tokens: int = 512
    token_ids: tuple[int, int] = (100, 1000)
    started_unix_s: float = 0.0
    interrupted: bool = False

    @property
    def main_scale(self) -> float:
        """The SLO scale nearest to 1, which single figures show."""
        return min(self.slo_scales, key=lambda scale: abs(scale - 1))


class ReplayResults(msgspec.Struct, frozen=True):
    config: RunConfig
    records: list[RequestRecord]
    samples: list[StatusSample]
    counters: Counters | None
    summary: Summary
    schema: str = SCHEMA


def scale_key(scale: float) -> str:
    """The key of an SLO scale in `GroupSummary.attainment`: 1.0 -> "1"."""
    return f"{scale:g}"


def write_results(path: Path, results: ReplayResults) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, results)


def write_json(path: Path, value: msgspec.Struct) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


def read_results(path: Path) -> ReplayResults:
    """Raises ConfigError where the file is not a results file of this schema."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=ReplayResults)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a results file of prism-replay: {error}") from error
    if found.schema != SCHEMA:
        raise ConfigError(f"{path}: schema {found.schema!r}, this version reads {SCHEMA!r}")
    return found
