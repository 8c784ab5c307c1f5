"""Reports of GPU memory outside of kvcached, as parts of messages."""

from __future__ import annotations

import msgspec


class _Part(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of these structs."""


class OutsideMemory(_Part, frozen=True):
    """Memory of an engine process on its GPU in addition to pages of KV and weights."""

    leased_bytes: int = 0  # leased from the ledger
    context_bytes: int = 0  # part of the lease that stays without a model
    torch_bytes: int = 0  # reserved by torch's allocator
    other_bytes: int = 0  # graphs, workspaces, NCCL, code
    driver_pid: int = 0  # pid by the driver's numbering, which may differ in a container
    # "process": the driver's figure of this process. "estimate": the driver names no processes, so
    # code, graphs and workspaces are not included.
    source: str = "estimate"

    @property
    def held_bytes(self) -> int:
        """Memory in use."""
        return self.context_bytes + self.torch_bytes + self.other_bytes

    @property
    def excess_bytes(self) -> int:
        """Memory in use beyond the lease. Negative: leased and unused."""
        return self.held_bytes - self.leased_bytes


class ForeignProcess(_Part, frozen=True):
    """Process that holds memory of the GPU and is not in the ledger."""

    pid: int
    used_bytes: int = 0  # 0: the driver does not report it
    name: str = ""


class GpuMemory(_Part, frozen=True):
    """Memory of a device as reported by its driver."""

    total_bytes: int
    free_bytes: int
    drift_bytes: int  # memory of the ledger's processes beyond their leases
    short_bytes: int = 0  # memory that the ledger promises and the driver does not have
    foreign: tuple[ForeignProcess, ...] = ()
    replaced_total: int = 0  # engines that were replaced for exceeding their leases

    @property
    def foreign_bytes(self) -> int:
        return sum(process.used_bytes for process in self.foreign)
