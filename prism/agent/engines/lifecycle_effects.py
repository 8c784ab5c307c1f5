"""Interface from the state machine of models and engines to the agent's other parts."""

from __future__ import annotations

from typing import Protocol

from prism.agent.state.device_state import HostedModel
from prism.agent.state.engine_pool import EngineProcess
from prism.messages.agent import ActionResult
from prism.messages.engine import Activated, ToEngine


class Effects(Protocol):
    """Effects of the state machine. None of them blocks."""

    def send(self, engine_id: str, message: ToEngine) -> bool: ...

    def move_running(self, hosted: HostedModel, targets: tuple[str, ...]) -> None:
        """Stops the model's running requests, which resume on one of the target devices."""

    def kill(self, engine: EngineProcess) -> None:
        """Kills the process with SIGKILL and frees the memory of dead processes in the ledger."""

    def engine_lost(self, engine_id: str, why: str, by_request: bool) -> bool:
        """Fails the engine's requests. Returns whether one of them caused its death.

        Args:
            by_request: whether one of the requests may be the cause.
        """

    def engine_load(self, engine_id: str) -> int:
        """Returns the number of requests that run on the engine."""

    def reclaim(self, need_bytes: int, for_engine: str) -> None: ...

    def answer(self, result: ActionResult) -> None: ...

    def record(self, engine_id: str, activated: Activated) -> None:
        """Records that a model became active. The stages are those of `stages_of`."""

    def replaced(self, engine: EngineProcess, model: str, why: str) -> None:
        """Records that an engine is being replaced by a fresh one."""

    def changed(self) -> None:
        """Handles a change of a model's or an engine's state."""
