"""Simulated engine: continuous batching, chunked prefill, paged KV, retraction on lack of memory.

As in the live engines, a prompt gets its whole KV on admission and prefill has priority over
decode. If memory is too short for the batch's next step, its newest member is retracted and later
recomputed. A run of consecutive decode steps is one event of at most `run_steps` steps. With
`run_steps` = 1 every step is an event, with the same results up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from prism_sim.core.request import Listener, SimRequest
from prism_sim.core.setup import EngineSettings
from prism_sim.costs.model import CostModel, PromptChunk
from prism_sim.engine.batch import Batch
from prism_sim.engine.compute import Compute, Gpu, Job
from prism_sim.engine.decode_run import DecodeRun
from prism_sim.engine.kv import KvSpace
from prism_sim.engine.prompts import Chunks, Prompts


class SimEngine:
    """One active model on one GPU or tensor-parallel group."""

    def __init__(
        self,
        compute: Compute,
        gpus: list[Gpu],
        *,
        cost: CostModel,
        kv: KvSpace,
        settings: EngineSettings,
        listener: Listener,
        slower: float = 1.0,
    ) -> None:
        self._kernel = compute.kernel
        self._compute = compute
        self._gpus = gpus
        self.cost = cost
        self.kv = kv
        self._settings = settings
        self.max_running = settings.max_running
        self._listener = listener
        self._slower = slower
        self.batch = Batch(kv.need)
        self.prompts = Prompts(self._kernel, kv, settings, cost)
        self.run = kv.runner = DecodeRun(
            compute,
            gpus,
            cost=cost,
            kv=kv,
            batch=self.batch,
            slower=slower,
            on_end=self._decode_ended,
        )
        # Prompts in the prefill step in flight, each with its number of tokens; empty: none.
        self._chunks: Chunks = []
        # True if that step also decodes.
        self._mixed = False
        self._prefill_since_s = 0.0
        # True after `stop`.
        self.stopping = False
        self._on_idle: Callable[[], None] | None = None
        # Number of requests that the engine holds.
        self.running = 0
        # Time from an admission until the engine may start the request.
        self.submit_s = 0.0
        self.prompt_tokens_total = 0
        self.output_tokens_total = 0

    # --- state ------------------------------------------------------------------------------

    def output_tokens(self) -> int:
        """Returns the number of tokens generated since the start."""
        done = self.run.done() if self.run.job is not None else 0
        return self.output_tokens_total + done * len(self.batch.members)

    def requests(self) -> list[SimRequest]:
        """Returns all requests that the engine holds."""
        waiting = (*self.prompts.ready, *self.prompts.retracted)
        return [*self.batch.members.values(), *self.batch.deferred, *waiting]

    # --- commands ---------------------------------------------------------------------------

    def admit(self, requests: Iterable[SimRequest]) -> None:
        """Admits requests; `start_next` starts them. A request whose KV does not fit waits for
        memory like a retracted one."""
        # The steps begun so far allocate their KV before the new requests take the run's claim.
        if self.submit_s > 0:
            self.run.catch_up()
        else:
            self.run.end_run()
        for request in requests:
            self.running += 1
            request.ready_s = self._kernel.time_s + self.submit_s
            if request.started_s < 0:  # else it comes from a removed copy
                request.started_s = self._kernel.time_s
                self.prompt_tokens_total += request.prompt_tokens
            self.prompts.add(request)
        if self.submit_s > 0:
            self._kernel.after(self.submit_s, self._on_submitted)

    def start_next(self) -> None:
        """Starts the next step or run if none is in flight. Called after every change."""
        if self._chunks or self.run.job is not None:
            return
        prompts = self.prompts.ready
        if self.stopping:
            self._report_idle()
        elif prompts and prompts[0].ready_s <= self._kernel.time_s:
            self._start_prefill()
        elif self.batch.members:
            self._start_decode(self._settings.run_steps)

    def _on_submitted(self) -> None:
        self.run.end_run()
        self.start_next()

    def readmit(self) -> None:
        """Readmits retracted requests whose KV fits, oldest first."""
        self.run.catch_up()
        if not self.stopping and self.prompts.readmit(self.running, len(self.batch.members)):
            self.run.end_run()

    # --- moving -----------------------------------------------------------------------------

    def stop(self, on_idle: Callable[[], None]) -> None:
        """Starts no more steps and calls `on_idle` once none is in flight; `release` follows."""
        self.stopping, self._on_idle = True, on_idle
        self.run.end_run()
        self.start_next()

    def _report_idle(self) -> None:
        if self._on_idle is not None:
            self._kernel.after(0.0, self._on_idle)
            self._on_idle = None

    def release(self) -> list[SimRequest]:
        """Frees the memory of all requests and returns them, with their progress. REQUIRES: nothing
        is in flight."""
        held = [*self.batch.members.values(), *self.prompts.ready]
        for request in held:
            if request.index in self.batch.members:
                self.batch.leave(request)
            self.kv.release(request, self._kernel.time_s)
        left = [*held, *self.prompts.take_retracted()]
        self.prompts.ready.clear()
        self.running -= len(left)
        return left

    def take_over(self, requests: Iterable[SimRequest]) -> None:
        """Takes requests of another engine with their KV. A request whose KV does not fit waits for
        memory and is recomputed. `start_next` starts them."""
        self.run.end_run()
        prefills: list[SimRequest] = []
        for request in requests:
            self.running += 1
            request.prefix, request.ready_s = [], self._kernel.time_s
            if not self.kv.take(self.kv.blocks(request.kv_tokens)):
                self.prompts.recompute(request)
            elif request.todo_tokens:
                prefills.append(request)
            else:
                self._join_batch(request)
        self.prompts.ready.extendleft(reversed(prefills))

    def _join_batch(self, request: SimRequest) -> None:
        """Adds a request with a computed prompt to the batch, after the step in flight if any."""
        if self.run.job is None and not (self._chunks and self._mixed):
            self.batch.join(request)
        else:
            self.batch.deferred.append(request)
            self.run.end_run()

    # --- prefill ----------------------------------------------------------------------------

    def _start_prefill(self) -> None:
        """Starts one step of the oldest prompts. REQUIRES: the first may start, and nothing is in
        flight."""
        chunks = self.prompts.chunks()
        mixed = self._settings.mixed_chunk and bool(self.batch)
        if mixed and self._make_room():
            self.kv.take(self.batch.new_blocks(1))
        self._prefill_step(chunks, len(self.batch.members) if mixed else 0, 1.0)

    def _prefill_step(self, chunks: Chunks, batch: int, sm_share: float) -> None:
        costs = [PromptChunk(tokens, r.kv_tokens - r.todo_tokens) for r, tokens in chunks]
        context_tokens = self.batch.context_tokens if batch else 0
        work_s = self.cost.step_s(costs, batch, context_tokens)
        usage = partial(self.cost.usage, costs, batch, context_tokens)
        job = Job(self._gpus, work_s * self._slower, usage, self._prefill_ended, sm_share)
        self._chunks, self._mixed = chunks, batch > 0
        self._prefill_since_s = self._kernel.time_s
        self._compute.start(job)

    def _prefill_ended(self) -> None:
        chunks, self._chunks = self._chunks, []
        seconds = self._kernel.time_s - self._prefill_since_s
        self.prompts.measure(sum([tokens for _, tokens in chunks]), seconds)
        if self._mixed:
            self._advance(1)
            self.batch.join_deferred()
        for request, tokens in chunks:
            request.todo_tokens -= tokens
            if request.todo_tokens == 0:
                self.prompts.ready.remove(request)
                self.kv.keep_prompt(request)
                self._emit_token(request)
        self.run.usage_changed = True
        self._listener.freed()
        self.start_next()

    def _emit_token(self, request: SimRequest) -> None:
        request.generated += 1
        self.output_tokens_total += 1
        if request.first_s < 0:
            request.first_s = self._kernel.time_s
        if request.generated >= request.output_tokens:
            self._end(request)
        else:
            self._join_batch(request)

    # --- decode -----------------------------------------------------------------------------

    def _start_decode(self, steps_max: int, sm_share: float = 1.0) -> bool:
        """Starts a run of decode steps of the whole batch. Returns False if all requests had to be
        retracted. REQUIRES: no decode in flight, a batch."""
        if not self._make_room():
            self.start_next()
            return False
        self.run.start(steps_max, sm_share)
        return True

    def _decode_ended(self) -> None:
        ended = self._advance(self.run.finish())
        if self.batch.deferred:
            self.batch.join_deferred()
        if ended:
            self._listener.freed()
        self.start_next()

    def _advance(self, steps: int) -> bool:
        """Completes `steps` decode steps. Returns True if a request ended."""
        self.output_tokens_total += steps * len(self.batch.members)
        ended = self.batch.advance(steps)
        for request in ended:
            self._end(request)
        return bool(ended)

    def _make_room(self) -> bool:
        """Retracts members until the next step of the batch fits. Returns False if none is left."""
        while self.batch.members:
            if self.kv.fits(self.batch.new_blocks(1)):
                return True
            victim = self.batch.newest()
            self.batch.leave(victim)
            self._retract(victim)
        return False

    def _retract(self, victim: SimRequest) -> None:
        self.kv.release(victim, self._kernel.time_s)
        self.prompts.recompute(victim)
        self.run.usage_changed = True
        self._listener.retracted(victim)

    def _end(self, request: SimRequest) -> None:
        self.running -= 1
        self.run.usage_changed = True
        self.kv.release(request, self._kernel.time_s)
        self._listener.ended(request)
