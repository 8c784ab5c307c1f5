"""Run of decode steps of an engine's batch: one event for many steps, with the same results."""

from __future__ import annotations

from collections.abc import Callable

from prism_sim.costs.model import CostModel, GpuUsage
from prism_sim.engine.batch import Batch
from prism_sim.engine.compute import Compute, Gpu, Job
from prism_sim.engine.kv import KvSpace


class DecodeRun:
    """Run of decode steps in flight, of which an engine has at most one. Implements `KvRunner`:
    a step takes its KV when it begins, and the ledgers learn of it by `sync` or `catch_up`.

    Args:
        slower: Factor on the time of every step.
        on_end: Called when the last step ends; calls `finish`.
    """

    def __init__(
        self,
        compute: Compute,
        gpus: list[Gpu],
        *,
        cost: CostModel,
        kv: KvSpace,
        batch: Batch,
        slower: float,
        on_end: Callable[[], None],
    ) -> None:
        self._kernel = compute.kernel
        self._compute = compute
        self._gpus = gpus
        self._cost = cost
        self._kv = kv
        self._batch = batch
        self._slower = slower
        self._on_end = on_end
        # None if no run is in flight.
        self.job: Job | None = None
        # Number of decode steps in the run.
        self.steps = 0
        self._context_tokens = 0
        # Number of decode steps planned at the start of the run, and the KV blocks that they take.
        self._planned, self._planned_blocks = 0, 0
        # Number of steps whose KV is allocated, and the KV blocks of these.
        self._allocated, self._allocated_blocks = 0, 0
        # Number of steps completed at _seen_s.
        self._done, self._seen_s = 0, -1.0
        # Batch size and context tokens for the usage of the job.
        self._usage_of = (0, 0)
        # True after a change of the batch.
        self.usage_changed = True

    def start(self, steps_max: int, sm_share: float = 1.0) -> None:
        """Starts a run, which ends when a member ends, when memory is exhausted, on `end_run`, or
        after `steps_max` steps. REQUIRES: none in flight, a batch, memory for its next step."""
        batch = self._batch
        steps, blocks = self._kv.steps_that_fit(batch, min(batch.steps_to_end(), steps_max))
        size, context_tokens = len(batch.members), batch.context_tokens
        work_s = self._cost.decode_run_s(size, context_tokens, steps)
        if self.usage_changed or self._usage_of[0] != size:
            self._usage_of, self.usage_changed = (size, context_tokens), False
        job = Job(self._gpus, work_s * self._slower, self._usage, self._on_end, sm_share)
        self.job, self.steps, self._context_tokens = job, steps, context_tokens
        self._planned, self._planned_blocks = steps, blocks
        self._allocated = self._allocated_blocks = 0
        self._seen_s = -1.0
        self._kv.claim(blocks)
        self._allocate(1)
        self._compute.start(job)

    def finish(self) -> int:
        """Allocates the KV of all steps. Returns their number, by which the batch advances."""
        if self._allocated < self.steps:
            self._allocate(self.steps)
        self.job = None
        self._kv.unclaim()
        return self.steps

    def end_run(self) -> None:
        """Ends the run with its present step and releases its claim on memory."""
        if self.job is None or self.steps == 1:
            return
        begun = self._begun()
        self._allocate(begun)
        if begun < self.steps:
            self.steps = begun
            size = len(self._batch.members)
            work_s = self._cost.decode_run_s(size, self._context_tokens, begun)
            self._compute.resize(self.job, work_s * self._slower)
        self._kv.unclaim()

    def sync(self) -> None:
        """Updates the ledgers to the steps begun by now. A run that ends within the held quanta
        needs no update."""
        left_blocks = self._planned_blocks - self._allocated_blocks
        if self.job is not None and not self._kv.holds(left_blocks):
            self.catch_up()

    def catch_up(self) -> None:
        """Updates KV memory to the steps begun by now, block by block."""
        if self.job is not None and self._allocated < self.steps:
            self._allocate(self._begun())

    def done(self) -> int:
        """Returns the number of decode steps completed by now. REQUIRES: a run is in flight."""
        if self._seen_s != self._kernel.time_s:
            assert self.job is not None
            self._seen_s = self._kernel.time_s
            size, done_s = len(self._batch.members), self.job.done_at(self._seen_s) / self._slower
            self._done = self._cost.decode_steps(size, self._context_tokens, done_s, self.steps)
        return self._done

    def _begun(self) -> int:
        """Returns the number of decode steps begun by now, including the present one."""
        return min(self.steps, self.done() + 1)

    def _allocate(self, begun: int) -> None:
        """Allocates the claimed KV of the steps up to `begun` that have none yet."""
        if begun <= self._allocated:
            return
        planned = begun == self._planned
        blocks = self._planned_blocks if planned else self._batch.new_blocks(begun)
        if blocks > self._allocated_blocks:
            self._kv.take_claimed(blocks - self._allocated_blocks)
        self._allocated, self._allocated_blocks = begun, blocks

    def _usage(self) -> GpuUsage:
        """Returns the GPU usage of the batch at the context that it had when it last changed. The
        result is therefore the same for single steps and runs."""
        return self._cost.usage((), *self._usage_of)
