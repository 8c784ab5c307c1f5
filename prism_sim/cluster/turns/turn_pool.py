"""Cluster with token-level switching: models take turns on its devices, as `TurnPolicy` decides.

No model is bound to a device. A request prefills on one device, its KV waits in host memory, and it
decodes on another device in its model's turns. There is neither admission nor eviction.
"""

from __future__ import annotations

from collections.abc import Mapping

from prism.errors import ConfigError, TooLargeError
from prism_sim.cluster.parts import ClusterParts
from prism_sim.cluster.turns.turn_decode import DecodeDevice
from prism_sim.cluster.turns.turn_memory import TurnMemory, blocks_of, kv_bytes
from prism_sim.cluster.turns.turn_prefill import PrefillDevice
from prism_sim.core.records import ClusterSample, Decision
from prism_sim.core.request import SimRequest
from prism_sim.core.setup import KV_MEMORY_EXCEEDED, ModelSetup
from prism_sim.engine.compute import Compute


class TurnPool:
    """All devices of the cluster. Raises ConfigError for a setup that token-level switching does
    not support."""

    def __init__(self, parts: ClusterParts) -> None:
        kernel, setup, policy, devices = parts.kernel, parts.setup, parts.policy, parts.devices
        assert policy.turns is not None
        degrees = {model.name: model.tp for model in setup.models}
        reuse = setup.engine.prefix_reuse
        check_turns(policy.name, len(devices), degrees, prefix_reuse=reuse)
        self._kernel = kernel
        self._policy = policy.turns
        self._records = parts.records
        self._refused: set[int] = set()
        # Requests whose KV is copied to host memory.
        self._copying: dict[int, SimRequest] = {}
        compute = Compute(kernel)
        count, part = len(devices), policy.turns.prefill_part
        prefills = min(count - 1, max(1, round(part * count)))
        memories = [TurnMemory(kernel, setup, device) for device in devices]
        chunk_tokens = setup.engine.prefill_chunk_tokens
        self._prefills = [
            PrefillDevice(compute, memory, chunk_tokens, self._prefilled)
            for memory in memories[:prefills]
        ]
        self._decodes = [
            DecodeDevice(
                compute,
                memory,
                settings=setup.engine,
                policy=policy.turns,
                ended=self._end,
                switched=self._switched,
            )
            for memory in memories[prefills:]
        ]
        self._largest = memories[0]

    def submit(self, model: ModelSetup, request: SimRequest) -> None:
        """Adds an arriving request to a prefill device, or fails it if its KV cannot fit."""
        tokens = request.prompt_tokens + request.output_tokens
        if kv_bytes(model, blocks_of(model, tokens)) > self._largest.most_kv_bytes(model):
            self._refuse(model)
            self._records.finish(request, self._kernel.time_s, KV_MEMORY_EXCEEDED)
            return
        queues = [device.view() for device in self._prefills]
        number, place = self._policy.prefill_on(model.name, queues)
        self._prefills[number].add(model, request, place)

    def requests(self) -> list[SimRequest]:
        """Returns all open requests."""
        prefilling = [request for device in self._prefills for request in device.requests()]
        decoding = [request for device in self._decodes for request in device.requests()]
        return [*prefilling, *self._copying.values(), *decoding]

    def with_counts(self, sample: ClusterSample) -> ClusterSample:
        """Returns the sample with the open requests: as waiting up to their prefill's end, then as
        running."""
        waiting = sum(len(device.requests()) for device in self._prefills)
        running = sum(len(device.requests()) for device in self._decodes)
        return sample._replace(waiting=waiting, running=running + len(self._copying))

    def _prefilled(self, model: ModelSetup, request: SimRequest, memory: TurnMemory) -> None:
        if request.generated >= request.output_tokens:
            self._end(request)
            return
        self._copying[request.index] = request
        copy_s = memory.copy_s(model, model.need.held_tokens(request.kv_tokens))
        self._kernel.after(copy_s, self._decode, model, request)

    def _decode(self, model: ModelSetup, request: SimRequest) -> None:
        """Adds a request whose KV is in host memory to a decode device."""
        del self._copying[request.index]
        number = self._policy.decode_on(model.name, [d.models() for d in self._decodes])
        self._decodes[number].add(model, request)

    def _end(self, request: SimRequest) -> None:
        self._records.finish(request, self._kernel.time_s)

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


def check_turns(policy: str, gpus: int, degrees: Mapping[str, int], *, prefix_reuse: bool) -> None:
    """Raises ConfigError for a setup that token-level switching does not support, TooLargeError if
    there are too few GPUs. degrees: model -> tensor-parallel degree."""
    wide = next((name for name, tp in degrees.items() if tp > 1), None)
    if wide is not None:
        raise ConfigError(
            f"policy: {policy!r} requires tp 1, and {wide} has tp {degrees[wide]}; remove that "
            "model or use another policy"
        )
    if prefix_reuse:
        raise ConfigError(
            f"engine.prefix_reuse: cannot be combined with policy {policy!r}; set it to false"
        )
    if gpus < 2:
        raise TooLargeError(
            f"gpus.count: must be >= 2, since policy {policy!r} prefills and decodes on "
            "different GPUs"
        )
