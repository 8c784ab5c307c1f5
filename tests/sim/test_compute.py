"""Engines that share a GPU slow each other down no more than its rates demand."""

from __future__ import annotations

import pytest

from prism_sim.core.kernel import Kernel
from prism_sim.costs.model import GpuUsage
from prism_sim.engine.compute import Compute, Gpu, Job

PREFILL, DECODE = GpuUsage(1.0, 0.2), GpuUsage(0.2, 0.8)


class Bench:
    """Starts jobs and notes when they end."""

    def __init__(self) -> None:
        self.kernel = Kernel()
        self.compute = Compute(self.kernel)
        self.ends_s: dict[str, float] = {}

    def start(
        self, name: str, gpus: list[Gpu], work_s: float, usage: GpuUsage, sm_share: float = 1.0
    ) -> Job:
        def ended() -> None:
            self.ends_s[name] = self.kernel.time_s

        job = Job(gpus, work_s, lambda: usage, ended, sm_share)
        self.compute.start(job)
        return job


def test_a_job_alone_takes_its_time() -> None:
    bench, gpu = Bench(), Gpu("gpu:0")
    bench.start("a", [gpu], 2.0, PREFILL)
    bench.kernel.run()
    assert bench.ends_s == {"a": 2.0}
    assert gpu.busy_s == 2.0
    assert gpu.jobs == []


def test_a_gpu_is_busy_with_what_has_not_ended() -> None:
    bench, gpu = Bench(), Gpu("gpu:0")
    bench.start("a", [gpu], 2.0, PREFILL)
    bench.kernel.run(1.5)
    assert gpu.busy_by(1.5) == 1.5
    bench.kernel.run()
    assert gpu.busy_by(5.0) == 2.0


def test_a_prefill_beside_a_decode_costs_little() -> None:
    bench, gpu = Bench(), Gpu("gpu:0")
    bench.start("prefill", [gpu], 1.0, PREFILL)
    bench.start("decode", [gpu], 1.0, DECODE)
    bench.kernel.run()
    assert bench.ends_s["prefill"] == pytest.approx(1.2)


def test_two_prefills_take_turns() -> None:
    bench, gpu = Bench(), Gpu("gpu:0")
    bench.start("a", [gpu], 1.0, PREFILL)
    bench.kernel.at(0.5, bench.start, "b", [gpu], 1.0, PREFILL)
    bench.kernel.run()
    # a: 0.5 alone, then 0.5 at half speed; b: 0.5 of its work by then, the rest alone
    assert bench.ends_s == {"a": pytest.approx(1.5), "b": pytest.approx(2.0)}


def test_a_tensor_parallel_job_goes_at_its_slowest_gpu() -> None:
    bench, first, second = Bench(), Gpu("gpu:0"), Gpu("gpu:1")
    bench.start("tp", [first, second], 1.0, PREFILL)
    bench.start("one", [second], 4.0, PREFILL)
    bench.kernel.run()
    assert bench.ends_s == {"tp": pytest.approx(2.0), "one": pytest.approx(5.0)}


def test_sm_shares_stretch_what_is_compute_bound() -> None:
    bench, gpu = Bench(), Gpu("gpu:0")
    bench.start("prefill", [gpu], 1.0, PREFILL, sm_share=0.5)
    bench.start("decode", [gpu], 1.0, DECODE, sm_share=0.5)
    bench.kernel.run()
    # Half of the SMs cost what is bound by compute 1.66 times its time, as MuxServe measured.
    assert bench.ends_s == {"prefill": pytest.approx(1.66), "decode": pytest.approx(1 + 0.2 * 0.66)}


def test_a_job_may_be_cut_short() -> None:
    bench, gpu = Bench(), Gpu("gpu:0")
    job = bench.start("a", [gpu], 3.0, DECODE)
    bench.kernel.at(1.0, bench.compute.resize, job, 1.5)
    bench.kernel.run()
    assert bench.ends_s == {"a": 1.5}
    assert job.done_at(1.5) == 1.5


def test_no_resource_is_used_beyond_its_rate() -> None:
    bench, gpu = Bench(), Gpu("gpu:0")
    for number in range(5):
        bench.start(f"p{number}", [gpu], 1.0 + number, PREFILL)
        bench.start(f"d{number}", [gpu], 1.0 + number, DECODE)
    work = {"compute": 15 * 1.2, "bandwidth": 15 * 1.0}
    bench.kernel.run()
    assert max(bench.ends_s.values()) >= max(work.values()) - 1e-9
