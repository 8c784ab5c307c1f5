"""What processes say about a GPU's memory outside of kvcached; parts of messages.

"process": the driver's figure of this process; "estimate": the driver names no processes here, so
code, graphs and workspaces are not seen.
"""

from __future__ import annotations

import msgspec


class _Part(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of these structs."""


class OutsideMemory(_Part, frozen=True):
    """What an engine process holds on its GPU beside its pages of KV and weights.

    leased_bytes: the ledger's part for it, context_bytes of which stay without a model.
    torch_bytes: reserved by torch's allocator. other_bytes: graphs, workspaces, NCCL, code.
    driver_pid: this process as the driver numbers it (a container may number it otherwise).
    """

    leased_bytes: int = 0
    context_bytes: int = 0
    torch_bytes: int = 0
    other_bytes: int = 0
    driver_pid: int = 0
    source: str = "estimate"

    @property
    def held_bytes(self) -> int:
        return self.context_bytes + self.torch_bytes + self.other_bytes

    @property
    def excess_bytes(self) -> int:
        """Negative: leased and not used."""
        return self.held_bytes - self.leased_bytes


class ForeignProcess(_Part, frozen=True):
    """Holds memory of the GPU and is none of the ledger's. used_bytes 0: the driver hides it."""

    pid: int
    used_bytes: int = 0
    name: str = ""


class GpuMemory(_Part, frozen=True):
    """A device as its driver sees it.

    drift_bytes: what the ledger's processes hold, each beyond what the ledger granted to it.
    short_bytes: what the ledger promises and the driver does not have.
    """

    total_bytes: int
    free_bytes: int
    drift_bytes: int
    short_bytes: int = 0
    foreign: tuple[ForeignProcess, ...] = ()
    replaced_total: int = 0

    @property
    def foreign_bytes(self) -> int:
        return sum(process.used_bytes for process in self.foreign)
