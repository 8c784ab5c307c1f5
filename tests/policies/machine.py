"""A device for tests of step control: engines whose steps take the time they are told to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from prism.policies.multiplexing.steps import (
    DeviceStepView,
    EngineStepView,
    Phase,
    StepControl,
    StepJob,
    StepRequest,
)


@dataclass
class Request:
    """prefill_s, then `decodes` steps of the engine's decode time."""

    id: str
    model: str
    arrival_s: float
    decodes: int
    prompt_tokens: int = 1
    done: int = 0
    executed_s: float = 0.0
    last_s: float = 0.0
    prefilled: bool = False
    end_s: float = math.nan


@dataclass
class Machine:
    """step_s(model, phase, requests, sm_share) -> seconds. Jobs run side by side if the control
    starts them so."""

    control: StepControl
    engines: Mapping[str, EngineStepView]
    step_s: Callable[[str, Phase, int, float], float]
    kv_capacity_bytes: int = 10**12
    now_s: float = 0.0
    requests: dict[str, Request] = field(default_factory=dict)
    running: list[tuple[float, StepJob]] = field(default_factory=list)
    log: list[tuple[float, StepJob]] = field(default_factory=list)
    peaks: dict[str, float] = field(default_factory=dict)
    kv_most: int = 0
    held_most: int = 0
    kv_byte_s: dict[str, float] = field(default_factory=dict)
    state: Any = None

    def run(self, arrivals: Sequence[Request], until_s: float = math.inf) -> dict[str, float]:
        """Returns request -> latency of the requests that have ended by then."""
        waiting = sorted(arrivals, key=lambda r: (r.arrival_s, r.id))
        self.state = self.control.start(self.view())
        while waiting or self.running or self.open():
            while waiting and waiting[0].arrival_s <= self.now_s + 1e-12:
                request = waiting.pop(0)
                request.last_s = request.arrival_s
                self.requests[request.id] = request
            self.ask()
            events = [end for end, _ in self.running] + [r.arrival_s for r in waiting[:1]]
            if not events or min(events) > until_s:
                break
            for engine in self.view().engines:
                held = self.kv_byte_s.get(engine.model, 0.0)
                self.kv_byte_s[engine.model] = held + engine.kv_bytes * (min(events) - self.now_s)
            self.now_s = min(events)
            self.finish()
        done = [r for r in self.requests.values() if not math.isnan(r.end_s)]
        return {r.id: r.end_s - r.arrival_s for r in done}

    def open(self) -> list[Request]:
        return [r for r in self.requests.values() if math.isnan(r.end_s)]

    def ask(self) -> None:
        choice, self.state = self.control.choose(self.view(), self.state)
        for job in choice.jobs:
            assert job.requests, job
            took_s = self.step_s(job.model, job.phase, len(job.requests), job.sm_share)
            self.running.append((self.now_s + took_s, job))
            self.log.append((self.now_s, job))
            assert sum(j.sm_share for _, j in self.running) <= 1 + 1e-9
            for name in job.requests:
                self.requests[name].executed_s += took_s
        for engine in self.view().engines:
            # Peaks of the last hundred steps or so.
            self.peaks[engine.model] = max(self.peaks.get(engine.model, 0) * 0.99, engine.kv_bytes)
        held = [r for r in self.open() if r.prefilled or r.executed_s > 0]
        self.held_most = max(self.held_most, len(held))
        self.kv_most = max(self.kv_most, sum(e.kv_bytes for e in self.view().engines))

    def finish(self) -> None:
        ended = [job for end, job in self.running if end <= self.now_s + 1e-12]
        self.running = [(end, job) for end, job in self.running if end > self.now_s + 1e-12]
        for job in ended:
            for name in job.requests:
                self.step(self.requests[name], job.phase)

    def step(self, request: Request, phase: Phase) -> None:
        request.last_s = self.now_s
        if phase is Phase.PREFILL:
            request.prefilled = True
        else:
            request.done += 1
        if request.prefilled and request.done >= request.decodes:
            request.end_s = self.now_s

    def view(self) -> DeviceStepView:
        engines = tuple(self.engine(name) for name in self.engines)
        free = 1.0 - sum(job.sm_share for _, job in self.running)
        return DeviceStepView(self.now_s, engines, self.kv_capacity_bytes, free)

    def engine(self, name: str) -> EngineStepView:
        kind = self.engines[name]
        jobs = [job for _, job in self.running if job.model == name]
        stepping = {id for job in jobs for id in job.requests}
        mine = [r for r in self.open() if r.model == name]
        held = sum(r.prompt_tokens + r.done for r in mine if r.prefilled or r.id in stepping)
        idle = [r for r in mine if r.id not in stepping]
        held_bytes = held * kind.token_bytes
        return replace(
            kind,
            prefill=tuple(self.seen(r) for r in idle if not r.prefilled),
            decode=tuple(self.seen(r) for r in idle if r.prefilled),
            busy=frozenset(job.phase for job in jobs),
            kv_bytes=held_bytes,
            kv_peak_bytes=max(held_bytes, int(self.peaks.get(name, 0))),
        )

    def seen(self, r: Request) -> StepRequest:
        tokens = r.prompt_tokens + r.done + r.prefilled
        waiting_s = self.now_s - r.last_s
        return StepRequest(r.id, r.arrival_s, r.prompt_tokens, tokens, r.executed_s, waiting_s)
