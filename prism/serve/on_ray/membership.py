"""Membership of Ray's machines in the cluster, if the file does not name the nodes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from prism.serve.on_ray.ray_machines import RayMachine

JOIN_S = 10.0  # time for which a new machine must be live before it joins
LEAVE_S = 120.0  # time for which a node must be away before it is removed
_RETRY_S = 30.0  # delay after a rejected change; doubled each time
_RETRY_MAX_S = 900.0


class Membership:
    """Nodes of the cluster, in order. New ones come last.

    The driver calls `wanted`, and reports `applied` or `rejected` before the next change.
    """

    def __init__(self, machines: Sequence[RayMachine]) -> None:
        self.machines = list(machines)
        self._live: list[RayMachine] = []
        self._since_s: dict[str, float] = {}  # since when new machines are live, or nodes away
        # Addresses of a rejected change -> number of rejections, time of the next try.
        self._rejected: dict[frozenset[str], tuple[int, float]] = {}

    def observe(self, live: Sequence[RayMachine], now_s: float) -> None:
        """Records all live machines that have devices. Call it every few seconds."""
        differing = _addresses(live) ^ _addresses(self.machines)
        self._since_s = {each: self._since_s.get(each, now_s) for each in sorted(differing)}
        self._live = list(live)

    def wanted(self, now_s: float) -> list[RayMachine] | None:
        """Returns the nodes that there should be, or None for the present ones. Additions come
        before removals, and the last node is never removed.

        REQUIRES: `observe` was called since the last change.
        """
        known, present = _addresses(self.machines), _addresses(self._live)

        def lasts(machine: RayMachine, seconds: float) -> bool:
            return now_s - self._since_s[machine.address] >= seconds

        new = [m for m in self._live if m.address not in known and lasts(m, JOIN_S)]
        kept = [m for m in self.machines if m.address in present or not lasts(m, LEAVE_S)]
        for target in ([*self.machines, *new], kept):
            _, not_before_s = self._rejected.get(_addresses(target), (0, now_s))
            if target and target != self.machines and now_s >= not_before_s:
                return target
        return None

    def applied(self, machines: Sequence[RayMachine]) -> None:
        """Records a change that was made."""
        for changed in _addresses(machines) ^ _addresses(self.machines):
            self._since_s.pop(changed, None)
        self.machines = list(machines)
        self._rejected.clear()

    def rejected(self, machines: Sequence[RayMachine], now_s: float) -> float:
        """Records a rejected change. Returns the seconds until it is tried again."""
        times, _ = self._rejected.get(_addresses(machines), (0, now_s))
        retry_s = min(_RETRY_MAX_S, _RETRY_S * 2.0**times)
        self._rejected[_addresses(machines)] = times + 1, now_s + retry_s
        return retry_s


def _addresses(machines: Sequence[RayMachine]) -> frozenset[str]:
    return frozenset(each.address for each in machines)
