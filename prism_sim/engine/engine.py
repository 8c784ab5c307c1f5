"""Simulated engine: continuous batching, chunked prefill, paged KV, retraction on lack of memory.

As in the live engines, a prompt gets its whole KV on admission and prefill has priority over
decode. If memory is too short for the batch's next step, its newest member is retracted and later
recomputed. A run of consecutive decode steps is one event of at most `run_steps` steps. With
`run_steps` = 1 every step is an event, with the same results up to rounding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from prism.models.prefill_speed import Speed
from prism.policies.multiplexing.steps import Phase
from prism_sim.core.request import Listener, SimRequest
from prism_sim.core.setup import UNBOUNDED_STEPS, EngineSettings
from prism_sim.costs.model import CostModel, GpuUsage, PromptChunk
from prism_sim.engine.batch import Batch, Flight
from prism_sim.engine.compute import Compute, Gpu, Job
from prism_sim.engine.kv import KvSpace


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
    ) -> None:
        self._kernel = compute.kernel
        self._compute = compute
        self._gpus = gpus
        self.cost = cost
        self.kv = kv
        self._settings = settings
        self.max_running = settings.max_running
        self._listener = listener
        self.batch = Batch(kv.block_tokens)
        # Admitted requests whose prompt is not computed, oldest first.
        self.prefills: deque[SimRequest] = deque()
        # Requests that wait for memory.
        self.retracted: deque[SimRequest] = deque()
        # Requests that join the batch after the step in flight.
        self._joining: list[SimRequest] = []
        self._prefill_since_s = 0.0
        self._prefill: Flight | None = None
        self._decode: Flight | None = None
        # True after `stop`.
        self.stopping = False
        self._on_idle: Callable[[], None] | None = None
        # Batch size and context tokens for the usage of decode jobs.
        self._usage_of = (0, 0)
        self._usage_changed = True
        # Number of requests that the engine holds.
        self.running = 0
        # Factor on the time of every step.
        self.slower = 1.0
        # Time from an admission until the engine may start the request.
        self.submit_s = 0.0
        self.speed = Speed()
        self.prompt_tokens_total = 0
        self.output_tokens_total = 0
        self.prefill_tokens_per_s = settings.prefill_chunk_tokens / cost.prefill_s(
            settings.prefill_chunk_tokens
        )
        kv.runner = self

    # --- state ------------------------------------------------------------------------------

    @property
    def busy(self) -> frozenset[Phase]:
        """Phases with a job in flight."""
        found = ((Phase.PREFILL, self._prefill), (Phase.DECODE, self._decode))
        return frozenset(phase for phase, step in found if step is not None)

    def pending_prefill_s(self) -> float:
        """Returns the prefill time of the admitted prompts at the speed measured so far. A partly
        computed prompt counts whole, as in the live system, where the agent learns of a prompt's
        progress with its first token."""
        return sum([request.kv_tokens for request in self.prefills]) / self.prefill_tokens_per_s

    def sync(self) -> None:
        """Updates the ledgers to the steps begun by now. A run that ends within the held quanta
        needs no update."""
        step = self._decode
        if step is not None and not self.kv.holds(step.blocks - step.allocated_blocks):
            self.catch_up()

    def catch_up(self) -> None:
        """Updates KV memory to the steps begun by now, block by block."""
        step = self._decode
        if step is not None and step.allocated < step.steps:
            self._allocate(step, self._steps_begun(step))

    def output_tokens(self) -> int:
        """Returns the number of tokens generated since the start."""
        done = self._steps_done(self._decode) if self._decode is not None else 0
        return self.output_tokens_total + done * len(self.batch.members)

    def requests(self) -> list[SimRequest]:
        """Returns all requests that the engine holds."""
        return [*self.batch.members.values(), *self._joining, *self.prefills, *self.retracted]

    # --- commands ---------------------------------------------------------------------------

    def admit(self, requests: Iterable[SimRequest]) -> None:
        """Admits requests; `start_next` starts them. A request whose KV does not fit waits for
        memory like a retracted one."""
        # The steps begun so far allocate their KV before the new requests take the run's claim.
        if self.submit_s > 0:
            self.catch_up()
        else:
            self.end_run()
        for request in requests:
            self.running += 1
            request.ready_s = self._kernel.time_s + self.submit_s
            if request.started_s < 0:  # else it comes from a removed copy
                request.started_s = self._kernel.time_s
                self.prompt_tokens_total += request.prompt_tokens
            if self.kv.hold(request, self._kernel.time_s):
                self.prefills.append(request)
            else:
                self._starve(request)
        if self.submit_s > 0:
            self._kernel.after(self.submit_s, self._on_submitted)

    def start_next(self) -> None:
        """Starts the next step or run if none is in flight. Called after every change."""
        if self._prefill is not None or self._decode is not None:
            return
        if self.stopping:
            self._report_idle()
        elif self.prefills and self.prefills[0].ready_s <= self._kernel.time_s:
            self.start_prefill()
        elif self.batch.members:
            self.start_decode()

    def _on_submitted(self) -> None:
        self.end_run()
        self.start_next()

    def end_run(self) -> None:
        """Ends the decode run in flight with its present step and releases its claim on memory."""
        step = self._decode
        if step is None or step.steps == 1:
            return
        begun = self._steps_begun(step)
        self._allocate(step, begun)
        if begun < step.steps:
            step.steps = begun
            work_s = self.cost.decode_run_s(len(self.batch.members), step.context_tokens, begun)
            self._compute.resize(step.job, work_s * self.slower)
        self.kv.unclaim()

    def readmit(self) -> None:
        """Readmits retracted requests whose KV fits, oldest first."""
        self.catch_up()
        readmitted = False
        while self.retracted and not self.stopping:
            request = self.retracted[0]
            left = request.output_tokens - request.generated
            headroom = min(left, self._settings.headroom_tokens) if self.running > 1 else 1
            spare = self.kv.blocks(request.kv_tokens + headroom) + len(self.batch.members)
            spare -= self.kv.blocks(request.kv_tokens)
            if not self.kv.hold(request, self._kernel.time_s, spare):
                break
            self.prefills.append(self.retracted.popleft())
            readmitted = True
        if not self.retracted:
            self.kv.sites[0].starved.discard(self)
        if readmitted:
            self.end_run()

    def _recompute(self, request: SimRequest) -> None:
        """Lets a request whose KV is gone wait for memory to compute all of it again."""
        request.forget_kv()
        self._starve(request)

    def _starve(self, request: SimRequest) -> None:
        self.retracted.append(request)
        self.kv.sites[0].starved.add(self)

    # --- moving -----------------------------------------------------------------------------

    def stop(self, on_idle: Callable[[], None]) -> None:
        """Starts no more steps and calls `on_idle` once none is in flight; `release` follows."""
        self.stopping, self._on_idle = True, on_idle
        self.end_run()
        self.start_next()

    def _report_idle(self) -> None:
        if self._on_idle is not None:
            self._kernel.after(0.0, self._on_idle)
            self._on_idle = None

    def release(self) -> list[SimRequest]:
        """Frees the memory of all requests and returns them, with their progress. REQUIRES: nothing
        is in flight."""
        held = [*self.batch.members.values(), *self.prefills]
        for request in held:
            if request.index in self.batch.members:
                self.batch.leave(request)
            self.kv.release(request, self._kernel.time_s)
        left = [*held, *self.retracted]
        self.prefills.clear()
        self.retracted.clear()
        self.kv.sites[0].starved.discard(self)
        self.running -= len(left)
        return left

    def take_over(self, requests: Iterable[SimRequest]) -> None:
        """Takes requests of another engine with their KV. A request whose KV does not fit waits for
        memory and is recomputed. `start_next` starts them."""
        self.end_run()
        prefills: list[SimRequest] = []
        for request in requests:
            self.running += 1
            request.prefix, request.ready_s = [], self._kernel.time_s
            if not self.kv.take(self.kv.blocks(request.kv_tokens)):
                self._recompute(request)
            elif request.todo_tokens:
                prefills.append(request)
            else:
                self._join_batch(request)
        self.prefills.extendleft(reversed(prefills))

    def _join_batch(self, request: SimRequest) -> None:
        """Adds a request with a computed prompt to the batch, after the step in flight if any."""
        if self._decode is None and (self._prefill is None or not self._prefill.steps):
            self.batch.join(request)
        else:
            self._joining.append(request)
            self.end_run()

    def _join_deferred(self) -> None:
        for request in self._joining:
            self.batch.join(request)
        self._joining.clear()

    # --- prefill ----------------------------------------------------------------------------

    def start_prefill(self) -> None:
        """Starts one step of the oldest prompts. REQUIRES: the first may start, and nothing is in
        flight."""
        left = self._settings.prefill_chunk_tokens
        chunks: list[tuple[SimRequest, int]] = []
        for request in self.prefills:
            if request.ready_s > self._kernel.time_s:
                break
            tokens = min(left, request.todo_tokens)
            chunks.append((request, tokens))
            left -= tokens
            if left <= 0:
                break
        mixed = self._settings.mixed_chunk and bool(self.batch)
        if mixed and self._make_room():
            self.kv.take(self.batch.new_blocks(1))
        self._prefill_step(chunks, len(self.batch.members) if mixed else 0, 1.0)

    def _prefill_step(
        self, chunks: list[tuple[SimRequest, int]], batch: int, sm_share: float
    ) -> None:
        costs = [PromptChunk(tokens, r.kv_tokens - r.todo_tokens) for r, tokens in chunks]
        context_tokens = self.batch.context_tokens if batch else 0
        work_s = self.cost.step_s(costs, batch, context_tokens)
        usage = partial(self.cost.usage, costs, batch, context_tokens)
        job = Job(self._gpus, work_s * self.slower, usage, self._prefill_ended, sm_share)
        self._prefill = Flight(job, chunks, 1 if batch else 0)
        self._prefill_since_s = self._kernel.time_s
        self._compute.start(job)

    def _prefill_ended(self) -> None:
        step, self._prefill = self._prefill, None
        assert step is not None
        self._measure(sum([tokens for _, tokens in step.chunks]))
        if step.steps:
            self._advance(1)
            self._join_deferred()
        for request, tokens in step.chunks:
            request.todo_tokens -= tokens
            if request.todo_tokens == 0:
                self.prefills.remove(request)
                self.kv.keep_prompt(request)
                self._emit_token(request)
        self._usage_changed = True
        self._listener.freed()
        self.start_next()

    def _measure(self, tokens: int) -> None:
        """Updates the prefill speed that admission assumes. As in the reports of live engines, it
        includes the slowdown by other engines on the GPU."""
        seconds = self._kernel.time_s - self._prefill_since_s
        if seconds > 0:
            self.speed.add(tokens, seconds)
            self.prefill_tokens_per_s = self.speed.tokens_per_s

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

    def start_decode(self, sm_share: float = 1.0, steps_max: int = UNBOUNDED_STEPS) -> bool:
        """Starts a run of decode steps of the whole batch. Returns False if all requests had to be
        retracted. The run ends when a member ends, when memory is exhausted, on `end_run`, or after
        `steps_max` steps. REQUIRES: no decode in flight, a batch."""
        if not self._make_room():
            self.start_next()
            return False
        batch = self.batch
        steps = min(batch.steps_to_end(), self._settings.run_steps, steps_max)
        steps, blocks = self.kv.steps_that_fit(batch, steps)
        work_s = self.cost.decode_run_s(len(batch.members), batch.context_tokens, steps)
        if self._usage_changed or self._usage_of[0] != len(batch.members):
            self._usage_of = len(batch.members), batch.context_tokens
            self._usage_changed = False
        work_s *= self.slower
        job = Job(self._gpus, work_s, self._batch_usage, self._decode_ended, sm_share)
        step = self._decode = Flight(job, [], steps, batch.context_tokens, steps, blocks)
        self.kv.claim(blocks)
        self._allocate(step, 1)
        self._compute.start(job)
        return True

    def _decode_ended(self) -> None:
        step = self._decode
        assert step is not None
        if step.allocated < step.steps:
            self._allocate(step, step.steps)
        self._decode = None
        self.kv.unclaim()
        ended = self._advance(step.steps)
        self._join_deferred()
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
        self._recompute(victim)
        self._usage_changed = True
        self._listener.retracted(victim)

    def _batch_usage(self) -> GpuUsage:
        """Returns the GPU usage of the batch at the context that it had when it last changed. The
        result is therefore the same for single steps and runs."""
        return self.cost.usage((), *self._usage_of)

    def _steps_begun(self, step: Flight) -> int:
        """Returns the number of decode steps begun by now, including the present one."""
        return min(step.steps, self._steps_done(step) + 1)

    def _steps_done(self, step: Flight) -> int:
        if step.seen_s != self._kernel.time_s:
            step.seen_s = self._kernel.time_s
            size, done_s = len(self.batch.members), step.job.done_at(step.seen_s) / self.slower
            step.done = self.cost.decode_steps(size, step.context_tokens, done_s, step.steps)
        return step.done

    def _allocate(self, step: Flight, begun: int) -> None:
        """Allocates the claimed KV of the steps up to `begun` that have none yet."""
        if begun <= step.allocated:
            return
        blocks = step.blocks if begun == step.run_steps else self.batch.new_blocks(begun)
        if blocks > step.allocated_blocks:
            self.kv.take_claimed(blocks - step.allocated_blocks)
        step.allocated, step.allocated_blocks = begun, blocks

    def _end(self, request: SimRequest) -> None:
        self.running -= 1
        self._usage_changed = True
        self.kv.release(request, self._kernel.time_s)
        self._listener.ended(request)
