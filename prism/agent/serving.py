"""A request's way through the agent: waiting, admitted, running, ended.

Everything here runs in one event loop. `turn` is the only place that changes Redis on behalf of
requests, so acknowledgements and admissions cannot overtake each other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec

from prism.agent.admission import DevicePort
from prism.agent.delivery import Delivery, Parcels
from prism.agent.engines import EngineLink
from prism.agent.errands import Errands
from prism.agent.mirror import Entry, Mirror
from prism.agent.running import Running
from prism.agent.state import State
from prism.errors import LeaseLostError, QueueUnavailableError
from prism.messages import Cancel, Chunk, EngineOutput, Failure, Request, Submit
from prism.queueing import RequestQueue
from prism.scheduler.local import Limits, LocalScheduler

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What serving works with; wired in agent.py."""

    state: State
    device: str
    queue: RequestQueue
    mirror: Mirror
    scheduler: LocalScheduler
    limits: Limits
    port: DevicePort
    link: EngineLink
    delivery: Delivery
    errands: Errands


class Serving:
    """`wake`: something happened after which requests may start or errands wait.
    now_unix_s: wall clock."""

    def __init__(
        self,
        parts: Parts,
        wake: Callable[[], None],
        now_unix_s: Callable[[], float],
    ) -> None:
        self._parts = parts
        self.wake = wake
        self._now_unix_s = now_unix_s
        self._admitting: dict[str, Entry] = {}
        self._cancelled: set[str] = set()
        self._postponed: dict[str, Entry] = {}
        self.paused = False

    @property
    def has_waiting(self) -> bool:
        return len(self._parts.mirror) > 0

    def held(self) -> set[str]:
        """Ids of the requests that run here."""
        return {run.request.id for run in self._parts.state.running}

    # --- arrivals ---------------------------------------------------------------------------

    def arrived(self, entry: Entry) -> None:
        """An entry of the queue, perhaps seen before."""
        run = self._parts.state.running.get(entry.request.id)
        admitting = self._admitting.get(entry.request.id)
        if admitting is not None:
            if admitting.entry_id != entry.entry_id:
                self._postponed[entry.request.id] = entry
        elif run is None:
            self._parts.mirror.add(entry)
        elif entry.request.attempt > run.request.attempt:
            self._stop(run)
            self._postponed[entry.request.id] = entry
        else:
            self._parts.errands.adopt(entry.entry_id)
        self.wake()

    def replayed(self, entry_ids: Collection[str]) -> None:
        """These and no others wait in the queue."""
        self._parts.mirror.keep_only(entry_ids)

    def hand_back(self, given_up: Callable[[str], bool]) -> None:
        """Waiting requests of the models that `given_up` names go to the unplaced ones."""
        for entry in self._parts.mirror.take(lambda e: given_up(e.request.model)):
            self._parts.errands.unplace(entry.entry_id)
            self.wake()

    # --- admission --------------------------------------------------------------------------

    async def turn(self, epoch: int) -> None:
        """Tell Redis what happened, then admit and submit what starts at once.

        Raises QueueUnavailableError, LeaseLostError; nothing is lost then.
        """
        await self._parts.errands.run(self._parts.queue, self._parts.device, epoch)
        if self.paused:
            return
        self._parts.scheduler.step(self._parts.state.now_s())
        chosen = self._parts.port.take_chosen()
        if chosen:
            await self._admit(chosen, epoch)

    async def _admit(self, chosen: list[tuple[str, list[str]]], epoch: int) -> None:
        groups = [(model, self._take(ids)) for model, ids in chosen]
        entry_ids = [entry.entry_id for _, entries in groups for entry in entries]
        try:
            admitted = await self._parts.queue.admit(self._parts.device, epoch, entry_ids)
        except (QueueUnavailableError, LeaseLostError):
            self._put_back()
            raise
        taken = list(self._admitting)
        self._admitting.clear()
        for model, entries in groups:
            self._submit(model, [e.request for e in entries if e.entry_id in admitted])
        self._cancelled.clear()
        self._resume_postponed(taken)

    def _take(self, request_ids: list[str]) -> list[Entry]:
        found = (self._parts.mirror.pop(request_id) for request_id in request_ids)
        entries = [entry for entry in found if entry is not None]
        self._admitting.update((entry.request.id, entry) for entry in entries)
        return entries

    def _put_back(self) -> None:
        """Unless a newer attempt was read meanwhile. Redis may have admitted them all the same:
        then they have left its queue, where a replay or a cancellation would look for them."""
        for request_id, entry in self._admitting.items():
            self._parts.errands.requeue(request_id)
            if request_id in self._cancelled:
                self._parts.errands.forget(request_id)
            elif request_id not in self._parts.mirror:
                self._parts.mirror.add(entry)
        taken = list(self._admitting)
        self._admitting.clear()
        self._cancelled.clear()
        self._resume_postponed(taken)

    def _resume_postponed(self, request_ids: list[str]) -> None:
        """Newer attempts that were read while older ones were being admitted."""
        for request_id in request_ids:
            if request_id not in self._postponed:
                continue
            if (run := self._parts.state.running.get(request_id)) is not None:
                self._stop(run)
            else:
                self._parts.mirror.add(self._postponed.pop(request_id))

    def _submit(self, model: str, requests: list[Request]) -> None:
        """To the model's engine, if it is still there after the wait for Redis."""
        served = self._parts.state.models.active(model)
        wanted = []
        for request in requests:
            if request.id in self._cancelled:
                self._parts.errands.finish(request.id)
            elif served is None:
                self._parts.errands.requeue(request.id)
            else:
                wanted.append(request)
        if served is not None and wanted:
            for request in wanted:
                self._note_start(request, served.engine_id)
            self._parts.link.send(served.engine_id, Submit(wanted))

    def _note_start(self, request: Request, engine_id: str) -> None:
        engine = self._parts.state.pool.get(engine_id)
        block = engine.activated.block_tokens if engine and engine.activated else 1
        headroom = min(request.sampling.max_tokens, self._parts.limits.headroom_tokens)
        need_tokens = -(-(request.known_tokens + headroom) // block) * block
        self._parts.state.running.add(Running(request, engine_id, need_tokens))
        totals = self._parts.state.models.totals(request.model)
        totals.prompt_tokens += len(request.prompt_ids)
        totals.last_request_unix_s = self._now_unix_s()

    # --- output -----------------------------------------------------------------------------

    def output(self, engine_id: str, output: EngineOutput) -> None:
        """Forward what an engine produced. What nobody waits for is dropped."""
        parcels = Parcels()
        for chunk in output.chunks:
            if run := self._run_of(engine_id, chunk):
                self._take_chunk(run, chunk, parcels)
        for failure in output.failures:
            if run := self._run_of(engine_id, failure):
                self._take_failure(run, failure, parcels)
        self._parts.delivery.send(parcels)

    def moved(self, engine_id: str, requests: Sequence[Request]) -> None:
        """The engine has stopped these; they go where their model is placed now. Their next token
        is due as any token after the first is."""
        now_unix_s = self._now_unix_s()
        for request in requests:
            run = self._parts.state.running.get(request.id)
            if run is None or run.engine_id != engine_id or run.request.attempt != request.attempt:
                continue
            if run.silent or request.id in self._postponed:
                self._ended(run)
                continue
            self._parts.state.running.pop(request.id)
            due = {"arrival_unix_s": now_unix_s, "slo_ttft_s": request.slo_tpot_s}
            self._parts.errands.move(msgspec.structs.replace(request, **due))
        self.wake()

    def engine_lost(self, engine_id: str, why: str) -> None:
        """Every request on this engine fails; its frontend may send it again."""
        parcels = Parcels()
        for run in self._parts.state.running.on_engine(engine_id):
            text = f"the engine process that served {run.request.model} died: {why}"
            self._take_failure(run, _failure(run.request, "engine_died", text), parcels)
        self._parts.delivery.send(parcels)

    def end_all(self, why: str) -> None:
        """This agent ends: what still runs fails, and may be sent again."""
        parcels = Parcels()
        for run in self._parts.state.running:
            self._take_failure(run, _failure(run.request, "agent_stopped", why), parcels)
        self._parts.delivery.send(parcels)

    def _run_of(self, engine_id: str, message: Chunk | Failure) -> Running | None:
        run = self._parts.state.running.get(message.request_id)
        mine = run is not None and run.engine_id == engine_id
        return run if mine and run and run.request.attempt == message.attempt else None

    def _take_chunk(self, run: Running, chunk: Chunk, parcels: Parcels) -> None:
        totals = self._parts.state.models.totals(run.request.model)
        totals.output_tokens += len(chunk.token_ids)
        if not run.prefilled:
            run.prefilled = True
            self.wake()
        if not run.silent:
            parcels.chunk(run.request, chunk)
        if chunk.finish_reason is not None:
            totals.finished += 1
            self._ended(run)

    def _take_failure(self, run: Running, failure: Failure, parcels: Parcels) -> None:
        self._parts.state.models.totals(run.request.model).failed += 1
        if not run.silent:
            parcels.failure(run.request, failure)
        self._ended(run)

    def _ended(self, run: Running) -> None:
        request = run.request
        self._parts.state.running.pop(request.id)
        self._parts.errands.finish(request.id)
        self._parts.state.models.totals(request.model).last_request_unix_s = self._now_unix_s()
        if (newer := self._postponed.pop(request.id, None)) is not None:
            self._parts.mirror.add(newer)
        self.wake()

    # --- cancellations ----------------------------------------------------------------------

    def cancel(self, request_ids: Collection[str]) -> None:
        """Their frontend asks to stop these. Ids that are not here are ignored: a cancellation
        goes to all agents."""
        parcels = Parcels()
        for request_id in request_ids:
            self._postponed.pop(request_id, None)
            if (run := self._parts.state.running.get(request_id)) is not None:
                self._parts.link.send(run.engine_id, Cancel([request_id]))
            elif (entry := self._parts.mirror.pop(request_id)) is not None:
                self._parts.errands.forget(request_id)
                parcels.chunk(entry.request, _cancelled(entry.request))
            elif (admitting := self._admitting.get(request_id)) is not None:
                self._cancelled.add(request_id)
                parcels.chunk(admitting.request, _cancelled(admitting.request))
        self._parts.delivery.send(parcels)
        self.wake()

    def frontend_died(self, frontend_id: str) -> None:
        """Nobody wants these requests any more."""
        for run in self._parts.state.running:
            if run.request.frontend_id == frontend_id and not run.silent:
                self._stop(run)
        for entry in self._parts.mirror.take(lambda e: e.request.frontend_id == frontend_id):
            self._parts.errands.forget(entry.request.id)
        self.wake()

    def _stop(self, run: Running) -> None:
        run.silent = True
        self._parts.link.send(run.engine_id, Cancel([run.request.id]))


def _failure(request: Request, code: str, message: str) -> Failure:
    return Failure(request.id, request.attempt, code, message, retryable=True)


def _cancelled(request: Request) -> Chunk:
    return Chunk(request.id, request.attempt, 0, [], "cancelled")
