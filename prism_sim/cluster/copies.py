"""A model's copies in the simulator, and which of them gets a request: as `queueing/common.lua`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from prism.messages.prompt_prefix import PREFIX_KEPT_S, PREFIX_TOKENS, SLACK_REQUESTS
from prism_sim.cluster.resident import Resident
from prism_sim.core.prefix import HASH_TOKENS
from prism_sim.core.request import SimRequest
from prism_sim.core.setup import ModelSetup

_BLOCKS = PREFIX_TOKENS // HASH_TOKENS


@dataclass(slots=True, eq=False)
class SimModel:
    """A model's copies and the requests that wait for one."""

    setup: ModelSetup
    residents: list[Resident] = field(default_factory=list)
    unplaced: dict[int, SimRequest] = field(default_factory=dict)
    # Device -> until when it is not tried again.
    barred: dict[str, float] = field(default_factory=dict)
    last_use_s: float = float("-inf")
    wanted: bool = True
    refusal: str = ""
    # Of copies that are gone.
    tokens_total: int = 0
    # Of all copies, when rates were last looked at.
    tokens_seen: int = 0
    # Beginning of a prompt -> the device of the copy that had it last, and when.
    begun: dict[tuple[int, ...], tuple[str, float]] = field(default_factory=dict)

    @property
    def asked(self) -> bool:
        """It is to come up somewhere."""
        if self.unplaced:
            return True
        return not self.residents and (self.wanted or self.setup.never_evict)

    @property
    def busy(self) -> bool:
        """It has requests that have not ended."""
        return bool(self.unplaced) or any(r.open_requests for r in self.residents)

    def give_up(self) -> list[SimRequest]:
        """Its requests, in the order of arrival; none of its queues has them any more."""
        left = list(self.unplaced.values())
        for resident in list(self.residents):
            left += resident.home.withdraw(resident)
            if resident.engine is not None:
                left += resident.engine.requests()
        return sorted(left, key=lambda request: request.index)

    def least_loaded(self) -> Resident | None:
        """The copy with the fewest requests; None where no copy takes any."""
        if len(self.residents) == 1:
            (only,) = self.residents
            return only if only.takes_requests else None
        taking = [r for r in self.residents if r.takes_requests]
        return min(taking, key=lambda r: r.open_requests, default=None)

    def copy_for(self, hashes: Sequence[int], now_s: float) -> Resident | None:
        """The copy that gets a new request; hashes: of its prompt, where engines keep prefixes. The
        one that had its beginning last has it in its cache, perhaps."""
        least = self.least_loaded()
        if least is None or len(hashes) < _BLOCKS:
            return least
        copies = [r for r in self.residents if r.takes_requests]
        if len(copies) < 2:
            return least
        key = tuple(hashes[:_BLOCKS])
        device, since_s = self.begun.pop(key, ("", 0.0))
        most = least.open_requests + SLACK_REQUESTS
        target = least
        if now_s - since_s < PREFIX_KEPT_S:
            had = (r for r in copies if r.home.name == device and r.open_requests <= most)
            target = next(had, least)
        self.begun[key] = (target.home.name, now_s)
        self._forget(now_s)
        return target

    def _forget(self, now_s: float) -> None:
        """The oldest beginnings come first."""
        while now_s - next(iter(self.begun.values()))[1] >= PREFIX_KEPT_S:
            del self.begun[next(iter(self.begun))]
