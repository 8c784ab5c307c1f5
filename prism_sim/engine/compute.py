"""GPU compute shared between co-located engines (Prism §7.1: MPS at 100 %).

A job is a step, or a run of steps, of one engine on the GPUs of its tensor-parallel group. It uses
a part of each GPU's compute and of its memory bandwidth. Jobs run at full speed while neither is
overcommitted. Otherwise all jobs of a GPU slow down by the same factor, so that the scarcer
resource is fully used: a prefill (compute-bound) and a decode (bandwidth-bound) hardly slow each
other down, two prefills each run at half speed. A tensor-parallel job runs at the speed of its
slowest GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prism_sim.core.kernel import Kernel
from prism_sim.costs.model import GpuUsage, slowdown


class Gpu:
    """Compute of one GPU."""

    __slots__ = ("busy_s", "jobs", "name", "since_s", "speed")

    def __init__(self, name: str) -> None:
        self.name = name
        self.jobs: list[Job] = []
        # Relative speed of its jobs; 1 while no resource is overcommitted.
        self.speed = 1.0
        self.busy_s = 0.0
        self.since_s = 0.0

    def busy_by(self, now_s: float) -> float:
        """Returns the seconds up to now in which a job ran. busy_s lacks the present busy time."""
        return self.busy_s + (now_s - self.since_s if self.jobs else 0.0)

    def sm_held(self) -> float:
        return sum(job.sm_share for job in self.jobs)


class Job:
    """Step, or run of steps, of one engine.

    Args:
        work_s: Seconds that the job takes alone.
        usage: Called only when needed: next to another job, or with an SM share.
    """

    __slots__ = (
        "_usage",
        "_usage_of_step",
        "done_s",
        "gpus",
        "on_end",
        "since_s",
        "sm_share",
        "speed",
        "stretch",
        "version",
        "work_s",
    )

    def __init__(
        self,
        gpus: Sequence[Gpu],
        work_s: float,
        usage: Callable[[], GpuUsage],
        on_end: Callable[[], None],
        sm_share: float = 1.0,
    ) -> None:
        self.gpus = gpus
        self.sm_share = sm_share
        self._usage_of_step = usage
        self._usage: GpuUsage | None = None
        # Factor on work_s due to the SM share.
        self.stretch = slowdown(usage(), sm_share) if sm_share < 1.0 else 1.0
        self.work_s = work_s * self.stretch
        self.on_end = on_end
        self.speed = 0.0
        # Seconds of work_s completed at since_s.
        self.done_s = 0.0
        self.since_s = 0.0
        self.version = 0

    @property
    def usage(self) -> GpuUsage:
        """Parts of the GPU's compute and bandwidth that the job uses at full speed."""
        if self._usage is None:
            found = self._usage_of_step()
            self._usage = GpuUsage(found.compute / self.stretch, found.bandwidth / self.stretch)
        return self._usage

    def done_at(self, now_s: float) -> float:
        """Returns the seconds of unstretched work completed by `now_s`."""
        return (self.done_s + (now_s - self.since_s) * self.speed) / self.stretch


class Compute:
    """Starts jobs and calls their `on_end`. A change costs O(jobs of the affected GPUs)."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def start(self, job: Job) -> None:
        now_s = job.since_s = self.kernel.time_s
        first = job.gpus[0]
        if len(job.gpus) == 1 and not first.jobs and first.speed == 1.0:
            first.since_s, job.speed = now_s, 1.0
            first.jobs.append(job)
            self._schedule(job)
            return
        for gpu in job.gpus:
            if not gpu.jobs:
                gpu.since_s = now_s
            gpu.jobs.append(job)
        self._adapt(job.gpus, job)

    def resize(self, job: Job, work_s: float) -> None:
        """Changes the job's work to `work_s` seconds alone."""
        job.work_s = work_s * job.stretch
        self._settle(job)
        self._schedule(job)

    def _finish(self, job: Job, version: int) -> None:
        if version != job.version:
            return
        job.version = -1
        now_s = self.kernel.time_s
        for gpu in job.gpus:
            gpu.jobs.remove(job)
            if not gpu.jobs:
                gpu.busy_s += now_s - gpu.since_s
        first = job.gpus[0]
        if len(job.gpus) > 1 or first.jobs or first.speed != 1.0:  # else no speed changes
            self._adapt(job.gpus, None)
        job.on_end()

    def _adapt(self, gpus: Sequence[Gpu], started: Job | None) -> None:
        """Updates the speeds of `gpus` and of their jobs after a job started or ended."""
        for gpu in gpus:
            speed = _speed(gpu.jobs)
            if speed != gpu.speed:
                gpu.speed = speed
                for job in gpu.jobs:
                    if job is not started:
                        self._respeed(job)
        if started is not None:
            self._respeed(started)

    def _respeed(self, job: Job) -> None:
        speed = job.gpus[0].speed if len(job.gpus) == 1 else min(gpu.speed for gpu in job.gpus)
        if speed != job.speed:
            self._settle(job)
            job.speed = speed
            self._schedule(job)

    def _settle(self, job: Job) -> None:
        now_s = self.kernel.time_s
        job.done_s += (now_s - job.since_s) * job.speed
        job.since_s = now_s

    def _schedule(self, job: Job) -> None:
        job.version += 1
        left_s = max(0.0, job.work_s - job.done_s)
        self.kernel.after(left_s / job.speed, self._finish, job, job.version)


def _speed(jobs: Sequence[Job]) -> float:
    if len(jobs) < 2:
        return 1.0
    compute = bandwidth = 0.0
    for job in jobs:
        usage = job.usage
        compute += usage.compute
        bandwidth += usage.bandwidth
    return 1.0 / max(1.0, compute, bandwidth)
