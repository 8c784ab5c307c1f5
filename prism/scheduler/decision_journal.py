"""Journal of the schedulers' decisions, for operators and for comparisons with a simulation.

Each process appends JSON lines to its own file in the folder of its log. The journal never holds
prompts, outputs or secrets. A simulation keeps the same records in memory.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from prism.errors import ConfigError
from prism.policies.data import Action, ClusterView, EngineView, Settings, Waiting
from prism.policies.multiplexing.steps import DeviceStepView, Phase, StepJob
from prism.policies.multiplexing.turns import PrefillQueue, TurnBatch
from prism.scheduler.local_scheduler import AdmissionPlan, Limits

log = logging.getLogger(__name__)

FORMAT = 1
OFF, DECISIONS, INPUTS = "off", "decisions", "inputs"
KEPT = (OFF, DECISIONS, INPUTS)
CLUSTER = "cluster"


class JournalConfig(msgspec.Struct, frozen=True):
    """Configuration of the journal."""

    keep: str = OFF  # one of KEPT
    max_bytes: int = 256 << 20  # of a file


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="what", omit_defaults=True):
    """Base of all records."""

    time_s: float  # monotonic clock of the process; `Opened` maps it to Unix time


class Opened(Record, frozen=True, tag="opened"):
    """Start of a process."""

    unix_s: float
    source: str  # "cluster", or the agent's device
    policy: str
    settings: Settings | None = None  # of the cluster scheduler
    limits: Limits | None = None  # of the local scheduler
    format: int = FORMAT


class Moved(Record, frozen=True):
    """Base of the records about an action of the cluster scheduler."""

    kind: str  # activate, evict, migrate or drop_copy
    model: str
    device: str
    target: str = ""  # of a migration from `device`


class Started(Moved, frozen=True, tag="started"):
    """Start of an action."""

    reason: str = ""


class Ended(Moved, frozen=True, tag="ended"):
    """End of an action."""

    problem: str = ""  # why it failed; empty if it succeeded


class Refused(Record, frozen=True, tag="refused"):
    """Model that should be active but was placed on no device, or that is refused for overload."""

    model: str
    reason: str
    overload: bool = False


class Planned(Record, frozen=True, tag="planned"):
    """Plan of the cluster scheduler with its input."""

    view: ClusterView
    actions: tuple[dict[str, Any], ...]  # "kind" and the fields of each action


class Served(Record, frozen=True, tag="served"):
    """Model that became active on the agent's device. Sizes are those that the engine reported."""

    model: str
    seconds: float  # since an engine was free for it
    static_bytes: int
    reserve_bytes: int
    quantum_bytes: int
    quantum_tokens: int
    block_tokens: int


class Queued(Record, frozen=True, tag="queued"):
    """Request that begins to wait at the agent. Times are on the clock of time_s."""

    id: str
    model: str
    prompt_tokens: int
    max_tokens: int
    arrival_s: float
    deadline_s: float
    priority: int = 0


class Left(Record, frozen=True, tag="left"):
    """Requests that left the queue without being dispatched: cancelled or moved."""

    ids: tuple[str, ...]


class Stepped(Record, frozen=True, tag="stepped"):
    """Step of the local scheduler, or requests that step control dispatches."""

    ids: tuple[str, ...] = ()  # dispatched requests, in order
    blocked: dict[str, str] = {}  # model -> why its first waiting request could not start
    views: tuple[EngineView, ...] | None = None  # its input, if inputs are kept


class StepsChosen(Record, frozen=True, tag="steps_chosen"):
    """Choice of step control, with its input."""

    view: DeviceStepView
    jobs: tuple[StepJob, ...] = ()


class PrefillChosen(Record, frozen=True, tag="prefill_chosen"):
    """Queue and group that a prompt joins under token-level switching, with the input."""

    model: str
    queues: tuple[PrefillQueue, ...]
    queue: int
    group: int | None = None


class DecodeChosen(Record, frozen=True, tag="decode_chosen"):
    """Instance on which a model decodes under token-level switching, with the input."""

    model: str
    models: tuple[tuple[str, ...], ...]  # of each instance
    instance: int


class RoundChosen(Record, frozen=True, tag="round_chosen"):
    """Lengths of the turns of a round, with the input."""

    device: str
    batches: tuple[TurnBatch, ...]
    quotas_s: tuple[float, ...]


class Full(Record, frozen=True, tag="full"):
    """Last record of a file that reached its maximum size."""


_OfTurns = PrefillChosen | DecodeChosen | RoundChosen
_OfCluster = Opened | Started | Ended | Refused | Planned | _OfTurns
AnyRecord = _OfCluster | Served | Queued | Left | Stepped | StepsChosen | Full


