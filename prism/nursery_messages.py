"""What an agent and its nursery, the pre-imported parent that forks engines, say to each other:
JSON lines on the nursery's stdin and stdout."""

from __future__ import annotations

from prism.messages import Wire


class ForkEngine(Wire, frozen=True):
    """`sm_percent`: the part of the GPU's SMs that the engine may use under MPS. `peers`: devices
    that its ranks above 0 run on (tensor parallel)."""

    engine_id: str
    sm_percent: int = 100
    peers: tuple[str, ...] = ()


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
