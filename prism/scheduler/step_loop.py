"""Control loop of one device's steps: consults a policy's step control and starts its jobs.

Step-driven, for engines that run nothing else than these jobs (`prism/policies/multiplexing`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Protocol

from prism.policies.multiplexing.steps import DeviceStepView, StepControl, StepJob

CHOICES_MAX = 64
"""Largest number of choices at one time."""


class StepPort(Protocol):
    """Engines of one device."""

    def models(self) -> Set[str]:
        """Returns the models whose engines can step."""

    def view(self) -> DeviceStepView:
        """Returns a snapshot of these engines."""

    def start(self, job: StepJob, *, repeats: bool) -> bool:
        """Starts a job. Returns False if it cannot start, and leaves its requests out of the next
        views until `end_runs` with `changed`.

        Args:
            repeats: whether a decode step is repeated until `end_runs`.
        """

    def retracted(self) -> bool:
        """Returns whether the last `start` made requests wait again."""

    def end_runs(self, *, changed: bool) -> None:
        """Makes the present steps the last ones of their jobs.

        Args:
            changed: whether requests, memory or engines have changed.
        """

    def set_quotas(self, quotas: Mapping[str, int]) -> None:
        """Sets new KV quotas, in bytes by model. Starts new measurements of `kv_peak_bytes`."""

    def expire_after(self, seconds: float, choice: int) -> None:
        """Consults the loop again after a time, if this choice is the last one then."""


class StepLoop:
    """Loop that consults step control.

    A decode job continues for `holds_s` of its choice. It ends with its present step when a request
    is admitted, ends or is retracted on the device, and when a choice with `holds_s` = 0 starts a
    job.

    Args:
        observe: called with each view that the control gets, and the chosen jobs.
    """

    def __init__(
        self,
        control: StepControl,
        port: StepPort,
        observe: Callable[[DeviceStepView, Sequence[StepJob]], None] | None = None,
    ) -> None:
        self._control = control
        self._port = port
        self._observe = observe
        self._state: Any = None
        self._names: Set[str] = frozenset()
        self._quotas: Mapping[str, int] | None = None
        # Number of choices that started a job.
        self._started = 0
        self._asking = False
        self._again = False

    def consult(self, *, changed: bool) -> None:
        """Consults the control, unless a consultation is under way, which then asks again.

        Args:
            changed: whether a request arrived or ended, or more memory may be free.
        """
        self._again = True
        names = self._port.models()
        if changed or names != self._names:
            self._port.end_runs(changed=True)
        if self._asking or not names:
            return
        self._asking = True
        try:
            for _ in range(CHOICES_MAX):
                if not self._again:
                    break
                self._again = False
                self._ask(self._port.models())
        finally:
            self._asking = False

    def is_last(self, choice: int) -> bool:
        """Returns whether no choice has started a job since this one."""
        return choice == self._started

    def _ask(self, names: Set[str]) -> None:
        view = self._port.view()
        if names != self._names:
            self._names, self._state = frozenset(names), self._control.start(view)
        choice, self._state = self._control.choose(view, self._state)
        if self._observe is not None:
            self._observe(view, choice.jobs)
        self._note_quotas()
        repeats = choice.holds_s > 0
        started = [self._port.start(job, repeats=repeats) for job in choice.jobs]
        self._again |= not all(started)
        if self._port.retracted() or (any(started) and not repeats):
            self._port.end_runs(changed=False)
        if any(started):
            self._started += 1
            if repeats and choice.holds_s < math.inf:
                self._port.expire_after(choice.holds_s, self._started)

    def _note_quotas(self) -> None:
        quotas = self._control.kv_quotas(self._state)
        if quotas is not self._quotas:
            self._quotas = quotas
            self._port.set_quotas(quotas)
