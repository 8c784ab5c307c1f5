"""A simulated engine: continuous batching, chunked prefill, paged KV, retraction when memory ends.

It behaves like the live engines: whole prompts are given KV when they are admitted, prefill goes
before decode, a request that lacks memory for its next token sends the newest member of the batch
back (retract and recompute). Runs of equal decode steps are one event: `run_steps` says how many
at most, and 1 is the step-by-step mode, which gives the same results to rounding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from prism.models.prefill_speed import Speed
from prism.policies.steps import Phase
from prism_sim.core.request import Listener, SimRequest
from prism_sim.core.setup import UNBOUNDED_STEPS, EngineSettings
from prism_sim.costs.model import CostModel, GpuUsage, PromptChunk
from prism_sim.engine.batch import Batch, Flight
from prism_sim.engine.compute import Compute, Gpu, Job
from prism_sim.engine.kv import KvSpace


class SimEngine:
    """One active model on one GPU or tensor-parallel group.

    `prefills`: admitted requests without their next token, oldest first. `retracted`: requests that
    wait for memory to come back. running: all requests that it holds. slower: factor on the time of
    every step. submit_s: from an admission until the engine knows of it.
    """

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
        self.prefills: deque[SimRequest] = deque()
        self.retracted: deque[SimRequest] = deque()
        self._joining: list[SimRequest] = []
        self._prefill_since_s = 0.0
        self._prefill: Flight | None = None
        self._decode: Flight | None = None
        self.leaving = False
        self._rested: Callable[[], None] | None = None
        self._usage_of = (0, 0)
        self._usage_changed = True
        self.running = 0
        self.slower = 1.0
        self.submit_s = 0.0
        self.speed = Speed()
        self.prompt_tokens_total = 0
        self.output_tokens_total = 0
        self.prefill_tokens_per_s = settings.prefill_chunk_tokens / cost.prefill_s(
            settings.prefill_chunk_tokens
        )
        kv.runner = self

    # --- what others see --------------------------------------------------------------------

    @property
    def busy(self) -> frozenset[Phase]:
        """Phases with a job in flight."""
        found = ((Phase.PREFILL, self._prefill), (Phase.DECODE, self._decode))
        return frozenset(phase for phase, step in found if step is not None)

    def pending_prefill_s(self) -> float:
        """Of the prompts that it has admitted, by the speed measured so far. One that is half done
        counts whole, as in the live system, where an agent hears of it with its first token."""
        return sum([request.kv_tokens for request in self.prefills]) / self.prefill_tokens_per_s

    def sync(self) -> None:
        """Bring the ledgers up to the steps that have begun by now. A run that ends within the
        quanta that it holds changes nothing there."""
        step = self._decode
        if step is not None and not self.kv.holds(step.blocks - step.allocated_blocks):
            self.catch_up()

    def catch_up(self) -> None:
        """Bring KV memory up to the steps that have begun by now, block by block."""
        step = self._decode
        if step is not None and step.allocated < step.steps:
            self._allocate(step, self._begun(step))

    def output_tokens(self) -> int:
        """Tokens given out since the start."""
        done = self._steps_done(self._decode) if self._decode is not None else 0
        return self.output_tokens_total + done * len(self.batch.members)

    def requests(self) -> list[SimRequest]:
        """All that it holds."""
        return [*self.batch.members.values(), *self._joining, *self.prefills, *self.retracted]

    # --- orders -----------------------------------------------------------------------------

    def admit(self, requests: Iterable[SimRequest]) -> None:
        """Take requests whose KV fits; `turn` starts them. One that does not fit after all waits
        for memory like a retracted one."""
        # what the run in flight has begun is taken before others take its claim
        if self.submit_s > 0:
            self.catch_up()
        else:
            self.end_run()
        for request in requests:
            self.running += 1
            request.ready_s = self._kernel.time_s + self.submit_s
            if request.started_s < 0:  # else it comes from a copy that is gone
                request.started_s = self._kernel.time_s
                self.prompt_tokens_total += request.prompt_tokens
            if self.kv.hold(request, self._kernel.time_s):
                self.prefills.append(request)
            else:
                self._starve(request)
        if self.submit_s > 0:
            self._kernel.after(self.submit_s, self._came)

    def turn(self) -> None:
        """Start what is to run next, if nothing runs. Called after every change."""
        if self._prefill is not None or self._decode is not None:
            return
        if self.leaving:
            self._rest()
        elif self.prefills and self.prefills[0].ready_s <= self._kernel.time_s:
            self.start_prefill()
        elif self.batch.members:
            self.start_decode()

    def _came(self) -> None:
        self.end_run()
        self.turn()

    def end_run(self) -> None:
        """The decode run in flight ends with its present step; its claim on memory lapses."""
        step = self._decode
        if step is None or step.steps == 1:
            return
        begun = self._begun(step)
        self._allocate(step, begun)
        if begun < step.steps:
            step.steps = begun
            work_s = self.cost.decode_run_s(len(self.batch.members), step.context_tokens, begun)
            self._compute.resize(step.job, work_s * self.slower)
        self.kv.unclaim()

    def readmit(self) -> None:
        """Retracted requests come back while there is room, oldest first."""
        self.catch_up()
        came = False
        while self.retracted and not self.leaving:
            request = self.retracted[0]
            left = request.output_tokens - request.generated
            headroom = min(left, self._settings.headroom_tokens) if self.running > 1 else 1
            spare = self.kv.blocks(request.kv_tokens + headroom) + len(self.batch.members)
            spare -= self.kv.blocks(request.kv_tokens)
            if not self.kv.hold(request, self._kernel.time_s, spare):
                break
            self.prefills.append(self.retracted.popleft())
            came = True
        if not self.retracted:
            self.kv.sites[0].starved.discard(self)
        if came:
            self.end_run()

    def _recompute(self, request: SimRequest) -> None:
        """Its KV is gone: it waits for memory to compute all of it again."""
        request.forget_kv()
        self._starve(request)

    def _starve(self, request: SimRequest) -> None:
        self.retracted.append(request)
        self.kv.sites[0].starved.add(self)

    # --- moving -----------------------------------------------------------------------------

    def leave(self, rested: Callable[[], None]) -> None:
        """Start nothing more; `rested` is called once nothing is in flight. Then `release`."""
        self.leaving, self._rested = True, rested
        self.end_run()
        self.turn()

    def _rest(self) -> None:
        if self._rested is not None:
            self._kernel.after(0.0, self._rested)
            self._rested = None

    def release(self) -> list[SimRequest]:
        """All requests leave, with the KV computed so far, and their memory is free. REQUIRES:
        nothing is in flight."""
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
        """Of another engine, with their KV where there is memory for it; else they are computed
        again when there is. `turn` starts them."""
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
                self._continue(request)
        self.prefills.extendleft(reversed(prefills))

    def _continue(self, request: SimRequest) -> None:
        """Its prompt is computed: the next step of the batch is its next as well."""
        if self._decode is None and (self._prefill is None or not self._prefill.steps):
            self.batch.join(request)
        else:
            self._joining.append(request)
            self.end_run()

    def _let_join(self) -> None:
        for request in self._joining:
            self.batch.join(request)
        self._joining.clear()

    # --- prefill ----------------------------------------------------------------------------

    def start_prefill(self) -> None:
        """One step of the oldest prompts. REQUIRES: the first may start, and nothing in flight."""
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
            self._let_join()
        for request, tokens in step.chunks:
            request.todo_tokens -= tokens
            if request.todo_tokens == 0:
                self.prefills.remove(request)
                self.kv.keep_prompt(request)
                self._token_came(request)
        self._usage_changed = True
        self._listener.freed()
        self.turn()

    def _measure(self, tokens: int) -> None:
        """The prefill speed that admission reckons with, as the live engines report it: it includes
        what neighbours on the GPU cost."""
        seconds = self._kernel.time_s - self._prefill_since_s
        if seconds > 0:
            self.speed.add(tokens, seconds)
            self.prefill_tokens_per_s = self.speed.tokens_per_s

    def _token_came(self, request: SimRequest) -> None:
        request.generated += 1
        self.output_tokens_total += 1
        if request.first_s < 0:
            request.first_s = self._kernel.time_s
        if request.generated >= request.output_tokens:
            self._end(request)
        else:
            self._continue(request)

    # --- decode -----------------------------------------------------------------------------

    def start_decode(self, sm_share: float = 1.0, steps_max: int = UNBOUNDED_STEPS) -> bool:
        """A run of decode steps of the whole batch: until a member ends, memory ends, `end_run`
        is called, or `steps_max`. False: all requests had to be retracted.
        REQUIRES: no decode in flight, a batch."""
        if not self._make_room():
            self.turn()
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
        self._let_join()
        if ended:
            self._listener.freed()
        self.turn()

    def _advance(self, steps: int) -> bool:
        """`steps` decode steps are over. True: a request ended."""
        self.output_tokens_total += steps * len(self.batch.members)
        ended = self.batch.advance(steps)
        for request in ended:
            self._end(request)
        return bool(ended)

    def _make_room(self) -> bool:
        """Retract until the next step of the batch fits. False: no member is left."""
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
        """Of the batch in flight, at the context it had when it last changed: the same whether its
        steps are taken one by one or in runs."""
        return self.cost.usage((), *self._usage_of)

    def _begun(self, step: Flight) -> int:
        """Decode steps that have begun by now, the present one included."""
        return min(step.steps, self._steps_done(step) + 1)

    def _steps_done(self, step: Flight) -> int:
        if step.seen_s != self._kernel.time_s:
            step.seen_s = self._kernel.time_s
            size, done_s = len(self.batch.members), step.job.done_at(step.seen_s) / self.slower
            step.done = self.cost.decode_steps(size, step.context_tokens, done_s, step.steps)
        return step.done

    def _allocate(self, step: Flight, begun: int) -> None:
        """KV for the steps up to `begun`, which were claimed, as far as it was not taken before."""
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
