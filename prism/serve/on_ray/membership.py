"""Which of Ray's machines are nodes of the cluster, where the file names none. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from prism.serve.on_ray.machines import RayMachine

JOIN_S = 10.0  # there without a break, before it joins
LEAVE_S = 120.0  # away without a break, before it is dropped
_AGAIN_S = 30.0  # before a change that was refused is tried again; twice as long each time
_AGAIN_MAX_S = 900.0


class Membership:
    """`machines` are the nodes, in their order; new ones come last. Whoever changes them asks
    `wanted`, and says `took` or `refused` before the next change."""

    def __init__(self, machines: Sequence[RayMachine]) -> None:
        self.machines = list(machines)
        self._there: list[RayMachine] = []
        self._since_s: dict[str, float] = {}  # of newcomers that are there, of nodes that are away
        self._refused: dict[frozenset[str], tuple[int, float]] = {}  # how often, not before

    def seen(self, there: Sequence[RayMachine], now_s: float) -> None:
        """`there`: all that live and have devices. Call it every few seconds."""
        differing = _addresses(there) ^ _addresses(self.machines)
        self._since_s = {each: self._since_s.get(each, now_s) for each in sorted(differing)}
        self._there = list(there)

    def wanted(self, now_s: float) -> list[RayMachine] | None:
        """The nodes that there should be; None: those that there are. Machines that come are first,
        and no cluster loses its last one. REQUIRES: `seen` was called
        since the last change."""
        known, present = _addresses(self.machines), _addresses(self._there)

        def lasts(machine: RayMachine, seconds: float) -> bool:
            return now_s - self._since_s[machine.address] >= seconds

        new = [m for m in self._there if m.address not in known and lasts(m, JOIN_S)]
        kept = [m for m in self.machines if m.address in present or not lasts(m, LEAVE_S)]
        for target in ([*self.machines, *new], kept):
            _, not_before_s = self._refused.get(_addresses(target), (0, now_s))
            if target and target != self.machines and now_s >= not_before_s:
                return target
        return None

    def took(self, machines: Sequence[RayMachine]) -> None:
        for changed in _addresses(machines) ^ _addresses(self.machines):
            self._since_s.pop(changed, None)
        self.machines = list(machines)
        self._refused.clear()

    def refused(self, machines: Sequence[RayMachine], now_s: float) -> float:
        """After how many seconds it is tried again."""
        times, _ = self._refused.get(_addresses(machines), (0, now_s))
        again_s = min(_AGAIN_MAX_S, _AGAIN_S * 2.0**times)
        self._refused[_addresses(machines)] = times + 1, now_s + again_s
        return again_s


def _addresses(machines: Sequence[RayMachine]) -> frozenset[str]:
    return frozenset(each.address for each in machines)
