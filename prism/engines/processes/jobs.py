"""Jobs of a controlled engine: steps of requests that the agent names, while all others are paused.

Built on `EngineCore.pause` and `resume`, so every adapter has it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from prism.engines.core import EngineCore, StepOutput
from prism.messages.engine import JobEnded, Phase, StartJob

STALLS_MAX = 3
"""Number of steps in a row that compute nothing after which a job ends for lack of memory."""


@dataclass(slots=True)
class Job:
    """Job that has not ended."""

    phase: Phase
    # Requests to step: in a prefill those without their next token.
    left: dict[str, None]
    # Decode steps left; 0: until the run ends.
    steps_left: int = 0
    ends: bool = False
    seconds: float = 0.0
    steps: int = 0
    stalls: int = 0
    # Prompt tokens that were not computed after the last stalled step.
    pending_tokens: int = -1


@dataclass(slots=True)
class Jobs:
    """Jobs of one engine, at most one of each phase. A prefill goes first.

    Args:
        core: pauses and resumes requests. The worker pauses new ones.
        send: sends the ends of jobs.
    """

    core: EngineCore
    send: Callable[[JobEnded], None]
    _jobs: dict[Phase, Job] = field(default_factory=dict)
    # Requests that are not paused.
    _resumed: dict[str, None] = field(default_factory=dict)

    @property
    def present(self) -> Job | None:
        return self._jobs.get("prefill") or self._jobs.get("decode")

    def start(self, order: StartJob, known: Collection[str]) -> None:
        """Starts a job with those of its requests that are `known`, in place of one of its phase.
        Without any it ends at once."""
        left = dict.fromkeys(i for i in order.request_ids if i in known)
        job = self._jobs[order.phase] = Job(order.phase, left, order.steps)
        if not left:
            self._end(job)

    def end_run(self) -> None:
        """Ends the decode job, after its first step if it has not run yet. Call between steps."""
        if (job := self._jobs.get("decode")) is not None:
            job.ends = True
            if job.steps or job is not self.present:
                self._end(job)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Removes requests that left the engine. Ends jobs without any others."""
        for each in request_ids:
            self._resumed.pop(each, None)
            for job in self._jobs.values():
                job.left.pop(each, None)
        for job in [job for job in self._jobs.values() if not job.left]:
            self._end(job)

    def clear(self) -> None:
        """Forgets jobs and requests of a model that leaves."""
        self._jobs.clear()
        self._resumed.clear()

    def prepare(self) -> None:
        """Pauses and resumes requests so that the next step is one of the present job."""
        job = self.present
        wanted = job.left if job is not None else {}
        if wanted.keys() == self._resumed.keys():
            return
        self.core.pause([i for i in self._resumed if i not in wanted])
        self.core.resume([i for i in wanted if i not in self._resumed])
        self._resumed = dict(wanted)

    def stepped(self, output: StepOutput, seconds: float, *, stalled: bool) -> None:
        """Counts a step. Ends the present job if it was its last one."""
        job = self.present
        if job is not None:
            job.seconds += seconds
            job.steps += 1
            job.stalls = job.stalls + 1 if stalled and not self._progressed(job) else 0
            if job.phase == "prefill":
                for chunk in output.chunks:
                    job.left.pop(chunk.request_id, None)
            elif output.chunks and job.steps_left:
                job.steps_left -= 1
                job.ends |= job.steps_left == 0
            if job.ends or job.stalls >= STALLS_MAX:
                self._end(job)
        ended = [chunk.request_id for chunk in output.chunks if chunk.finish_reason is not None]
        self.forget([*ended, *(failure.request_id for failure in output.failures)])

    def _progressed(self, job: Job) -> bool:
        """Returns whether the step computed a part of a prompt."""
        before, job.pending_tokens = job.pending_tokens, self.core.status().pending_prefill_tokens
        return job.pending_tokens != before

    def _end(self, job: Job) -> None:
        del self._jobs[job.phase]
        lacks_memory = job.stalls >= STALLS_MAX
        self.send(JobEnded(job.phase, job.seconds, job.steps, lacks_memory))
