"""Pauses after failed activations: a model that cannot start is not tried in a loop."""

from __future__ import annotations

from dataclasses import dataclass

from prism.cluster.timing import SchedulerTiming


@dataclass(frozen=True, slots=True)
class Failures:
    count: int
    last_s: float
    until_s: float
    message: str


class ActivationBackoff:
    """Per model and device: failures so far, and until when it is not tried there again."""

    def __init__(self, timing: SchedulerTiming) -> None:
        self._timing = timing
        self._failures: dict[str, dict[str, Failures]] = {}  # by model, by device

    def failed(self, model: str, device: str, message: str, now_s: float) -> None:
        """An activation failed: pause, twice as long each time."""
        self._note(model, device, message, now_s, free_tries=0)

    def died(self, model: str, device: str, message: str, now_s: float) -> None:
        """An active model was lost: the first time it may come back at once."""
        self._note(model, device, message, now_s, free_tries=1)

    def _note(self, model: str, device: str, message: str, now_s: float, free_tries: int) -> None:
        there = self._failures.setdefault(model, {})
        last = there.get(device)
        recent = last is not None and now_s - last.last_s < self._timing.forget_s
        count = last.count + 1 if last is not None and recent else 1
        doublings = count - 1 - free_tries
        longest_s = self._timing.retry_max_s
        pause_s = min(self._timing.retry_s * 2.0**doublings, longest_s) if doublings >= 0 else 0.0
        there[device] = Failures(count, now_s, now_s + pause_s, message)

    def clear(self, model: str) -> None:
        """The model may be tried anywhere at once (an operator asked)."""
        self._failures.pop(model, None)

    def devices(self, model: str, now_s: float) -> tuple[str, ...]:
        """Where the model is not tried now, sorted."""
        return tuple(sorted(self._active(model, now_s)))

    def message(self, model: str, now_s: float) -> str:
        """What went wrong last, of the pauses that last; empty without one."""
        active = self._active(model, now_s).values()
        return max(active, key=lambda f: f.last_s).message if active else ""

    def count(self, model: str) -> int:
        """Recent failures of the model on all devices."""
        return sum(failures.count for failures in self._failures.get(model, {}).values())

    def _active(self, model: str, now_s: float) -> dict[str, Failures]:
        found = self._failures.get(model, {})
        return {device: f for device, f in found.items() if f.until_s > now_s}
