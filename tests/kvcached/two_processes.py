"""Two processes with two pools each on one device, compared with a dict model.

two_processes.py DEVICE SEED EXAMPLES: that many examples of STEPS steps, by Hypothesis.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvcached import Device

from .libcuda import LibCuda
from .pools import BLOCKS, PAGE, PER_SLAB, SLAB, serve

CAPACITY = 40 * SLAB
STEPS = 100
# Hypothesis keeps every example of a run, and each fork copies the memory of this process.
EXAMPLES_AT_ONCE = 200
POOLS = [(process, pool) for process in range(2) for pool in range(2)]
pools = st.sampled_from(POOLS)


@dataclass
class Model:
    """Expected state of a pool."""

    live: set[int] = field(default_factory=set)
    freed: set[int] = field(default_factory=set)
    static_bytes: int = 0
    min_bytes: int = 0
    limit_bytes: int | None = None
    tiers: bool = False  # whether it may keep memory that no block uses

    def used_bytes(self) -> int:
        return len({block // PER_SLAB for block in self.live} | {0}) * SLAB


class Process:
    def __init__(self, device: Device, index: int, libcuda: LibCuda | None) -> None:
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self.child(device, [f"{index}-{pool}" for pool in range(2)], libcuda, theirs)
        theirs.close()
        self.line = ours.makefile("rw")
        ours.close()
        self.models = [Model(), Model()]
        self.ask(0, "state"), self.ask(1, "state")

    @staticmethod
    def child(
        device: Device, names: list[str], libcuda: LibCuda | None, line: socket.socket
    ) -> None:
        outcome = 1
        try:
            serve(device, names, libcuda, line)
            outcome = 0
        finally:
            if outcome:
                traceback.print_exc()
            os._exit(outcome)

    def ask(self, pool: int, call: str, **arguments: Any) -> Any:
        self.line.write(json.dumps({"pool": pool, "call": call, **arguments}) + "\n")
        self.line.flush()
        answer = self.line.readline()
        assert answer, f"the process failed in {call} {arguments}"
        return json.loads(answer)

    def end(self, how: int | None) -> int:
        if how is not None:
            os.kill(self.pid, how)
        else:
            self.line.write("\n")
            self.line.flush()
        self.line.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class TwoProcesses(RuleBasedStateMachine):
    DEVICE = "host:0"
    LIBCUDA: LibCuda | None = None
    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.namespace = f"two-{uuid4().hex[:10]}"
        self.device = Device.open(
            self.DEVICE, capacity_bytes=CAPACITY, page_bytes=PAGE, namespace=self.namespace
        )
        self.processes = [Process(self.device, index, self.LIBCUDA) for index in range(2)]
        self.tag = 0

    def at(self, pool: tuple[int, int]) -> tuple[Process, int, Model]:
        process = self.processes[pool[0]]
        return process, pool[1], process.models[pool[1]]

    def took(self, model: Model, ids: list[int]) -> None:
        assert not model.live & set(ids)
        assert all(0 < block < BLOCKS for block in ids)
        model.live |= set(ids)
        model.freed -= set(ids)

    @rule(pool=pools, count=st.integers(0, BLOCKS))
    def alloc(self, pool: tuple[int, int], count: int) -> None:
        process, index, model = self.at(pool)
        self.tag += 1
        granted = process.ask(index, "state")["available"] >= count
        ids = process.ask(index, "alloc", count=count, tag=self.tag)
        # The spares of the process's other pool come back when this one lacks room.
        assert ids is not None or not granted
        if ids is None:
            return
        assert granted or process.models[1 - index].tiers
        assert len(ids) == count
        self.took(model, ids)

    @rule(pool=pools, count=st.integers(1, BLOCKS), call=st.integers(1, 12))
    def alloc_with_a_failing_driver(self, pool: tuple[int, int], count: int, call: int) -> None:
        process, index, model = self.at(pool)
        self.tag += 1
        got = process.ask(index, "alloc", count=count, tag=self.tag, fail_at=call)
        if isinstance(got, list):
            self.took(model, got)

    @rule(pool=pools, count=st.integers(1, BLOCKS), wait_s=st.sampled_from([0.0005, 0.003]))
    def alloc_and_ask_the_others(self, pool: tuple[int, int], count: int, wait_s: float) -> None:
        process, index, model = self.at(pool)
        self.tag += 1
        ids = process.ask(index, "alloc", count=count, tag=self.tag, wait_s=wait_s)
        if ids is not None:
            self.took(model, ids)

    @rule(pool=pools)
    def answer(self, pool: tuple[int, int]) -> None:
        process, index, model = self.at(pool)
        if process.ask(index, "answer"):
            assert process.ask(index, "state")["mapped"] == model.used_bytes()

    @precondition(lambda self: any(self.at(pool)[2].live for pool in POOLS))
    @rule(data=st.data(), share=st.sampled_from([0.1, 0.5, 1.0]))
    def free(self, data: st.DataObject, share: float) -> None:
        pool = data.draw(st.sampled_from([pool for pool in POOLS if self.at(pool)[2].live]))
        process, index, model = self.at(pool)
        chooser = random.Random(data.draw(st.integers(0, 2**32)))
        live = sorted(model.live)
        chosen = chooser.sample(live, max(1, int(len(live) * share)))
        process.ask(index, "free", ids=chosen)
        model.live -= set(chosen)
        model.freed |= set(chosen)

    @precondition(lambda self: any(self.at(pool)[2].freed for pool in POOLS))
    @rule(data=st.data())
    def free_again(self, data: st.DataObject) -> None:
        pool = data.draw(st.sampled_from([pool for pool in POOLS if self.at(pool)[2].freed]))
        process, index, model = self.at(pool)
        process.ask(index, "free_again", block=data.draw(st.sampled_from(sorted(model.freed))))

    @rule(pool=pools, slabs=st.one_of(st.none(), st.integers(0, 20)), outside=st.booleans())
    def limit(self, pool: tuple[int, int], slabs: int | None, outside: bool) -> None:
        process, index, model = self.at(pool)
        size_bytes = None if slabs is None else max(slabs * SLAB, model.min_bytes)
        if outside:
            self.device.set_limit(f"{pool[0]}-{pool[1]}", size_bytes)
        else:
            process.ask(index, "limit", size_bytes=size_bytes)
        model.limit_bytes = size_bytes

    @rule(pool=pools, slabs=st.integers(0, 12))
    def minimum(self, pool: tuple[int, int], slabs: int) -> None:
        process, index, model = self.at(pool)
        size_bytes = slabs * SLAB
        if model.limit_bytes is not None:
            size_bytes = min(size_bytes, model.limit_bytes)
        if process.ask(index, "minimum", size_bytes=size_bytes):
            model.min_bytes = size_bytes

    @rule(pool=pools, size_bytes=st.integers(1, CAPACITY // 3))
    def lease(self, pool: tuple[int, int], size_bytes: int) -> None:
        process, index, model = self.at(pool)
        if process.ask(index, "lease", size_bytes=size_bytes):
            model.static_bytes += size_bytes

    @precondition(lambda self: any(self.at(pool)[2].static_bytes for pool in POOLS))
    @rule(data=st.data())
    def unlease(self, data: st.DataObject) -> None:
        held = [pool for pool in POOLS if self.at(pool)[2].static_bytes]
        process, index, model = self.at(data.draw(st.sampled_from(held)))
        model.static_bytes -= process.ask(index, "unlease")

    @rule(
        pool=pools,
        call=st.sampled_from(["spares", "premap"]),
        low=st.integers(0, 8),
        extra=st.integers(0, 8),
    )
    def watermarks(self, pool: tuple[int, int], call: str, low: int, extra: int) -> None:
        process, index, model = self.at(pool)
        process.ask(index, call, low=low, high=low + extra)
        model.tiers = True

    @rule(pool=pools)
    def trim(self, pool: tuple[int, int]) -> None:
        process, index, model = self.at(pool)
        process.ask(index, "trim")
        assert process.ask(index, "state")["mapped"] == model.used_bytes()

    @rule()
    def trim_all(self) -> None:
        """Trims all pools. Every page left was written: the ledger and the OS count the same."""
        for pool in POOLS:
            self.trim(pool)
        committed = self.device.usage().committed_bytes
        assert committed == sum(self.at(pool)[2].used_bytes() for pool in POOLS)
        assert self.device.resident_bytes() == committed

    @rule(index=st.integers(0, 1), often=st.integers(0, 4))
    def kill(self, index: int, often: int) -> None:
        if often:
            return
        assert self.processes[index].end(signal.SIGKILL) == -signal.SIGKILL
        time.sleep(0.001)
        self.processes[index] = Process(self.device, index, self.LIBCUDA)

    @invariant()
    def books_agree(self) -> None:
        TwoProcesses.steps += 1
        usage = self.device.usage()
        assert usage.reserved_bytes + usage.free_bytes == CAPACITY
        records = {client.name: client for client in usage.clients}
        assert sorted(records) == sorted(f"{process}-{pool}" for process, pool in POOLS)
        charged = 0
        for pool in POOLS:
            process, index, model = self.at(pool)
            record = records[f"{pool[0]}-{pool[1]}"]
            state = process.ask(index, "state")
            assert state["live"] == len(model.live)
            assert record.static_bytes == model.static_bytes
            assert (record.min_bytes, record.limit_bytes) == (model.min_bytes, model.limit_bytes)
            assert record.reserved_bytes == record.committed_bytes >= state["mapped"]
            assert state["mapped"] >= model.used_bytes()
            charged += record.static_bytes + max(record.reserved_bytes, record.min_bytes)
        assert usage.reserved_bytes == charged
        assert self.device.resident_bytes() <= usage.committed_bytes

    def teardown(self) -> None:
        for process in self.processes:
            assert process.end(None) == 0
        assert self.device.usage().free_bytes == CAPACITY
        self.device.destroy()


def run(device_name: str, run_seed: int, examples: int, libcuda: LibCuda | None) -> None:
    class Machine(TwoProcesses):
        DEVICE = device_name
        LIBCUDA = libcuda

    begin_s = time.monotonic()
    for done in range(0, examples, EXAMPLES_AT_ONCE):
        campaign = settings(
            max_examples=min(EXAMPLES_AT_ONCE, examples - done),
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        run_state_machine_as_test(seed(run_seed + done)(Machine), settings=campaign)
        gc.collect()
    print(f"{TwoProcesses.steps} steps in {time.monotonic() - begin_s:.0f} s, seed {run_seed}")


if __name__ == "__main__":
    name, path = sys.argv[1], os.environ.get("KVCACHED_LIBCUDA")
    library = LibCuda(path) if name.startswith("cuda") and path else None  # type: ignore[arg-type]
    run(name, int(sys.argv[2]), int(sys.argv[3]), library)
