"""Pauses after failed activations, so that a model that cannot start is not retried in a loop."""

from __future__ import annotations

from dataclasses import dataclass

from prism.cluster.state.timing import SchedulerTiming


@dataclass(frozen=True, slots=True)
class Failures:
    count: int
    last_s: float
    until_s: float
    message: str


class ActivationBackoff:
    """Failures of each model on each device, and the time of the next attempt."""

    def __init__(self, timing: SchedulerTiming) -> None:
        self._timing = timing
        self._failures: dict[str, dict[str, Failures]] = {}  # by model, by device

    def failed(self, model: str, device: str, message: str, now_s: float) -> None:
        """Records a failed activation. Starts a pause, which doubles with each failure."""
        self._note(model, device, message, now_s, free_tries=0)

    def died(self, model: str, device: str, message: str, now_s: float) -> None:
        """Records the loss of an active model. The first one causes no pause."""
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
        """Ends all pauses of the model (an operator activates it)."""
        self._failures.pop(model, None)

    def devices(self, model: str, now_s: float) -> tuple[str, ...]:
        """Returns the devices on which the model is in a pause, sorted."""
        return tuple(sorted(self._active(model, now_s)))

    def message(self, model: str, now_s: float) -> str:
        """Returns the latest failure's message among current pauses, or an empty string."""
        active = self._active(model, now_s).values()
        return max(active, key=lambda f: f.last_s).message if active else ""

    def count(self, model: str) -> int:
        """Returns the number of recent failures of the model on all devices."""
        return sum(failures.count for failures in self._failures.get(model, {}).values())

    def _active(self, model: str, now_s: float) -> dict[str, Failures]:
        found = self._failures.get(model, {})
        return {device: f for device, f in found.items() if f.until_s > now_s}
