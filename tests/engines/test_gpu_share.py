"""An engine process's lease on a GPU for itself, with a driver whose answers are scripted."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from concurrent.futures import wait

import pytest

import kvcached
from kvcached import DriverMemory, ProcessMemory
from prism.config.checks.memory_needs import GpuNeeds
from prism.config.schema.cluster_config import ClusterConfig, DeviceConfig, EngineConfig
from prism.engines import gpu_share
from prism.engines.core import EngineContext
from prism.engines.gpu_share import GpuShare
from prism.engines.processes.rank_leader import _worst
from prism.engines.ranks.group import RankGroup
from prism.errors import ActivationError, EngineError
from prism.messages.gpu_memory import OutsideMemory

MIB = 1 << 20
GIB = 1 << 30
NEEDS = GpuNeeds(
    context_bytes=512 * MIB,
    code_bytes=256 * MIB,
    driver_bytes=192 * MIB,
    ranks_bytes=256 * MIB,
    torch_min_bytes=256 * MIB,
)


class ScriptedDevice:
    """A ledger on a host device that acts as a GPU's, and a driver with scripted answers.

    `answers`: one after another; the last one repeats.
    """

    def __init__(self, ledger: kvcached.Device) -> None:
        self.ledger = ledger
        self.answers: list[DriverMemory | None] = [None]
        self.asked = 0
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.clients: list[tuple[kvcached.Client, bool]] = []
        self.when_made = lambda: None

    def driver_memory(self) -> DriverMemory | None:
        assert self.may_answer.wait(60)
        self.asked += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def usage(self) -> kvcached.DeviceUsage:
        return self.ledger.usage()

    def request_room(self, missing_bytes: int, *, within_s: float) -> None:
        self.ledger.request_room(missing_bytes, within_s=within_s)

    def client(self, name: str, guard_holes: bool = False) -> kvcached.Client:
        client = self.ledger.client(name)
        self.clients.append((client, guard_holes))
        self.when_made()
        return client


@pytest.fixture
def gpu(namespace: str) -> Iterator[ScriptedDevice]:
    ledger = kvcached.Device.open(
        "host:0", capacity_bytes=8 * GIB, page_bytes=2 * MIB, namespace=namespace
    )
    gpu = ScriptedDevice(ledger)
    yield gpu
    for client, _ in gpu.clients:
        client.close()
    ledger.destroy()


def said(free_bytes: int, *processes: tuple[int, int | None]) -> DriverMemory:
    named = tuple(ProcessMemory(pid, used, "python") for pid, used in processes)
    return DriverMemory(16 * GIB, free_bytes, "nvml", named)


def context(device: str = "cuda:0", ranks: int = 1, **engine: object) -> EngineContext:
    config = ClusterConfig(
        namespace="t",
        run_dir="",
        redis_url="",
        policy="prism",
        devices=[DeviceConfig(device, 8 * GIB, 2 * MIB, 2)],
        models=[],
        engine=EngineConfig(**engine),  # type: ignore[arg-type]
    )
    return EngineContext("e0", device, config, RankGroup(0, ranks, ()))


def opened(gpu: ScriptedDevice, *answers: DriverMemory | None, **options: object) -> GpuShare:
    gpu.answers = list(answers) or [None]
    here = context(**options)  # type: ignore[arg-type]
    return GpuShare.open(here, gpu, NEEDS)[1]  # type: ignore[arg-type]


def leased(gpu: ScriptedDevice) -> int:
    return gpu.usage().static_bytes


ME = os.getpid()
OTHER = 4711


def test_the_drivers_figure_of_this_process_is_leased(gpu: ScriptedDevice) -> None:
    """Leases that figure, whatever other processes allocate meanwhile."""
    share = opened(gpu, said(9 * GIB, (OTHER, 7)), said(5 * GIB, (OTHER, 9), (ME, 530 * MIB - 5)))
    assert share.context_bytes == leased(gpu) == 530 * MIB
    assert not gpu.clients[0][1]


def test_in_a_container_the_only_process_that_came_is_this_one(gpu: ScriptedDevice) -> None:
    share = opened(gpu, said(9 * GIB, (OTHER, 7)), said(8 * GIB, (OTHER, 7), (99, 600 * MIB)))
    assert share.context_bytes == 600 * MIB
    report = share.report()
    assert report is not None
    assert (report.driver_pid, report.source) == (99, "process")


@pytest.mark.parametrize(
    ("free_after", "grown_bytes", "leased_bytes"),
    [
        (9 * GIB - 520 * MIB, 0, 520 * MIB),
        (9 * GIB - 920 * MIB, 400 * MIB, 520 * MIB),  # the ledger saw another engine map that
        (5 * GIB, 0, 512 * MIB),  # others took more than a context can be
        (9 * GIB, 0, 512 * MIB),  # others freed as much
    ],
)
def test_without_processes_what_the_device_lost_counts_if_it_can_be_a_context(
    gpu: ScriptedDevice, free_after: int, grown_bytes: int, leased_bytes: int
) -> None:
    other = gpu.ledger.client("other")
    if grown_bytes:
        tensor = other.alloc_virtual_tensor(grown_bytes)
        gpu.when_made = lambda: tensor.map(0, grown_bytes)
    share = opened(gpu, said(9 * GIB), said(free_after))
    assert share.context_bytes == leased_bytes
    other.close()


def test_two_that_came_at_once_are_not_mixed_up(gpu: ScriptedDevice) -> None:
    after = said(9 * GIB - 520 * MIB, (98, 1 * MIB), (99, 600 * MIB))
    assert opened(gpu, said(9 * GIB), after).context_bytes == 520 * MIB


def test_a_driver_that_says_nothing_means_what_is_planned(gpu: ScriptedDevice) -> None:
    share = opened(gpu)
    assert share.context_bytes == 512 * MIB
    report = share.report(lambda: 7)
    assert report is not None
    assert (report.source, report.held_bytes) == ("estimate", 512 * MIB + 7)


def test_no_context_is_made_without_room_in_the_ledger(
    gpu: ScriptedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_share, "ROOM_S", 0.05)
    holder = gpu.ledger.client("holder")
    holder.reserve_static(8 * GIB - 100 * MIB, "all")
    with pytest.raises(EngineError, match="cuda:0 does not have room for an engine's CUDA context"):
        opened(gpu)
    assert not gpu.clients
    holder.close()


def test_a_context_that_is_larger_than_the_room_left_leaves_nothing_behind(
    gpu: ScriptedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_share, "ROOM_S", 0.05)
    holder = gpu.ledger.client("holder")
    holder.reserve_static(8 * GIB - 512 * MIB, "most")
    with pytest.raises(EngineError, match="does not have room"):
        opened(gpu, said(9 * GIB), said(8 * GIB, (ME, 600 * MIB)))
    assert [client.name for client in gpu.usage().clients] == ["holder"]
    holder.close()


def test_static_is_context_graphs_and_torchs_cap(gpu: ScriptedDevice) -> None:
    """Keeps the static share free for code that is not loaded yet."""
    share = opened(gpu, said(9 * GIB), said(8 * GIB, (ME, 530 * MIB)))
    assert share.model_bytes() == 2048 * MIB - 530 * MIB
    assert share.torch_cap_bytes == 2048 * MIB - (512 + 256 + 192) * MIB


def test_ranks_keep_room_for_nccl(gpu: ScriptedDevice) -> None:
    assert opened(gpu, ranks=2).torch_cap_bytes == 2048 * MIB - (512 + 256 + 192 + 256) * MIB


def test_too_small_a_static_names_one_that_works(gpu: ScriptedDevice) -> None:
    share = opened(gpu, static_bytes=1000 * MIB)
    with pytest.raises(ActivationError) as raised:
        share.model_bytes()
    assert str(raised.value) == (
        "engine.static: 1000MiB leaves torch 40MiB after the 512MiB of this engine's CUDA"
        " context; set it to at least 1216MiB"
    )
    assert opened(gpu, static_bytes=1216 * MIB).model_bytes() == 704 * MIB


def test_what_the_first_model_left_is_leased_and_what_later_ones_add_is_not(
    gpu: ScriptedDevice,
) -> None:
    held = (530, 1100, 1100, 1400, 1000)
    share = opened(gpu, said(9 * GIB), *(said(9 * GIB, (ME, size * MIB)) for size in held))
    found = []
    for _ in held[1:]:
        share.model_bytes()
        share.settle()
        found.append(share.context_bytes // MIB)
    assert found == [1100, 1100, 1100, 1100]  # 1000 needs both leases
    assert share.torch_cap_bytes == (2048 - 1100 - 192) * MIB


def test_an_activation_that_failed_is_no_first_model(gpu: ScriptedDevice) -> None:
    held = (530, 800, 600, 1100, 1100)
    share = opened(gpu, said(9 * GIB), *(said(9 * GIB, (ME, size * MIB)) for size in held))
    found = []
    for served in (False, False, True, False):
        share.settle(served=served)
        found.append(share.context_bytes // MIB)
    assert found == [768, 768, 1100, 1100]


def test_what_stays_is_leased_as_far_as_there_is_room(
    gpu: ScriptedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases the whole when there is room again."""
    monkeypatch.setattr(gpu_share, "ROOM_S", 0.05)
    share = opened(gpu, said(9 * GIB), *(said(9 * GIB, (ME, s * MIB)) for s in (530, 1100)))
    holder = gpu.ledger.client("holder")
    holder.reserve_static(8 * GIB - 900 * MIB, "most")
    share.settle()
    assert share.context_bytes == 900 * MIB
    holder.close()
    share.settle()
    assert share.context_bytes == 1100 * MIB


