"""Rates and lengths of a model's requests over the last ten minutes, and its idle times.

Not thread-safe; owns no clock. Lengths are counted in buckets of a quarter octave, so they are
known within 9 %, and processes can report them as counters.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from msgspec import structs

from prism.policies.data import NO_TRAFFIC, Traffic

SLOT_S = 10.0
SLOTS = 60
RATE_SLOTS = 6
"""Number of the latest slots of which the present rate is computed."""
IDLE_TIMES = 32
PER_OCTAVE, BUCKETS = 4, 96

Counters = Mapping[str, Mapping[int, int]]
"""Model -> requests by bucket of their length."""


@lru_cache(maxsize=1 << 16)
def bucket(tokens: int) -> int:
    """Returns the bucket of a length: the least k with tokens <= 2 ** (k / PER_OCTAVE)."""
    return min(BUCKETS - 1, math.ceil(math.log2(max(1, tokens)) * PER_OCTAVE))


@lru_cache(maxsize=1 << 10)
def length(number: int) -> float:
    """Returns the length in the middle of a bucket."""
    return float(2 ** ((number - 0.5) / PER_OCTAVE))


class _Lengths:
    """Lengths of requests: number in each bucket, and sums."""

    __slots__ = ("buckets", "count", "square", "tokens")

    def __init__(self) -> None:
        self.buckets: dict[int, int] = {}
        self.count = 0
        self.tokens = self.square = 0.0

    def add(self, number: int, tokens: float, count: int = 1) -> None:
        """Adds requests of one length, whose bucket is `number`."""
        self.buckets[number] = self.buckets.get(number, 0) + count
        self.count += count
        self.tokens += count * tokens
        self.square += count * tokens * tokens

    def merge(self, other: _Lengths, sign: int) -> None:
        for number, count in other.buckets.items():
            self.buckets[number] = self.buckets.get(number, 0) + sign * count
        self.count += sign * other.count
        self.tokens += sign * other.tokens
        self.square += sign * other.square

    def moments(self) -> tuple[float, float]:
        """Returns (mean, standard deviation); zeros without requests."""
        if not self.count:
            return 0.0, 0.0
        mean = self.tokens / self.count
        return mean, math.sqrt(max(0.0, self.square / self.count - mean * mean))

    def p99(self) -> float:
        above = 0.01 * self.count
        for number in sorted(self.buckets, reverse=True):
            above -= self.buckets[number]
            if above < 0:
                return length(number)
        return 0.0


@dataclass(slots=True)
class _Slot:
    number: int
    prompts: _Lengths = field(default_factory=_Lengths)
    outputs: _Lengths = field(default_factory=_Lengths)


class ModelTraffic:
    """Traffic of one model, in slots of `SLOT_S`.

    Args:
        since_s: Time from which requests are seen.
    """

    def __init__(self, since_s: float = 0.0) -> None:
        self._first = int(since_s / SLOT_S)
        self._open = _Slot(-1)
        # Complete slots with requests, oldest first, and their sums.
        self._slots: deque[_Slot] = deque()
        self._sum = _Slot(-1)
        # Slot of the latest result of `seen`, and the result.
        self._seen: tuple[int, Traffic] = (-1, NO_TRAFFIC)
        # The latest slot with arrivals, and the times without arrivals between such slots.
        self._last_arrivals: int | None = None
        self._idle_times_s: deque[float] = deque(maxlen=IDLE_TIMES)
        # Mean and standard deviation of outputs, kept while all requests are rejected.
        self._outputs = (0.0, 0.0)

    def arrived(self, prompt_tokens: int, now_s: float) -> None:
        self._slot(now_s).prompts.add(bucket(prompt_tokens), prompt_tokens)

    def ended(self, output_tokens: int, now_s: float) -> None:
        self._slot(now_s).outputs.add(bucket(output_tokens), output_tokens)

    def grew(self, prompts: Mapping[int, int], outputs: Mapping[int, int], now_s: float) -> None:
        """Adds requests by bucket."""
        slot = self._slot(now_s)
        for lengths, grown in ((slot.prompts, prompts), (slot.outputs, outputs)):
            for number, count in grown.items():
                lengths.add(number, length(number), count)

    def seen(self, now_s: float) -> Traffic:
        """Returns the traffic of the complete slots. It changes once in `SLOT_S`."""
        number = int(now_s / SLOT_S)
        if self._seen[0] != number and (self._slots or self._open.number >= 0):
            self._begin(number)
            self._seen = (number, self._summed(number))
        return self._seen[1]

    def _slot(self, now_s: float) -> _Slot:
        """Returns the open slot of this time."""
        number = int(now_s / SLOT_S)
        if self._open.number != number:
            self._begin(number)
        return self._open

    def _begin(self, number: int) -> None:
        """Begins a slot, unless it is open. Completes the one before it and drops old ones."""
        if self._open.number < number:
            done, self._open = self._open, _Slot(number)
            if done.prompts.count or done.outputs.count:
                self._slots.append(done)
                self._sum.prompts.merge(done.prompts, 1)
                self._sum.outputs.merge(done.outputs, 1)
            if done.prompts.count:
                self._idle_until(done.number)
        while self._slots and self._slots[0].number < number - SLOTS:
            old = self._slots.popleft()
            self._sum.prompts.merge(old.prompts, -1)
            self._sum.outputs.merge(old.outputs, -1)

    def _idle_until(self, number: int) -> None:
        """Records the time without arrivals before this slot, if there is any."""
        last, self._last_arrivals = self._last_arrivals, number
        if last is not None and last < number - 1:
            self._idle_times_s.append((number - last - 1) * SLOT_S)

    def _summed(self, number: int) -> Traffic:
        prompts, outputs = self._sum.prompts, self._sum.outputs
        idle_times_s = tuple(self._idle_times_s)
        if not prompts.count:
            return Traffic(idle_times_s=idle_times_s)
        slots = min(SLOTS, max(1, number - self._first))
        recent = sum(s.prompts.count for s in self._slots if s.number >= number - RATE_SLOTS)
        prompt_tokens, prompt_std = prompts.moments()
        if outputs.count:
            self._outputs = outputs.moments()
        output_tokens, output_std = self._outputs
        return Traffic(
            requests=prompts.count,
            rate_rps=recent / (min(slots, RATE_SLOTS) * SLOT_S),
            peak_rps=max(s.prompts.count for s in self._slots) / SLOT_S,
            mean_rps=prompts.count / (slots * SLOT_S),
            prompt_tokens=prompt_tokens,
            prompt_std_tokens=prompt_std,
            prompt_p99_tokens=prompts.p99(),
            output_tokens=output_tokens,
            output_std_tokens=output_std,
            # Of at least a minute, so that the first request of a model does not count as busy.
            busy_part=sum(s.prompts.count > 0 for s in self._slots) / max(RATE_SLOTS, slots),
            idle_times_s=idle_times_s,
        )


class TrafficBook:
    """Traffic of all models: arrivals from the counters of frontends, outputs from those of agents.

    Every request arrives at one frontend, once. So a request counts once whether it is served at
    once, waits for its model to be placed, moves between devices, is tried again, or is rejected. A
    client that sends it again counts as another one. The first counters of a frontend or a device
    are the baseline.
    """

    def __init__(self) -> None:
        self._models: dict[str, ModelTraffic] = {}
        # Time of the first report of arrivals.
        self._since_s: float | None = None
        # Frontend -> model -> most that it has reported in each bucket.
        self._arrived: dict[str, dict[str, dict[int, int]]] = {}
        # Device -> model -> its last counters.
        self._ended: dict[str, dict[str, Mapping[int, int]]] = {}

    def arrived(self, frontends: Mapping[str, Counters], now_s: float) -> None:
        """Adds arrivals.

        Args:
            frontends: id of each live frontend -> prompts since it started. Ids are not used again.
                An older heartbeat may follow a newer one.
        """
        if self._since_s is None:
            self._since_s = now_s
        known, self._arrived = self._arrived, {}
        for name, counters in frontends.items():
            last = self._arrived[name] = known.get(name, {})
            for model, prompts in counters.items():
                before = last.setdefault(model, {})
                new = {k: n - before.get(k, 0) for k, n in prompts.items() if n > before.get(k, 0)}
                before.update({k: prompts[k] for k in new})
                if new and name in known:
                    self._grew(model, new, {}, now_s)

    def ended(self, device: str, counters: Counters, now_s: float) -> None:
        """Adds a report of an agent.

        Args:
            counters: outputs since the agent started. Those that fell have restarted at zero.
        """
        known = device in self._ended
        last = self._ended.setdefault(device, {})
        for model, outputs in counters.items() if known else ():
            if grown := _grown(outputs, last.get(model, {})):
                self._grew(model, {}, grown, now_s)
        last.update(counters)

    def _grew(
        self, model: str, prompts: Mapping[int, int], outputs: Mapping[int, int], now_s: float
    ) -> None:
        if model not in self._models:
            self._models[model] = ModelTraffic(now_s if self._since_s is None else self._since_s)
        self._models[model].grew(prompts, outputs, now_s)

    def of(self, model: str, now_s: float) -> Traffic:
        known = self._models.get(model)
        return known.seen(now_s) if known else NO_TRAFFIC


def _grown(now: Mapping[int, int], before: Mapping[int, int]) -> dict[int, int]:
    if sum(now.values()) < sum(before.values()):
        before = {}
    grown = {number: count - before.get(number, 0) for number, count in now.items()}
    return {number: count for number, count in grown.items() if count > 0}


def share_of(traffic: Traffic, copies: int) -> Traffic:
    """Returns the traffic of one of the model's copies, which share it evenly."""
    if copies < 2:
        return traffic
    return structs.replace(
        traffic,
        rate_rps=traffic.rate_rps / copies,
        peak_rps=traffic.peak_rps / copies,
        mean_rps=traffic.mean_rps / copies,
    )
