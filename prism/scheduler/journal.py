"""What the schedulers of a cluster decided, record by record: for operators, and for `prism-sim
parity`, which compares it with a simulation.

Each process appends JSON lines to a file of its own beside its log. Prompts, outputs and secrets
are never in it. A simulation keeps the same records in memory.
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
from prism.policies.data import Action, ClusterView, Settings
from prism.scheduler.local import AdmissionPlan, Limits, Waiting
from prism.scheduler.ports import EngineView

log = logging.getLogger(__name__)

FORMAT = 1
OFF, DECISIONS, INPUTS = "off", "decisions", "inputs"
KEPT = (OFF, DECISIONS, INPUTS)
CLUSTER = "cluster"


class JournalConfig(msgspec.Struct, frozen=True):
    """keep: one of KEPT."""

    keep: str = OFF
    max_bytes: int = 256 << 20


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="what", omit_defaults=True):
    """time_s: the writing process's monotonic clock; `Opened` dates it."""

    time_s: float


class Opened(Record, frozen=True, tag="opened"):
    """A process began. source: "cluster", or the agent's device. settings, limits: of its
    scheduler."""

    unix_s: float
    source: str
    policy: str
    settings: Settings | None = None
    limits: Limits | None = None
    format: int = FORMAT


class Moved(Record, frozen=True):
    """About an action of the cluster scheduler. kind: activate, evict, migrate (from device to
    target), drop_copy."""

    kind: str
    model: str
    device: str
    target: str = ""


class Started(Moved, frozen=True, tag="started"):
    """The action began."""

    reason: str = ""


class Ended(Moved, frozen=True, tag="ended"):
    """The action is over; problem: empty, or why it failed."""

    problem: str = ""


class Refused(Record, frozen=True, tag="refused"):
    """A model that should be up has no place."""

    model: str
    reason: str


class Planned(Record, frozen=True, tag="planned"):
    """A plan with all that the policy saw. actions: fields of each, and its "kind"."""

    view: ClusterView
    actions: tuple[dict[str, Any], ...]


class Served(Record, frozen=True, tag="served"):
    """A model came up on the agent's device. seconds: since there was an engine for it; the rest as
    the engine says it."""

    model: str
    seconds: float
    static_bytes: int
    reserve_bytes: int
    quantum_bytes: int
    quantum_tokens: int
    block_tokens: int


class Queued(Record, frozen=True, tag="queued"):
    """A request waits at the agent from now on; times are on the clock of time_s."""

    id: str
    model: str
    prompt_tokens: int
    max_tokens: int
    arrival_s: float
    deadline_s: float
    priority: int = 0


class Left(Record, frozen=True, tag="left"):
    """These wait no more, without having been dispatched: cancelled, or moved."""

    ids: tuple[str, ...]


class Stepped(Record, frozen=True, tag="stepped"):
    """The local scheduler dispatched ids, in this order. blocked: model -> why its first waiting
    request could not start. views: what it saw of its engines, where inputs are kept."""

    ids: tuple[str, ...] = ()
    blocked: dict[str, str] = {}
    views: tuple[EngineView, ...] | None = None


class Full(Record, frozen=True, tag="full"):
    """The file has its greatest size: nothing follows."""


AnyRecord = Opened | Started | Ended | Refused | Planned | Served | Queued | Left | Stepped | Full


class Sink(Protocol):
    """Where records go. inputs: whether what decisions were made on is kept as well."""

    inputs: bool

    def add(self, record: AnyRecord) -> None: ...


class MemoryJournal:
    """Keeps records in a list."""

    def __init__(self, inputs: bool = False) -> None:
        self.inputs = inputs
        self.records: list[AnyRecord] = []

    def add(self, record: AnyRecord) -> None:
        self.records.append(record)


class FileJournal:
    """Appends records to a file that this user alone may read; for one process and thread.

    A file that cannot be written is logged once and is no reason to fail. At max_bytes a last
    record says that it is full.
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
        log.warning("no journal is kept: %s: %s", self._path, error)
        self.close()


class QueueJournal:
    """Writes what a local scheduler's queue and steps were. now_s: dates what happens between
    steps."""

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
    """The journal of this process, begun; None where the configuration wants none."""
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
    """As `Planned` has them."""
    return tuple(
        {"kind": type(action).__name__.lower(), **msgspec.to_builtins(action)} for action in actions
    )


def read(path: Path) -> Iterator[AnyRecord]:
    """The records in their order. A last line that was cut short by a killed process is left out.
    Raises ConfigError: no such file, or the line that is no record."""
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
            raise ConfigError(f"{path}:{number}: no record of a journal: {error}") from error


_DECODER: msgspec.json.Decoder[AnyRecord] = msgspec.json.Decoder(AnyRecord)
