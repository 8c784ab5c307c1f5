"""The results file of a replay, schema "prism-replay/1": its types, writer and reader.

One JSON object: {schema, config, records: [one per request sent], samples: [server state each
second], counters: totals over the run, summary}. Absent values are null. config.started_unix_s is
the only absolute time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from prism.config.schema.units import encoded
from prism.errors import ConfigError

F = TypeVar("F", bound="SchemaFile")
SCHEMA = "prism-replay/1"
METRICS = ("ttft", "tpot", "e2e")
LABELS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E", "all": "All"}


class SchemaFile(Protocol):
    """Contents of a file that names its schema."""

    @property
    def schema(self) -> str: ...


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the client saw it."""

    index: int
    model: str
    arrival_s: float
    """Arrival time according to the trace, in seconds since the replay's start."""
    send_lag_ms: float
    """Delay from arrival_s until the client sent the request."""
    input_tokens: int
    expected_tokens: int
    output_tokens: int = 0
    ttft_ms: float | None = None
    """Counted from arrival_s, as is e2e_ms: a slow client makes results worse, never better."""
    tpot_ms: float | None = None
    """(time of the last token - first token) / (tokens - 1); null with fewer than 2 tokens."""
    e2e_ms: float | None = None
    failed_ms: float | None = None
    """Time from arrival_s to the error of a failed request."""
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    slo_e2e_ms: float | None = None
    priority: int = 0
    error: str | None = None
    """The server's error code, or one of the client's such as "timeout", "connection", "http_503"
    or "short"; "interrupted" if the user ended the replay."""
    message: str = ""
    response_id: str | None = None
    """The server's id of the response."""

    @property
    def ok(self) -> bool:
        return self.error is None

    def value_ms(self, metric: str) -> float | None:
        """Returns the value of one of METRICS."""
        return {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "e2e": self.e2e_ms}[metric]

    def slo_ms(self, metric: str) -> float | None:
        return {"ttft": self.slo_ttft_ms, "tpot": self.slo_tpot_ms, "e2e": self.slo_e2e_ms}[metric]


class Counters(msgspec.Struct, frozen=True):
    """Growth of the server's counters."""

    maps: int = 0
    unmaps: int = 0
    retractions: int = 0
    activations: int = 0
    evictions: int = 0
    migrations: int = 0
    engine_restarts: int = 0


class DeviceMemory(msgspec.Struct, frozen=True):
    """Memory of one device at one moment, in bytes."""

    capacity_bytes: int
    weights_bytes: dict[str, int]
    """Model -> its weights and other memory of fixed size."""
    kv_bytes: dict[str, int]
    """Model -> its mapped KV memory."""


class PlacementChange(msgspec.Struct, frozen=True):
    """A decision of the cluster scheduler during the run."""

    t_s: float
    """Time since the run's start."""
    kind: str
    """One of CHANGES."""
    model: str
    device: str
    target: str = ""
    """Device to which a model moves."""
    reason: str = ""
    seconds: float | None = None
    """Duration; null if it had not ended."""


CHANGES = ("activate", "evict", "migrate", "drop_copy")


class StatusSample(msgspec.Struct, frozen=True):
    """The server's state at one moment, over all devices."""

    t_s: float
    """Time since the replay's start."""
    kv_bytes: dict[str, int]
    """Model -> mapped KV memory."""
    resident_bytes: int
    capacity_bytes: int
    counters: Counters
    """Growth since the replay's start."""
    devices: dict[str, DeviceMemory] = {}
    """Device -> its memory. Empty: not known."""


class Latency(msgspec.Struct, frozen=True):
    """Latency in ms over the finished requests; null without any."""

    mean: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


class Attainment(msgspec.Struct, frozen=True):
    """Fraction (0..1) of the judged requests within their SLO; null if none has that SLO."""

    judged: int
    """Number of requests that count: all but the interrupted ones."""
    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None
    all: float | None = None


class Throughput(msgspec.Struct, frozen=True):
    """Finished requests, and output tokens of all requests, per second (MuxServe §4.1).

    Rates per active second leave out idle time (Prism §7.2); null if no request was open.
    """

    requests_per_s: float | None = None
    output_tokens_per_s: float | None = None
    active_s: float | None = None
    """Time in which at least one request was open, from its arrival to its last token or error."""
    requests_per_active_s: float | None = None
    output_tokens_per_active_s: float | None = None


class GroupSummary(msgspec.Struct, frozen=True):
    """Summary of all requests, or of one model's."""

    requests: int
    completed: int
    errors: dict[str, int]
    input_tokens: int
    output_tokens: int
    ttft_ms: Latency
    tpot_ms: Latency
    e2e_ms: Latency
    attainment: dict[str, Attainment]
    """`scale_key` of each SLO scale, such as "0.5" -> its attainment."""
    normalized_latency: float | None = None
    """Mean of E2E / mean execution time of the model's requests alone (SeaLLM eq. 1); null without
    execution times."""
    throughput: Throughput = Throughput()


class Summary(msgspec.Struct, frozen=True):
    """Summary of the whole replay. Rates are averages over `duration_s`."""

    duration_s: float
    """Time from the start to the last answer."""
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
        """The models' summaries, followed by the total."""
        return {**self.models, "total": self.total}


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a replay, sufficient to repeat it."""

    trace: str
    url: str
    status_url: str = ""
    """Address of /status, if it is not `url`."""
    requests: int
    rate_scale: float = 1.0
    time_scale: float = 1.0
    slo_scales: tuple[float, ...] = (1.0,)
    """Scales of the attainment."""
    sent_slo_scale: float = 1.0
    """Scale of the SLOs that the server got. 0: it got none, as it is not Prism."""
    seed: int = 0
    timeout_s: float = 600.0
    block_tokens: int = 512
    token_ids: tuple[int, int] = (100, 1000)
    started_unix_s: float = 0.0
    interrupted: bool = False
    base_slos: str = ""
    """File of the SLOs, if they are not the trace's."""
    execution_ms: dict[str, float] = {}
    """Model -> mean execution time of its requests alone, from this file."""

    @property
    def main_scale(self) -> float:
        """The SLO scale nearest to 1, used for figures that show one scale."""
        return min(self.slo_scales, key=lambda scale: abs(scale - 1))


class ReplayResults(msgspec.Struct, frozen=True):
    config: RunConfig
    records: list[RequestRecord]
    samples: list[StatusSample]
    counters: Counters | None
    summary: Summary
    changes: list[PlacementChange] = []
    schema: str = SCHEMA


def scale_key(scale: float) -> str:
    """Returns the key of an SLO scale in `GroupSummary.attainment`: 1.0 -> "1"."""
    return f"{scale:g}"


def write_results(path: Path, results: ReplayResults) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, results)


def write_json(path: Path, value: msgspec.Struct | Sequence[msgspec.Struct]) -> None:
    text = msgspec.json.encode(value, enc_hook=encoded)
    path.write_bytes(msgspec.json.format(text, indent=1) + b"\n")


def read_results(path: Path) -> ReplayResults:
    """Returns the results of a file. Raises ConfigError if it does not have this schema."""
    return read_json(path, ReplayResults, SCHEMA, "a results file of prism-replay")


def read_json(path: Path, kind: type[F], schema: str, what: str) -> F:
    """Returns the contents of a file. Raises ConfigError if it does not have this schema.

    Args:
        what: Name of such a file, for messages.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not {what}: {error}") from error
    if found.schema != schema:
        raise ConfigError(f"{path}: has schema {found.schema!r}; this version reads {schema!r}")
    return found