def test_code_that_stays_is_leased_and_what_was_not_planned_is_not(gpu: ScriptedDevice) -> None:
    """Grows the lease after a small first model, up to the plan."""
    held = (530, 700, 1100, 540)
    answers = [said(9 * GIB, (ME, size * MIB)) for size in held]
    share = opened(gpu, said(9 * GIB), *answers)
    found = []
    for _ in held[1:]:
        share.model_bytes()
        share.settle()
        found.append(share.context_bytes // MIB)
    assert found == [700, 768, 700]  # the plan's 512 + 256 at most; 540 keeps the second lease
    assert leased(gpu) == share.context_bytes


def test_settling_gives_back_what_went(gpu: ScriptedDevice) -> None:
    share = opened(
        gpu, said(9 * GIB), *(said(9 * GIB, (ME, size * MIB)) for size in (530, 700, 530))
    )
    share.settle()
    share.settle()
    assert leased(gpu) == share.context_bytes == 530 * MIB


def test_pages_of_kv_are_no_context(gpu: ScriptedDevice) -> None:
    share = opened(gpu, said(9 * GIB), *(said(9 * GIB, (ME, s * MIB)) for s in (530, 630)))
    tensor = gpu.clients[0][0].alloc_virtual_tensor(100 * MIB)
    tensor.map(0, 100 * MIB)
    share.settle()
    assert share.context_bytes == 530 * MIB


def test_the_report_separates_torch_graphs_and_lease(gpu: ScriptedDevice) -> None:
    """Excludes weights of 1 GiB that are both in the ledger and on the device."""
    share = opened(
        gpu, said(9 * GIB), said(9 * GIB, (ME, 530 * MIB)), said(9 * GIB, (ME, 2654 * MIB))
    )
    client = gpu.clients[0][0]
    client.reserve_static(share.model_bytes(), "engine's share")
    client.reserve_static(1024 * MIB, "weights")
    report = share.report(lambda: 900 * MIB)
    assert report is not None
    assert (report.leased_bytes, report.context_bytes) == (2048 * MIB, 530 * MIB)
    assert (report.torch_bytes, report.other_bytes) == (900 * MIB, 200 * MIB)
    assert report.excess_bytes == (530 + 900 + 200 - 2048) * MIB


def test_a_share_that_was_never_leased_is_not_counted(gpu: ScriptedDevice) -> None:
    share = opened(gpu, said(9 * GIB), said(9 * GIB, (ME, 530 * MIB)))
    share.model_bytes()
    report = share.report()
    assert report is not None
    assert report.leased_bytes == 530 * MIB


def test_the_driver_is_asked_now_and_then_only(gpu: ScriptedDevice) -> None:
    gpu.answers = [said(9 * GIB), said(9 * GIB, (ME, 530 * MIB))]
    client, _ = GpuShare.open(context(), gpu, NEEDS)  # type: ignore[arg-type]
    ticks = itertools.count()
    share = GpuShare(client, context(), NEEDS, gpu.driver_memory, lambda: next(ticks) * 1.0)
    gpu.asked = 0
    torch_asked = []
    for _ in range(20):
        share.report(lambda: torch_asked.append(1) or 0)  # type: ignore[func-returns-value]
    assert 0 < gpu.asked == len(torch_asked) <= 5


def serving(gpu: ScriptedDevice, monkeypatch: pytest.MonkeyPatch) -> tuple[GpuShare, OutsideMemory]:
    """Yields a served model and the engine's report from before. Each report asks the driver."""
    monkeypatch.setattr(gpu_share, "READ_INTERVAL_S", 0.0)
    share = opened(gpu, said(9 * GIB), said(9 * GIB, (ME, 530 * MIB)))
    before = share.report()
    assert before is not None
    share.model_bytes()
    gpu.may_answer.clear()
    return share, before


def let_answer(gpu: ScriptedDevice, share: GpuShare) -> None:
    assert share._reading is not None
    gpu.may_answer.set()
    wait([share._reading], 60)


def test_a_slow_driver_stalls_no_step_of_a_model(
    gpu: ScriptedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    share, before = serving(gpu, monkeypatch)
    gpu.answers = [said(9 * GIB, (ME, 2 * GIB))]
    for _ in range(3):
        assert share.report() == before
    let_answer(gpu, share)
    after = share.report()
    assert after is not None
    assert after.held_bytes == 2 * GIB


def test_what_is_said_of_a_model_that_has_gone_is_not_reported(
    gpu: ScriptedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    share, before = serving(gpu, monkeypatch)
    gpu.answers = [said(9 * GIB, (ME, 2 * GIB)), said(9 * GIB, (ME, 530 * MIB))]
    share.report()
    let_answer(gpu, share)
    share.settle()
    assert share.report() == before


def test_pages_that_went_while_the_driver_was_asked_are_not_outside(
    gpu: ScriptedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    share, before = serving(gpu, monkeypatch)
    gpu.answers = [said(9 * GIB, (ME, 630 * MIB))]
    tensor = gpu.clients[0][0].alloc_virtual_tensor(100 * MIB)
    tensor.map(0, 100 * MIB)
    share.report()
    tensor.unmap(0, 100 * MIB)
    let_answer(gpu, share)
    assert share.report() == before


def test_under_mps_holes_are_guarded(gpu: ScriptedDevice) -> None:
    opened(gpu, mps=True)
    assert gpu.clients[0][1]


def test_a_spread_engine_reports_its_worst_rank_under_its_own_number() -> None:
    own = OutsideMemory(leased_bytes=10, context_bytes=9, driver_pid=1)
    other = OutsideMemory(leased_bytes=10, context_bytes=9, other_bytes=5, driver_pid=2)
    worst = _worst(own, [own, other])
    assert worst is not None
    assert (worst.excess_bytes, worst.driver_pid) == (4, 1)
    assert _worst(None, []) is None


def test_a_host_device_is_as_it_was(gpu: ScriptedDevice) -> None:
    share = opened(gpu, device="host:0")
    assert (share.context_bytes, leased(gpu), gpu.asked) == (0, 0, 0)
    assert share.model_bytes() == EngineConfig().static_on("host:0") == 16 * MIB
    assert (share.torch_cap_bytes, share.report()) == (0, None)
    share.settle()
    assert leased(gpu) == 0
