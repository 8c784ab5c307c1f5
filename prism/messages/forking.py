"""Messages between an agent and its fork server: JSON lines on the server's stdin and stdout.

The fork server has imported the engine's packages and forks engines.
"""

from __future__ import annotations

from prism.messages import Wire


class ForkEngine(Wire, frozen=True):
    engine_id: str
    sm_percent: int = 100  # share of the GPU's SMs that the engine may use under MPS
    peers: tuple[str, ...] = ()  # devices of the ranks above 0 (tensor parallel)


class EngineForked(Wire, frozen=True):
    engine_id: str
    pid: int


class EngineExited(Wire, frozen=True):
    engine_id: str
    pid: int
    status: int


class ForkServerReady(Wire, frozen=True):
    pid: int
    import_s: float


FromForkServer = EngineForked | EngineExited | ForkServerReady
