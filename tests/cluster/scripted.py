"""A scripted agent: real sockets, the real queue, and a make-believe device."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from prism.config.checks.memory_needs import memory_need
from prism.config.schema.cluster_config import ClusterConfig
from prism.errors import LeaseLostError
from prism.messages.agent import (
    ActionResult,
    ActivateModel,
    AgentReport,
    EvictModel,
    FromScheduler,
    ModelReport,
    PrefetchModel,
    TrimModel,
)
from prism.messages.requests import Request, Resume
from prism.queueing.request_queue import RequestQueue
from prism.scheduler.traffic import bucket

LEASE_S = 0.6
TICK_S = 0.02


@dataclass
class Resident:
    """A model on the device; `need_bytes` stay charged until it has left."""

    need_bytes: int
    state: str = "activating"
    kv_limit_bytes: int | None = None
    error: str = ""
    peers: tuple[str, ...] = ()
    sm_share: float = 1.0
    prefills: bool = False
    has_output: bool = False


@dataclass
class ScriptedAgent:
    """Obeys orders after `delay_s`, serves every waiting request of its active models at once,
    reports every 50 ms and on changes. `failing`: model -> message of its activations, which would
    always fail if `lasting`.
    `broken_rules`: orders that a correct scheduler never sends."""

    config: ClusterConfig
    device: str
    delay_s: float = 0.05
    engines_starting: int = 0
    failing: dict[str, str] = field(default_factory=dict)
    lasting: bool = False
    stuck: set[str] = field(default_factory=set)
    unreadable: set[str] = field(default_factory=set)
    orders: list[tuple[str, str]] = field(default_factory=list)
    broken_rules: list[str] = field(default_factory=list)
    residents: dict[str, Resident] = field(default_factory=dict)
    finished: Counter[str] = field(default_factory=Counter)
    # Reported of each model: the length of its prompts, and tokens per second of each rank.
    prompt_tokens: int = 10
    prefill_tokens_per_s: float = 0.0
    serving: bool = True
    silent: bool = False
    # Whether requests of more than one token end, and those on the device.
    decodes: bool = True
    decoding: dict[str, Request] = field(default_factory=dict)

    async def start(self) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IDENTITY, self.device.encode())
        self._socket.connect(self.config.scheduler_endpoint)
        self._queue = RequestQueue.connect(self.config.redis_url, self.config.namespace)
        self._owner = f"scripted-{id(self)}-{time.time_ns()}"
        self._waiting: Counter[str] = Counter()
        self._last_request: dict[str, float] = defaultdict(float)
        self._tasks: set[asyncio.Task[None]] = set()
        await self._acquire()
        for loop in (self._obey(), self._report_often(), self._serve()):
            self._spawn(loop)

    async def kill(self) -> None:
        """Stops like kill -9: sends no message, and the lease expires."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
        self._socket.close()
        self._context.term()
        await self._queue.close()

    async def lose(self, model: str) -> None:
        """Kills the model's engine; the pool has another one."""
        del self.residents[model]
        await self.report()

    def active(self) -> set[str]:
        return {name for name, r in self.residents.items() if r.state == "active"}

    async def report(self) -> None:
        if self.silent:
            return
        device = self.config.device(self.device)
        reserved_bytes = sum(r.need_bytes for r in self.residents.values())
        message = AgentReport(
            device=self.device,
            epoch=self._epoch,
            time_unix_s=time.time(),
            capacity_bytes=device.capacity_bytes,
            page_bytes=device.page_bytes,
            reserved_bytes=reserved_bytes,
            committed_bytes=reserved_bytes,
            resident_bytes=reserved_bytes,
            engines_free=max(0, device.engines - self.engines_starting - len(self.residents)),
            engines_starting=self.engines_starting,
            engines_total=device.engines,
            models=[self._model_report(name, r) for name, r in self.residents.items()],
        )
        await self._send(message)

    # --- below ------------------------------------------------------------------------------

    def _model_report(self, name: str, resident: Resident) -> ModelReport:
        return ModelReport(
            model=name,
            state=resident.state,
            waiting=self._waiting[name],
            last_request_unix_s=self._last_request[name],
            prompt_tokens_total=self.prompt_tokens * self.finished[name],
            prefill_tokens_per_s=self.prefill_tokens_per_s * (1 + len(resident.peers)),
            output_lengths=[(bucket(1), self.finished[name])],
            finished_total=self.finished[name],
            error=resident.error,
            has_output=resident.has_output,
            peers=resident.peers,
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None:
            self._tasks.discard(task)

    async def _acquire(self) -> None:
        while True:
            with suppress(LeaseLostError):
                self._epoch = await self._queue.acquire(self.device, self._owner, LEASE_S)
                return
            await asyncio.sleep(TICK_S)

    async def _send(self, message: AgentReport | ActionResult) -> None:
        await self._socket.send(msgspec.msgpack.encode(message))

    async def _report_often(self) -> None:
        while True:
            await self.report()
            await asyncio.sleep(0.05)

    async def _obey(self) -> None:
        decoder = msgspec.msgpack.Decoder(FromScheduler)
        while True:
            order = decoder.decode(await self._socket.recv())
            if isinstance(order, ActivateModel):
                self.orders.append(("activate", order.model.name))
                self._spawn(self._activate(order))
            elif isinstance(order, EvictModel):
                self.orders.append(("evict", order.model))
                self._spawn(self._evict(order))
            elif isinstance(order, PrefetchModel):
                self.orders.append(("prefetch", order.model.name))
                ok = order.model.name not in self.unreadable
                await self._send(ActionResult(order.action_id, ok, "read" if ok else "cut short"))
            elif isinstance(order, TrimModel):
                self.orders.append(("trim", order.model or "*"))
                await self._send(ActionResult(order.action_id, True, "trimmed 7 bytes"))

    async def _activate(self, order: ActivateModel) -> None:
        name, device = order.model.name, self.config.device(self.device)
        need = memory_need(order.model, device, self.config.engine).total_bytes
        taken = sum(r.need_bytes for r in self.residents.values())
        if name in self.residents or len(self.residents) >= device.engines:
            self.broken_rules.append(f"activate {name}: it is here, or no engine is free")
        if taken + need > device.capacity_bytes:
            self.broken_rules.append(f"activate {name}: {taken} + {need} bytes overfill")
        limit_bytes = order.kv_limit_bytes
        self.residents[name] = Resident(
            need,
            kv_limit_bytes=limit_bytes,
            peers=order.peers,
            sm_share=order.sm_share,
            prefills=order.prefills,
        )
        await self.report()
        await asyncio.sleep(self.delay_s)
        while name in self.stuck or self.engines_starting:
            await asyncio.sleep(TICK_S)
        if name in self.failing:
            del self.residents[name]
            await self.report()
            answer = ActionResult(order.action_id, False, self.failing[name], self.lasting)
            await self._send(answer)
            return
        self.residents[name].state = "active"
        await self._send(ActionResult(order.action_id, True, seconds=self.delay_s))
        await self.report()

    async def _evict(self, order: EvictModel) -> None:
        resident = self.residents.get(order.model)
        if resident is None or resident.state != "active":
            self.broken_rules.append(f"evict {order.model}: it is not active here")
            await self._send(ActionResult(order.action_id, False, "not active"))
            return
        resident.state = "draining"
        await self.report()
        await asyncio.sleep(self.delay_s)
        if order.move_running and not order.targets:
            held = [request for request in self.decoding.values() if request.model == order.model]
            await self._move(held)
        del self.residents[order.model]
        await self._send(ActionResult(order.action_id, True))
        await self.report()

    async def _serve(self) -> None:
        while True:
            await self._queue.renew(self.device, self._owner, self._epoch, LEASE_S)
            self._waiting.clear()
            entries = await self._queue.read(self.device, "0")
            ready = {e: r for e, r in entries if r.model in self.active() and self.serving}
            self._waiting.update(r.model for e, r in entries if e not in ready)
            admitted = await self._queue.admit(self.device, self._epoch, list(ready))
            requests = [ready[entry] for entry in admitted]
            for request in requests:
                self._last_request[request.model] = time.time()
                self.residents[request.model].has_output = True
            leaving = [each for each in requests if self._prefills(each)]
            await self._move(leaving)
            self.decoding |= {r.id: r for r in requests if r not in leaving}
            await self._decode()
            await asyncio.sleep(TICK_S)

    def _prefills(self, request: Request) -> bool:
        """Returns whether the request leaves after its first token."""
        return self.residents[request.model].prefills and request.sampling.max_tokens > 1

    async def _decode(self) -> None:
        """Ends the requests on the device, or only the short ones if `decodes` is off."""
        ended = [
            request
            for request in self.decoding.values()
            if self.decodes or request.sampling.max_tokens == 1
        ]
        await self._queue.finish(self.device, self._epoch, [request.id for request in ended])
        for request in ended:
            del self.decoding[request.id]
            self.finished[request.model] += 1

    async def _move(self, requests: Sequence[Request]) -> None:
        """Puts requests back with one more token."""
        for request in requests:
            self.decoding.pop(request.id, None)
        resumed = [
            msgspec.structs.replace(r, resume=Resume([1] * (r.resumed_tokens + 1)))
            for r in requests
        ]
        await self._queue.move(self.device, self._epoch, resumed)


async def eventually(holds: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """Waits until `holds()` (or its awaited result) is true. Returns that value."""
    end_s = time.monotonic() + timeout_s
    while True:
        value = holds()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        if time.monotonic() > end_s:
            raise AssertionError(f"did not happen within {timeout_s:g} s")
        await asyncio.sleep(TICK_S)
