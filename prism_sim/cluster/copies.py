"""Copies of a model, and the choice of the copy for a request as in `queueing/common.lua`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from prism.messages.prompt_prefix import PREFIX_KEPT_S, PREFIX_TOKENS, SLACK_REQUESTS
from prism.scheduler.traffic import ModelTraffic
from prism_sim.cluster.device import Resident, Stage
from prism_sim.core.prefix import HASH_TOKENS
from prism_sim.core.request import SimRequest
from prism_sim.core.setup import ModelSetup

_BLOCKS = PREFIX_TOKENS // HASH_TOKENS


@dataclass(slots=True, eq=False)
class SimModel:
    """Copies of a model, and the requests that wait for a copy."""

    setup: ModelSetup
    residents: list[Resident] = field(default_factory=list)
    unplaced: dict[int, SimRequest] = field(default_factory=dict)
    # Device -> time until which it is not tried again.
    barred: dict[str, float] = field(default_factory=dict)
    last_use_s: float = float("-inf")
    wanted: bool = True
    deferred: bool = False
    refusal: str = ""
    # True if its requests are rejected (`Refuse.overload`).
    given_up: bool = False
    traffic: ModelTraffic = field(default_factory=ModelTraffic)
    # Tokens of removed copies.
    tokens_total: int = 0
    # Tokens of all copies at the last update of the rates.
    tokens_seen: int = 0
    # First blocks of a prompt -> home device of the copy that had them last, and when.
    prefix_homes: dict[tuple[int, ...], tuple[str, float]] = field(default_factory=dict)

    @property
    def needs_copy(self) -> bool:
        """True if the model should be activated on some device."""
        if self.unplaced:
            return True
        return not self.residents and (self.wanted or self.setup.never_evict)

    @property
    def busy(self) -> bool:
        """True if the model has open requests."""
        return bool(self.unplaced) or any(r.open_requests for r in self.residents)

    @property
    def active(self) -> list[Resident]:
        """Copies that can compute."""
        return [r for r in self.residents if r.engine and r.stage is Stage.ACTIVE]

    def note_arrival(self, request: SimRequest, now_s: float) -> None:
        self.last_use_s = now_s
        self.traffic.arrived(request.prompt_tokens, now_s)

    def rejects(self, request: SimRequest, now_s: float) -> bool:
        """Returns True if the model is given up. Its rejected requests are traffic as well."""
        if self.given_up:
            self.traffic.arrived(request.prompt_tokens, now_s)
        return self.given_up

    def withdraw_all(self) -> list[SimRequest]:
        """Removes all open requests from the queues and returns them in the order of arrival."""
        left = list(self.unplaced.values())
        for resident in list(self.residents):
            left += resident.home.withdraw(resident)
            if resident.engine is not None:
                left += resident.engine.requests()
        return sorted(left, key=lambda request: request.index)

    def withdraw_unplaced(self) -> list[SimRequest]:
        left = list(self.unplaced.values())
        self.unplaced.clear()
        return left

    def unplace_waiting(self) -> None:
        """Makes the waiting requests of all copies unplaced, in the order of arrival, so that they
        are divided anew."""
        waiting = [
            request
            for resident in self.residents
            if resident.takes_requests
            for request in resident.home.withdraw(resident)
        ]
        for request in sorted(waiting, key=lambda request: request.index):
            self.unplaced[request.index] = request

    def least_loaded(self) -> Resident | None:
        """Returns the copy with the fewest requests, or None if no copy takes requests."""
        if len(self.residents) == 1:
            (only,) = self.residents
            return only if only.takes_requests else None
        taking = [r for r in self.residents if r.takes_requests]
        return min(taking, key=lambda r: r.open_requests, default=None)

    def copy_for(self, hashes: Sequence[int], now_s: float) -> Resident | None:
        """Returns the copy for a new request, or None if no copy takes requests. Prefers the copy
        that last had a prompt with the same first blocks, which may still be in its cache.

        Args:
            hashes: Block ids of the prompt; empty if engines have no prefix cache.
            now_s: Present time.
        """
        least = self.least_loaded()
        if least is None or len(hashes) < _BLOCKS:
            return least
        copies = [r for r in self.residents if r.takes_requests]
        if len(copies) < 2:
            return least
        key = tuple(hashes[:_BLOCKS])
        device, since_s = self.prefix_homes.pop(key, ("", 0.0))
        most = least.open_requests + SLACK_REQUESTS
        target = least
        if now_s - since_s < PREFIX_KEPT_S:
            had = (r for r in copies if r.home.name == device and r.open_requests <= most)
            target = next(had, least)
        self.prefix_homes[key] = (target.home.name, now_s)
        self._forget(now_s)
        return target

    def _forget(self, now_s: float) -> None:
        """Drops expired prefixes; the oldest come first."""
        while now_s - next(iter(self.prefix_homes.values()))[1] >= PREFIX_KEPT_S:
            del self.prefix_homes[next(iter(self.prefix_homes))]
