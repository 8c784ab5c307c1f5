"""Cluster with token-level switching: models take turns on its devices, as `TurnPolicy` decides.

No model is bound to a device. A request prefills on one instance, its KV waits in host memory, and
it decodes on another instance in its model's turns. There is neither admission nor eviction. An
instance is a device, or as many as the TP degree of its models.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from prism.errors import KV_MEMORY_EXCEEDED, ConfigError, TooLargeError
from prism.policies.placement import Placement, Unit
from prism.scheduler.token_turns import prefill_count
from prism_sim.cluster.parts import ClusterParts
from prism_sim.cluster.turns.turn_decode import DecodeDevice
from prism_sim.cluster.turns.turn_memory import TurnMemory, blocks_of, kv_bytes
from prism_sim.cluster.turns.turn_prefill import PrefillDevice
from prism_sim.core.records import ClusterSample, Decision
from prism_sim.core.request import SimRequest
from prism_sim.core.setup import ModelSetup
from prism_sim.engine.compute import Compute


class TurnPool:
    """All devices of the cluster. Raises ConfigError for a setup that token-level switching does
    not support."""

    def __init__(self, parts: ClusterParts) -> None:
        setup, policy = parts.setup, parts.policy
        assert policy.turns is not None
        assert policy.search is not None, "a policy with turns needs a search"
        degrees = {model.tp for model in setup.models}
        reuse = setup.engine.prefix_reuse
        check_turns(policy.name, len(parts.devices), degrees, prefix_reuse=reuse)
        self._kernel = parts.kernel
        self._policy = policy.turns
        self._records = parts.records
        self._refused: set[int] = set()
        # Requests whose KV is copied to host memory.
        self._copying: dict[int, SimRequest] = {}
        self._parts = parts
        # TP degree -> its instances.
        self._prefills: dict[int, list[PrefillDevice]] = {}
        self._decodes: dict[int, list[DecodeDevice]] = {}
        self._memory: dict[int, TurnMemory] = {}

    def begin(self, target: Placement) -> None:
        """Makes the units of `target` the instances. REQUIRES: called first, at least two units of
        each degree."""
        degrees: dict[int, list[Unit]] = {}
        for unit in target.units:
            degrees.setdefault(unit.tp, []).append(unit)
        for tp, units in degrees.items():
            self._begin(tp, units)

    def _begin(self, tp: int, units: Sequence[Unit]) -> None:
        setup, compute = self._parts.setup, Compute(self._kernel)
        by_name = {device.name: device for device in self._parts.devices}
        memories = [
            TurnMemory(self._kernel, setup, [by_name[name] for name in unit.devices], self._swapped)
            for unit in units
        ]
        prefills = prefill_count(self._policy.prefill_part, len(memories))
        chunk_tokens, models = setup.engine.prefill_chunk_tokens, {m.name: m for m in setup.models}
        self._memory[tp] = memories[0]
        self._prefills[tp] = [
            PrefillDevice(compute, memory, chunk_tokens, models, self._prefilled)
            for memory in memories[:prefills]
        ]
        self._decodes[tp] = [
            DecodeDevice(
                compute,
                memory,
                settings=setup.engine,
                policy=self._policy,
                ended=self._end,
                switched=self._switched,
            )
            for memory in memories[prefills:]
        ]

    def submit(self, model: ModelSetup, request: SimRequest) -> None:
        """Adds an arriving request to a prefill device, or fails it if its KV cannot fit."""
        tokens = request.prompt_tokens + request.output_tokens
        if kv_bytes(model, blocks_of(model, tokens)) > self._memory[model.tp].most_kv_bytes(model):
            self._refuse(model)
            self._records.finish(request, self._kernel.time_s, KV_MEMORY_EXCEEDED)
            return
        prefills = self._prefills[model.tp]
        number, place = self._policy.prefill_on(model.name, [p.view() for p in prefills])
        prefills[number].add(model, request, place)

    def requests(self) -> list[SimRequest]:
        """Returns all open requests."""
        prefilling, decoding = _requests(self._prefills), _requests(self._decodes)
        return [*prefilling, *self._copying.values(), *decoding]

    def with_counts(self, sample: ClusterSample) -> ClusterSample:
        """Returns the sample with the open requests: as waiting up to their prefill's end, then as
        running."""
        running = len(_requests(self._decodes)) + len(self._copying)
        return sample._replace(waiting=len(_requests(self._prefills)), running=running)

    def _prefilled(self, model: ModelSetup, request: SimRequest, memory: TurnMemory) -> None:
        if request.generated >= request.output_tokens:
            self._end(request)
            return
        self._copying[request.index] = request
        copy_s = memory.copy_s(model, model.need.held_tokens(request.kv_tokens))
        self._kernel.after(copy_s, self._decode, model, request)

    def _decode(self, model: ModelSetup, request: SimRequest) -> None:
        """Adds a request whose KV is in host memory to a decode instance."""
        del self._copying[request.index]
        decodes = self._decodes[model.tp]
        number = self._policy.decode_on(model.name, [d.models() for d in decodes])
        decodes[number].add(model, request)

    def _end(self, request: SimRequest) -> None:
        self._records.finish(request, self._kernel.time_s)

    def _swapped(self, before: ModelSetup | None, after: ModelSetup, device: str) -> None:
        now_s = self._kernel.time_s
        if before is not None:
            self._records.decide(Decision(now_s, "evict", before.name, device))
        self._records.decide(Decision(now_s, "activate", after.name, device))

    def _switched(self, model: ModelSetup, memory: TurnMemory, turn_s: float) -> None:
        reason = f"a turn of {turn_s:.2f} s"
        now_s, name = self._kernel.time_s, memory.device.name
        self._records.decide(Decision(now_s, "active", model.name, name, reason=reason))

    def _refuse(self, model: ModelSetup) -> None:
        if model.index not in self._refused:
            self._refused.add(model.index)
            why = "KV of its longest request does not fit next to its weights"
            now_s = self._kernel.time_s
            self._records.decide(Decision(now_s, "refuse", model.name, "", reason=why))


def _requests(instances: Mapping[int, Sequence[PrefillDevice | DecodeDevice]]) -> list[SimRequest]:
    return [r for found in instances.values() for device in found for r in device.requests()]


def check_turns(policy: str, gpus: int, degrees: Collection[int], *, prefix_reuse: bool) -> None:
    """Raises ConfigError for a setup that token-level switching does not support, TooLargeError if
    there are too few GPUs. degrees: tensor-parallel degrees of the models."""
    if prefix_reuse:
        raise ConfigError(
            f"engine.prefix_reuse: cannot be combined with policy {policy!r}; set it to false"
        )
    least = 2 * sum(set(degrees))
    if gpus < least:
        raise TooLargeError(
            f"gpus.count: must be >= {least}, since policy {policy!r} prefills and decodes on "
            "different GPUs, and separates the models by tp"
        )
