"""What an agent and its nursery, the pre-imported parent that forks engines, say to each other:
JSON lines on the nursery's stdin and stdout."""

from __future__ import annotations

from prism.messages import Wire


class ForkEngine(Wire, frozen=True):
    engine_id: str


class EngineForked(Wire, frozen=True):
    engine_id: str
    pid: int


class EngineExited(Wire, frozen=True):
    engine_id: str
    pid: int
    status: int


class NurseryReady(Wire, frozen=True):
    pid: int
    import_s: float


FromNursery = EngineForked | EngineExited | NurseryReady
