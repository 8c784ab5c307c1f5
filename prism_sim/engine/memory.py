"""Simulated memory ledger of a device, shared by weights and KV of all its engines.

The rules are those of `kvcached`'s ledger. Every byte is reserved before it is used. A client's
minimum counts as reserved even if it is unused. A client never exceeds its limit.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Account:
    """Memory of one engine on one device."""

    name: str
    static_bytes: int = 0
    kv_bytes: int = 0
    min_bytes: int = 0
    limit_bytes: int | None = None
    # Memory that its present run of decode steps may still take. It is not reserved, but a run that
    # starts on another engine must not count on it.
    claim_bytes: int = 0

    @property
    def reserved_bytes(self) -> int:
        return self.static_bytes + max(self.min_bytes, self.kv_bytes)


@dataclass(slots=True)
class Ledger:
    """Memory of one device. Minima and limits apply to KV, as in the live ledger."""

    capacity_bytes: int
    page_bytes: int
    accounts: dict[str, Account] = field(default_factory=dict)
    reserved_bytes: int = 0
    claimed_bytes: int = 0
    peak_bytes: int = 0

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.reserved_bytes

    @property
    def spare_bytes(self) -> int:
        """Memory that is neither reserved nor claimed."""
        return self.capacity_bytes - self.reserved_bytes - self.claimed_bytes

    def open(self, account: Account) -> None:
        """Adds a client. REQUIRES: its reservation fits."""
        assert account.name not in self.accounts, f"{account.name} is a client already"
        self.accounts[account.name] = account
        self._reserve(account.reserved_bytes)

    def close(self, name: str) -> None:
        """Removes a client and frees its memory."""
        account = self.accounts.pop(name)
        self.reserved_bytes -= account.reserved_bytes
        self.claimed_bytes -= account.claim_bytes

    def set_kv(self, account: Account, kv_bytes: int) -> None:
        """Sets the client's KV memory. REQUIRES: growth is within `room_bytes`."""
        before, floor = account.kv_bytes, account.min_bytes
        account.kv_bytes = kv_bytes
        self._reserve(max(floor, kv_bytes) - max(floor, before))

    def set_claim(self, account: Account, claim_bytes: int) -> None:
        self.claimed_bytes += claim_bytes - account.claim_bytes
        account.claim_bytes = claim_bytes

    def room_bytes(self, account: Account) -> int:
        """Returns the KV that the client could add, from its minimum and the free memory."""
        room = max(0, account.min_bytes - account.kv_bytes) + self.free_bytes
        if account.limit_bytes is None:
            return room
        return min(room, account.limit_bytes - account.kv_bytes)

    def unclaimed_bytes(self, account: Account) -> int:
        """Returns `room_bytes` less the claims of other clients."""
        room = self.capacity_bytes - self.reserved_bytes - self.claimed_bytes + account.claim_bytes
        if account.min_bytes > account.kv_bytes:
            room += account.min_bytes - account.kv_bytes
        if account.limit_bytes is None:
            return room
        return min(room, account.limit_bytes - account.kv_bytes)

    def aligned(self, size_bytes: int) -> int:
        """Returns the size rounded up to whole pages."""
        return -(-size_bytes // self.page_bytes) * self.page_bytes

    def _reserve(self, grown_bytes: int) -> None:
        self.reserved_bytes += grown_bytes
        if self.reserved_bytes > self.capacity_bytes:
            raise AssertionError(f"{self.reserved_bytes} of {self.capacity_bytes} bytes reserved")
        self.peak_bytes = max(self.peak_bytes, self.reserved_bytes)
