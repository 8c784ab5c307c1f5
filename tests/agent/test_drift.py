"""Comparison of a driver's memory report with the ledger."""

from __future__ import annotations

from kvcached import ClientUsage, DeviceUsage, DriverMemory, ProcessMemory
from prism.agent.engines.overdraft import MemoryComparison, compare
from prism.messages.gpu_memory import ForeignProcess

GIB = 1 << 30


def client(pid: int, committed: int, static: int, name: str = "e") -> ClientUsage:
    return ClientUsage(
        name=name,
        pid=pid,
        reserved_bytes=committed,
        committed_bytes=committed,
        static_bytes=static,
        min_bytes=0,
        limit_bytes=None,
        maps=0,
        unmaps=0,
    )


def usage(*clients: ClientUsage, capacity: int = 100) -> DeviceUsage:
    committed = sum(c.committed_bytes for c in clients)
    static = sum(c.static_bytes for c in clients)
    return DeviceUsage(
        capacity_bytes=capacity,
        page_bytes=1,
        reserved_bytes=committed + static,
        committed_bytes=committed,
        static_bytes=static,
        free_bytes=capacity - committed - static,
        clients=clients,
    )


def driver(free: int, *processes: tuple[int, int | None], total: int = 120) -> DriverMemory:
    named = tuple(ProcessMemory(pid, used, f"p{pid}") for pid, used in processes)
    return DriverMemory(total, free, "nvml", named)


def of(found: MemoryComparison) -> tuple[int, int, int]:
    return found.memory.drift_bytes, found.memory.short_bytes, found.memory.foreign_bytes


def test_leased_and_not_used_is_no_drift() -> None:
    found = compare(usage(client(1, 20, 30)), driver(80, (1, 40)), ledger_pids={})
    assert (dict(found.excess_bytes), of(found)) == ({1: -10}, (0, 0, 0))


def test_a_processs_clients_count_together() -> None:
    """Sums two records of one process: an engine, and memory that it lends to other loads."""
    both = usage(client(1, 20, 30), client(1, 5, 0, "e.links"), client(2, 0, 10, "other"))
    found = compare(both, driver(50, (1, 60), (2, 10)), ledger_pids={})
    assert (dict(found.excess_bytes), of(found)) == ({1: 5, 2: 0}, (5, 0, 0))


def test_one_that_holds_too_much_is_seen_beside_one_that_holds_less() -> None:
    both = usage(client(1, 20, 30), client(2, 0, 30))
    found = compare(both, driver(20, (1, 60), (2, 20)), ledger_pids={})
    assert (dict(found.excess_bytes), of(found)) == ({1: 10, 2: -10}, (10, 0, 0))


def test_nobody_is_foreign_while_a_process_of_the_ledger_is_not_found() -> None:
    """Covers containers, where the pids of second ranks and of fresh engines are not known."""
    both = usage(client(1, 20, 30), client(2, 0, 30))
    found = compare(both, driver(20, (77001, 60), (77002, 20)), ledger_pids={77001: 1})
    assert (dict(found.excess_bytes), of(found)) == ({1: 10}, (10, 0, 0))


def test_ranks_and_links_of_the_cluster_are_not_foreign() -> None:
    """Covers engines of another device, whose pids no engine here reports."""
    all_ = usage(client(1, 20, 30), client(2, 0, 30, "e.1"), client(3, 0, 0, "e.links"))
    found = compare(all_, driver(20, (1, 50), (2, 30), (3, 4), (9, 7)), ledger_pids={1: 1})
    assert found.memory.foreign == (ForeignProcess(9, 7, "p9"),)


def test_other_processes_are_foreign_and_no_drift() -> None:
    found = compare(usage(client(1, 20, 30)), driver(3, (1, 50), (9, 67)), ledger_pids={})
    assert of(found) == (0, 47, 67)
    assert found.memory.foreign == (ForeignProcess(9, 67, "p9"),)


def test_what_the_ledger_promises_must_be_there() -> None:
    """Grants 50 of 100, so 50 may still come; the driver has 49, 50 or 51 free."""
    for free, short in ((49, 1), (50, 0), (51, 0)):
        assert of(compare(usage(client(1, 20, 30)), driver(free, (1, 50)), ledger_pids={}))[1] == (
            short
        )


def test_a_containers_numbers_are_translated() -> None:
    found = compare(usage(client(1, 20, 30)), driver(50, (77001, 60)), ledger_pids={77001: 1})
    assert (dict(found.excess_bytes), of(found)) == ({1: 10}, (10, 0, 0))


def test_numbers_of_another_namespace_make_nobody_foreign() -> None:
    """Uses the device's total then, less the memory used before any engine started."""
    found = compare(
        usage(client(1, 20, 30)),
        driver(60, (77001, 50)),
        ledger_pids={},
        baseline_bytes=4,
    )
    assert (dict(found.excess_bytes), of(found)) == ({}, (120 - 60 - 4 - 50, 0, 0))


def test_a_driver_that_names_processes_and_no_sizes() -> None:
    found = compare(usage(client(1, 20, 30)), driver(60, (1, None), (9, None)), ledger_pids={})
    assert dict(found.excess_bytes) == {}
    assert found.memory.foreign == (ForeignProcess(9, 0, "p9"),)


def test_on_an_empty_ledger_all_processes_are_foreign() -> None:
    found = compare(usage(), driver(20, (9, 100)), ledger_pids={})
    assert of(found) == (0, 80, 100)
