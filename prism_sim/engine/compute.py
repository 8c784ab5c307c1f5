"""GPU compute shared between co-located engines (Prism §7.1: MPS at 100 %).

A job is a step, or a run of steps, of one engine on the GPUs of its tensor-parallel group. It uses
a part of each GPU's compute and of its memory bandwidth. Jobs run at full speed while neither is
overcommitted; beyond that all jobs of a GPU slow down by the same factor, so that the scarcer
resource is just used up: a prefill (compute-bound) beside a decode (bandwidth-bound) hardly costs
either, two prefills take turns. A tensor-parallel job goes at the speed of its slowest GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prism_sim.core.kernel import Kernel
from prism_sim.costs.model import GpuUsage, slowdown


class Gpu:
    """One GPU's compute."""

    __slots__ = ("busy_s", "jobs", "name", "since_s", "speed")

    def __init__(self, name: str) -> None:
        self.name = name
        self.jobs: list[Job] = []
        # Of the jobs that run there, 1 while nothing is overcommitted.
        self.speed = 1.0
        self.busy_s = 0.0
        self.since_s = 0.0

    def busy_by(self, now_s: float) -> float:
        """Seconds for which some job ran, up to now; busy_s knows only stretches that ended."""
        return self.busy_s + (now_s - self.since_s if self.jobs else 0.0)

    def sm_held(self) -> float:
        return sum(job.sm_share for job in self.jobs)


class Job:
    """work_s: seconds that it takes alone. usage: asked for only when it matters: beside another
    job, or with an SM share."""

    __slots__ = (
        "_asked",
        "_usage",
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
        self._asked = usage
        self._usage: GpuUsage | None = None
        self.stretch = slowdown(usage(), sm_share) if sm_share < 1.0 else 1.0
        self.work_s = work_s * self.stretch
        self.on_end = on_end
        self.speed = 0.0
        # Seconds of work_s that are done at since_s.
        self.done_s = 0.0
        self.since_s = 0.0
        self.version = 0

    @property
    def usage(self) -> GpuUsage:
        """Parts of the GPU's compute and bandwidth that it keeps busy at full speed."""
        if self._usage is None:
            found = self._asked()
            self._usage = GpuUsage(found.compute / self.stretch, found.bandwidth / self.stretch)
        return self._usage

    def done_at(self, now_s: float) -> float:
        """Seconds of unstretched work done by `now_s`."""
        return (self.done_s + (now_s - self.since_s) * self.speed) / self.stretch


class Compute:
    """Starts jobs and calls their `on_end`. Cost per change: the jobs of the GPUs concerned."""

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
        """The job takes `work_s` alone instead of what it was started with."""
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
        if len(job.gpus) > 1 or first.jobs or first.speed != 1.0:  # else nobody's speed changes
            self._adapt(job.gpus, None)
        job.on_end()

    def _adapt(self, gpus: Sequence[Gpu], started: Job | None) -> None:
        """Speeds of `gpus` and of their jobs, after a job came or went."""
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
