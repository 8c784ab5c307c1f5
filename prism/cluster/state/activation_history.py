"""Outcomes of activations. Failures cause pauses, so that a model is not retried in a loop."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from prism.cluster.state.timing import SchedulerTiming


@dataclass(frozen=True, slots=True)
class Failures:
    count: int
    last_s: float
    until_s: float
    message: str
    lasting: bool


class Activations:
    """Outcomes of each model's activations. Times are on the scheduler's clock.

    Args:
        started_s: start of the scheduler.
    """

    def __init__(self, timing: SchedulerTiming, started_s: float) -> None:
        self._timing = timing
        self._started_s = started_s
        self._ended_s: dict[str, float] = {}  # model -> end of its last activation
        self._repaid_s: dict[str, float] = {}
        self.load_s: dict[str, float] = {}  # model -> length of its last activation
        self._failures: dict[str, dict[str, Failures]] = {}  # by model, by device
        self.refusals: dict[str, str] = {}  # model -> why the last plan placed it nowhere
        self.overload: set[str] = set()  # those refused for overload

    def loaded(self, model: str, load_s: float, now_s: float) -> None:
        """Records that the model has become active, after `load_s`. It can be loaded, then."""
        there = self._failures.get(model, {})
        self._failures[model] = {name: f for name, f in there.items() if not f.lasting}
        self.load_s[model] = load_s
        self.restarted(model, load_s, now_s)

    def restarted(self, model: str, load_s: float, now_s: float) -> None:
        """Records that the model's agent has activated it again, in `load_s`."""
        self._repaid_s[model] = now_s + load_s

    def ended(self, model: str, now_s: float) -> None:
        """Records the end of an activation. A model without requests is idle from then on."""
        self._ended_s[model] = now_s

    def failed(
        self, model: str, device: str, message: str, now_s: float, *, lasting: bool = False
    ) -> None:
        """Records a failed activation. Starts a pause, which doubles with each failure.

        The pauses of `lasting` ones, which would fail again, become longer than those of others.
        """
        self._note(model, device, message, now_s, free_tries=0, lasting=lasting)

    def died(self, model: str, device: str, message: str, now_s: float) -> None:
        """Records the loss of an active model. The first one causes no pause."""
        self._note(model, device, message, now_s, free_tries=1, lasting=False)

    def _note(
        self, model: str, device: str, message: str, now_s: float, *, free_tries: int, lasting: bool
    ) -> None:
        there = self._failures.setdefault(model, {})
        last = there.get(device)
        recent = last is not None and now_s - last.until_s < self._timing.forget_s
        count = last.count + 1 if last is not None and recent else 1
        doublings = count - 1 - free_tries
        longest_s = self._timing.retry_lasting_max_s if lasting else self._timing.retry_max_s
        pause_s = min(self._timing.retry_s * 2.0**doublings, longest_s) if doublings >= 0 else 0.0
        there[device] = Failures(count, now_s, now_s + pause_s, message, lasting)

    def clear(self, model: str) -> None:
        """Ends all pauses and the refusal of the model (an operator activates it)."""
        self._failures.pop(model, None)
        self.refusals.pop(model, None)
        self.overload.discard(model)

    def refuse(self, model: str, reason: str, *, overload: bool = False) -> bool:
        """Records that a plan placed the model nowhere. Returns whether the reason is new.

        The figures in the reason of an overload change: only its begin is new.
        """
        before, self.refusals[model] = self.refusals.get(model), reason
        if not overload:
            self.overload.discard(model)
            return before != reason
        begins = model not in self.overload
        self.overload.add(model)
        return begins

    def keep_refusals(self, models: Set[str]) -> None:
        """Removes the refusals of all other models."""
        self.overload &= models
        for model in self.refusals.keys() - models:
            del self.refusals[model]

    def barred(self, model: str, now_s: float) -> tuple[str, ...]:
        """Returns the devices on which the model is in a pause, sorted."""
        return tuple(sorted(self._active(model, now_s)))

    def message(self, model: str, now_s: float) -> str:
        """Returns the latest failure's message among current pauses, or an empty string."""
        active = self._active(model, now_s).values()
        return max(active, key=lambda f: f.last_s).message if active else ""

    def failures(self, model: str) -> int:
        """Returns the number of recent failures of the model on all devices."""
        return sum(failures.count for failures in self._failures.get(model, {}).values())

    def cannot_load(self, model: str) -> bool:
        """Returns whether the model failed for a lasting reason wherever it was tried."""
        there = self._failures.get(model, {}).values()
        return bool(there) and all(failures.lasting for failures in there)

    def idle_s(self, model: str, now_s: float) -> float:
        """Returns the time since the last activation, or since the scheduler's start."""
        return now_s - self._ended_s.get(model, self._started_s)

    def owes_s(self, model: str, now_s: float) -> float:
        """Returns the time until it has been active for as long as its activation took."""
        return max(0.0, self._repaid_s.get(model, now_s) - now_s)

    def _active(self, model: str, now_s: float) -> dict[str, Failures]:
        found = self._failures.get(model, {})
        return {device: f for device, f in found.items() if f.until_s > now_s}