class Sink(Protocol):
    """Consumer of records."""

    inputs: bool  # True to keep the inputs of decisions as well

    def add(self, record: AnyRecord) -> None: ...


class MemoryJournal:
    """Journal that keeps its records in a list."""

    def __init__(self, inputs: bool = False) -> None:
        self.inputs = inputs
        self.records: list[AnyRecord] = []

    def add(self, record: AnyRecord) -> None:
        self.records.append(record)


class FileJournal:
    """Journal in a file that only this user may read. For one process and thread.

    An error of the file is logged, closes the journal and is not raised. At max_bytes the journal
    ends with a `Full` record.
    """

    def __init__(self, path: Path, inputs: bool, max_bytes: int) -> None:
        self.inputs = inputs
        self._path = path
        self._encoder = msgspec.json.Encoder()
        self._left_bytes = max_bytes
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            self._left_bytes -= os.fstat(self._fd).st_size
        except OSError as error:
            self._give_up(error)

    def add(self, record: AnyRecord) -> None:
        if self._fd < 0:
            return
        line = self._encoder.encode(record) + b"\n"
        self._left_bytes -= len(line)
        is_full = self._left_bytes < 0
        if is_full:
            line = self._encoder.encode(Full(time_s=record.time_s)) + b"\n"
        try:
            os.write(self._fd, line)
        except OSError as error:
            self._give_up(error)
        if is_full:
            log.warning("%s is full; raise journal.max", self._path)
            self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _give_up(self, error: OSError) -> None:
        log.warning("cannot write the journal %s, it is closed: %s", self._path, error)
        self.close()


class QueueJournal:
    """Observer that writes a local scheduler's queue and steps to a journal.

    Args:
        journal: receives the records.
        now_s: the clock for changes between steps.
    """

    def __init__(self, journal: Sink, now_s: Callable[[], float]) -> None:
        self._journal = journal
        self._now_s = now_s

    def added(self, request: Waiting) -> None:
        self._journal.add(
            Queued(
                time_s=self._now_s(),
                id=request.id,
                model=request.model,
                prompt_tokens=request.prompt_tokens,
                max_tokens=request.max_tokens,
                arrival_s=request.arrival_s,
                deadline_s=request.deadline_s,
                priority=request.priority,
            )
        )

    def removed(self, request_ids: tuple[str, ...]) -> None:
        self._journal.add(Left(time_s=self._now_s(), ids=request_ids))

    def chosen(self, view: DeviceStepView, jobs: Sequence[StepJob]) -> None:
        """Writes a choice of step control, with the requests that it dispatches."""
        if self._journal.inputs:
            self._journal.add(StepsChosen(time_s=view.now_s, view=view, jobs=tuple(jobs)))
        ids = tuple(i for job in jobs if job.phase is Phase.PREFILL for i in job.requests)
        if ids:
            self._journal.add(Stepped(time_s=view.now_s, ids=ids))

    def stepped(self, now_s: float, views: Sequence[EngineView], plan: AdmissionPlan) -> None:
        inputs = self._journal.inputs
        if plan.ids or inputs:
            blocked = {model: result.value for model, result in plan.blocked.items()}
            seen = tuple(views) if inputs else None
            self._journal.add(Stepped(time_s=now_s, ids=plan.ids, blocked=blocked, views=seen))


def open_journal(
    config: JournalConfig,
    run_dir: Path,
    source: str,
    policy: str,
    *,
    settings: Settings | None = None,
    limits: Limits | None = None,
) -> FileJournal | None:
    """Opens the journal of this process. Returns None if the configuration turns it off."""
    if config.keep == OFF:
        return None
    path = journal_path(run_dir / "logs", source)
    journal = FileJournal(path, config.keep == INPUTS, config.max_bytes)
    journal.add(
        Opened(
            time_s=time.monotonic(),
            unix_s=time.time(),
            source=source,
            policy=policy,
            settings=settings,
            limits=limits,
        )
    )
    return journal


def journal_path(folder: Path, source: str) -> Path:
    return folder / f"journal-{source.replace(':', '')}.jsonl"


def fields_of(actions: Sequence[Action]) -> tuple[dict[str, Any], ...]:
    """Returns the actions in the form of `Planned.actions`."""
    return tuple(
        {"kind": type(action).__name__.lower(), **msgspec.to_builtins(action)} for action in actions
    )


def read(path: Path) -> Iterator[AnyRecord]:
    """Yields the records in order, without a last line that a killed process left incomplete.

    Raises ConfigError if the file cannot be read or a line is not a valid record.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            return
        try:
            yield _DECODER.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}:{number}: not a valid journal record: {error}") from error


_DECODER: msgspec.json.Decoder[AnyRecord] = msgspec.json.Decoder(AnyRecord)
