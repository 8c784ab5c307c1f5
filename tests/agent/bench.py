"""Two engines without processes on a real ledger, for tests of the agent's parts."""

from __future__ import annotations

import time

import kvcached
from prism.agent.engines.reclaimer import PeerLedgers, Reclaimer
from prism.agent.requests.engine_views import EngineViews
from prism.agent.state.device_state import DeviceState, HostedModel, ModelState
from prism.agent.state.engine_pool import EnginePool, EngineProcess, EngineState
from prism.agent.state.request_table import RequestTable, TrackedRequest
from prism.messages.engine import Activated, EngineStatus, ToEngine
from prism.scheduler.local_scheduler import LocalScheduler
from tests.agent.harness import model_spec
from tests.queueing.requests import request

PAGE = 4096
QUANTUM = 4 * PAGE
QUANTUM_TOKENS = 16


class Sent:
    """Engines' socket that records what is sent."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, ToEngine]] = []

    def send(self, engine_id: str, message: ToEngine) -> bool:
        self.messages.append((engine_id, message))
        return True


class Bench:
    """Two active engines on a real ledger of 100 quanta, each guaranteed ten."""

    def __init__(self, device: kvcached.Device) -> None:
        self.time_s = 0.0
        self.device = device
        requests = RequestTable(LocalScheduler(), lambda: time.time() - self.time_s)
        self.state = DeviceState(
            EnginePool("host:0", 2), now_s=lambda: self.time_s, requests=requests
        )
        self.sent = Sent()
        peers = PeerLedgers("", self.state.pool)
        self.reclaimer = Reclaimer(self.state, device, peers)
        self.views = EngineViews(self.state, device, peers)
        self.clients = {model: self._serve(model) for model in ("a", "b")}

    def _serve(self, model: str) -> kvcached.Client:
        engine = self.state.pool.create(0.0)
        engine.become(EngineState.ACTIVE, 0.0, model)
        engine.activated = Activated(model, QUANTUM, QUANTUM_TOKENS, 0, 0, 0, 16, 8)
        hosted = HostedModel(model_spec(model), 0.0, ModelState.ACTIVE, engine_id=engine.id)
        self.state.models.hosted[model] = hosted
        self.observe(model)
        return self.device.client(engine.id, min_bytes=10 * QUANTUM)

    def engine(self, model: str) -> EngineProcess:
        engine = self.state.pool.get(self.state.models.hosted[model].engine_id)
        assert engine is not None
        return engine

    def observe(self, model: str, free: int = 0, evictable: int = 0) -> None:
        self.engine(model).status = EngineStatus(
            self.engine(model).id, model, free_mapped_tokens=free, evictable_tokens=evictable
        )

    def run(self, model: str, need_tokens: int, id: str = "1") -> TrackedRequest:
        run = TrackedRequest(request(id, model, prompt_tokens=20))
        self.state.requests.start(run, self.engine(model).id, need_tokens)
        return run

    def quanta(self, model: str) -> tuple[float, float]:
        """Returns the (own, shared) quanta that `model` could take."""
        view = next(view for view in self.views.read() if view.model == model)
        shared = view.available_tokens - view.own_tokens
        return view.own_tokens / QUANTUM_TOKENS, shared / QUANTUM_TOKENS
