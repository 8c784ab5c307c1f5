"""Effects of a lifecycle under test."""

from __future__ import annotations

from dataclasses import dataclass, field

from prism.agent.state.device_state import HostedModel
from prism.agent.state.engine_pool import EngineProcess
from prism.messages.agent import ActionResult
from prism.messages.engine import Activated, ToEngine


@dataclass
class Recorder:
    """Effects that are only recorded."""

    sent: list[tuple[str, ToEngine]] = field(default_factory=list)
    moved: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    load: dict[str, int] = field(default_factory=dict)
    reclaimed: list[tuple[int, str]] = field(default_factory=list)
    answers: list[ActionResult] = field(default_factory=list)
    records: list[Activated] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    blames: bool = False  # a request is blamed for an engine's death

    def send(self, engine_id: str, message: ToEngine) -> bool:
        self.sent.append((engine_id, message))
        return True

    def move_running(self, hosted: HostedModel, targets: tuple[str, ...]) -> None:
        self.moved.append((hosted.name, targets))

    def kill(self, engine: EngineProcess) -> None:
        self.killed.append(engine.id)

    def engine_lost(self, engine_id: str, why: str, by_request: bool) -> bool:
        self.lost.append(engine_id)
        return by_request and self.blames

    def engine_load(self, engine_id: str) -> int:
        return self.load.get(engine_id, 0)

    def reclaim(self, need_bytes: int, for_engine: str) -> None:
        self.reclaimed.append((need_bytes, for_engine))

    def answer(self, result: ActionResult) -> None:
        self.answers.append(result)

    def record(self, engine_id: str, activated: Activated) -> None:
        self.records.append(activated)

    def replaced(self, engine: EngineProcess, model: str, why: str) -> None:
        self.reasons.append(f"{engine.id} {model} {why}")

    def changed(self) -> None:
        pass
