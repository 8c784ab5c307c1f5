"""Hand-made journals and runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lab.parity.journals import Dated, Journals
from lab.parity.runs import History, Placed, Wait, waits_of
from prism.scheduler.decision_journal import Ended, Left, Opened, Queued, Started, Stepped
from prism_replay.metrics import summarize
from prism_replay.results import ReplayResults, RequestRecord, RunConfig

START_S = 1000.0


def queued(request: int, time_s: float, model: str = "a", deadline_s: float = 100.0) -> Queued:
    return Queued(
        time_s=time_s,
        id=str(request),
        model=model,
        prompt_tokens=10,
        max_tokens=5,
        arrival_s=time_s,
        deadline_s=deadline_s,
    )


def left(time_s: float, *requests: int) -> Left:
    return Left(time_s=time_s, ids=tuple(map(str, requests)))


def stepped(time_s: float, *requests: int, blocked: Mapping[str, str] | None = None) -> Stepped:
    return Stepped(time_s=time_s, ids=tuple(map(str, requests)), blocked=dict(blocked or {}))


def run(*records: Queued | Left | Stepped, placements: Sequence[Placed] = ()) -> History:
    """Returns a run with one device, host:0."""
    dated = ((record.time_s, 0.0, record) for record in records)
    waits = {wait.request: wait for wait in waits_of("host:0", dated, int)}
    return History(tuple(placements), waits)


def wait(world: History, request: int) -> Wait:
    return world.waits[request]


def placed(kind: str, model: str = "a", device: str = "host:0", **more: object) -> Placed:
    return Placed(1.0, kind, model, device, **more)  # type: ignore[arg-type]


def journals(
    cluster: Sequence[Started | Ended], queue: Sequence[Queued | Left | Stepped]
) -> Journals:
    """Returns the journals of one device. The processes' clocks began 900 s after the epoch."""
    opened = Opened(time_s=50.0, unix_s=950.0, source="cluster", policy="prism")
    return Journals(
        tuple(Dated(r.time_s + 900.0, 900.0, r) for r in (opened, *cluster)),
        {"host:0": tuple(Dated(r.time_s + 900.0, 900.0, r) for r in (opened, *queue))},
    )


def replayed(*models: str, ids: Sequence[str] | None = None) -> ReplayResults:
    """Returns a replay with a request of each model, 1 s apart.

    Args:
        ids: ids of the requests at the server; r0, r1, ... by default.
    """
    records = [
        RequestRecord(
            index=index,
            model=model,
            arrival_s=float(index),
            send_lag_ms=0.0,
            input_tokens=10,
            expected_tokens=5,
            output_tokens=5,
            ttft_ms=20.0,
            tpot_ms=10.0,
            e2e_ms=60.0,
            slo_ttft_ms=100.0,
            slo_tpot_ms=20.0,
            slo_e2e_ms=180.0,
            response_id=ids[index] if ids else f"r{index}",
        )
        for index, model in enumerate(models)
    ]
    config = RunConfig(trace="t.jsonl", url="here", requests=len(records), started_unix_s=START_S)
    return ReplayResults(config, records, [], None, summarize(records, (1.0,), 3.0, None))
