"""Fakes of the ports, for tests of control loops and policies, shipped for users' tests as well.

All are deterministic, single-threaded and driven by the caller's clock.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable

from msgspec import structs

from prism.policies.bins import need_bytes
from prism.policies.data import (
    Action,
    Activate,
    ClusterView,
    Evict,
    GpuView,
    Migrate,
    ModelView,
    Refuse,
)


class FakeCluster:
    """`ClusterPort` over models and devices in memory.

    An action takes `action_s`. It raises AssertionError if it breaks a rule of the live system: it
    overfills a device, no engine is free, its model has another action in progress, or it evicts a
    model with requests. An activation waits for the evictions in progress on its device.
    """

    def __init__(
        self,
        models: Iterable[ModelView],
        gpus: Iterable[GpuView],
        action_s: float = 1.0,
        bar_s: float = 5.0,
    ) -> None:
        self.now_s = 0.0
        self.models = {model.name: model for model in models}
        self.gpus = {gpu.name: gpu for gpu in gpus}
        self.refusals: dict[str, str] = {}
        self.applied: list[tuple[float, Action]] = []
        self.faults: set[str] = set()
        """Models whose next activation fails; the device is then barred for them for `bar_s`."""
        self._action_s = action_s
        self._bar_s = bar_s
        self._serial = itertools.count()
        self._due: list[tuple[float, int, Action]] = []
        self._bars: list[tuple[float, str]] = []
        self._last_use_s: dict[str, float] = {}
        self._targets: dict[str, str] = {}

    # --- called by tests --------------------------------------------------------------------

    def advance(self, now_s: float) -> None:
        """Sets the time. Actions that end until then take effect in order."""
        while self._due and self._due[0][0] <= now_s:
            self.now_s, _, action = heapq.heappop(self._due)
            self._finish(action)
        self.now_s = now_s
        for name in [name for until_s, name in self._bars if until_s <= now_s]:
            self._change(name, barred=())
        self._bars = [bar for bar in self._bars if bar[0] > now_s]

    def request(self, model: str) -> None:
        """Adds a waiting request of `model`."""
        self._change(model, waiting=self.models[model].waiting + 1)
        self._last_use_s[model] = self.now_s

    def serve(self, rate: float = 0.0) -> list[str]:
        """Finishes all waiting requests of active models. Returns the models that had some."""
        served = [m.name for m in self.models.values() if m.state == "active" and m.waiting]
        for name in served:
            self._change(name, waiting=0, running=0, token_rate=rate)
            self._last_use_s[name] = self.now_s
        return served

    # --- ClusterPort ------------------------------------------------------------------------

    def view(self) -> ClusterView:
        models = tuple(
            structs.replace(m, idle_s=self.now_s - self._last_use_s.get(m.name, float("-inf")))
            for m in self.models.values()
        )
        return ClusterView(self.now_s, models, tuple(self._gpu(g) for g in self.gpus.values()))

    def apply(self, action: Action) -> None:
        self.applied.append((self.now_s, action))
        if isinstance(action, Refuse):
            self.refusals[action.model] = action.reason
            return
        model = self.models[action.model]
        if isinstance(action, Activate):
            assert model.state == "absent", f"{action}: the model is {model.state}"
            self._change(model.name, state="activating", device=action.device)
        elif isinstance(action, Evict):
            assert model.state == "active", f"{action}: the model is {model.state}"
            protected = model.running or model.waiting or model.never_evict
            assert not protected, f"{action}: the model is busy or never_evict"
            self._change(model.name, state="draining")
        else:
            assert model.state == "active", f"{action}: the model is {model.state}"
            self._change(model.name, state="migrating")
            self._targets[model.name] = action.target
        self._check(action)
        heapq.heappush(self._due, (self.now_s + self._action_s, next(self._serial), action))

    # --- helpers ----------------------------------------------------------------------------

    def _change(self, name: str, **changes: object) -> None:
        self.models[name] = structs.replace(self.models[name], **changes)

    def _held(self, device: str) -> list[ModelView]:
        """Returns models with memory and an engine there, those that come or leave included."""
        return [
            m
            for m in self.models.values()
            if m.device == device or self._targets.get(m.name) == device
        ]

    def _gpu(self, gpu: GpuView) -> GpuView:
        incoming = [m for m in self.models.values() if self._targets.get(m.name) == gpu.name]
        held = self._held(gpu.name)
        return structs.replace(
            gpu,
            fixed_bytes=gpu.fixed_bytes + sum(map(need_bytes, incoming)),
            free_bytes=gpu.capacity_bytes - gpu.fixed_bytes - sum(map(need_bytes, held)),
            engines_free=gpu.engines_total - len(held),
        )

    def _check(self, action: Action) -> None:
        for gpu in self.gpus.values():
            held = [m for m in self._held(gpu.name) if m.state != "draining"]
            assert sum(map(need_bytes, held)) <= gpu.capacity_bytes - gpu.fixed_bytes, (
                f"{action} overfills {gpu.name}"
            )
            assert len(held) <= gpu.engines_total, f"{action}: no engine on {gpu.name}"

    def _finish(self, action: Action) -> None:
        if isinstance(action, Activate):
            if action.model in self.faults:
                self.faults.discard(action.model)
                self._change(action.model, state="absent", device=None, barred=(action.device,))
                self._bars.append((self.now_s + self._bar_s, action.model))
                return
            self._change(action.model, state="active", wanted=False)
            self._last_use_s[action.model] = self.now_s
            self.refusals.pop(action.model, None)
        elif isinstance(action, Evict):
            self._change(action.model, state="absent", device=None)
        elif isinstance(action, Migrate):
            del self._targets[action.model]
            self._change(action.model, state="active", device=action.target)
