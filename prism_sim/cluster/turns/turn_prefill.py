"""Prefill device for all models, which processes groups of prompts in order (Aegaeon §4.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from prism.policies.multiplexing.turns import PrefillQueue
from prism.scheduler.token_turns import PrefillTurns
from prism_sim.cluster.turns.turn_memory import TurnMemory, blocks_of, kv_bytes
from prism_sim.core.request import SimRequest
from prism_sim.core.setup import ModelSetup
from prism_sim.costs.model import PromptChunk, prompt_s
from prism_sim.engine.compute import Compute, Job


class PrefillDevice:
    """Instance that prefills one prompt at a time, since a batch of prompts takes as long (§4.2).

    Args:
        models: all models by name.
        done: Called with each request at its first token, when the copy of its KV to the host
            starts.
    """

    def __init__(
        self,
        compute: Compute,
        memory: TurnMemory,
        chunk_tokens: int,
        models: Mapping[str, ModelSetup],
        done: Callable[[ModelSetup, SimRequest, TurnMemory], None],
    ) -> None:
        self._compute = compute
        self._memory = memory
        self._chunk_tokens = chunk_tokens
        self._models = models
        self._done = done
        self._turns: PrefillTurns[SimRequest] = PrefillTurns()
        self._running: SimRequest | None = None
        # True while a switch or a prefill is in progress.
        self._busy = False
        # End of that switch or prefill.
        self._until_s = 0.0

    def view(self) -> PrefillQueue:
        """Returns the queue's groups and its load according to the cost tables."""
        return self._turns.view(max(0.0, self._until_s - self._compute.kernel.time_s))

    def requests(self) -> list[SimRequest]:
        """Returns all requests on the device."""
        held = [request for group in self._turns.groups for request in group.waiting]
        return held if self._running is None else [self._running, *held]

    def add(self, model: ModelSetup, request: SimRequest, place: int | None) -> None:
        """Adds a request to the group at index `place`, or to a new one if it is None."""
        resident = self._memory.model
        self._turns.add(
            request,
            model.name,
            place,
            prompt_s=self._prompt_s(model, request),
            switch_s=self._memory.switch_s(model),
            resident=resident.name if resident is not None else None,
        )
        self._next()

    def _next(self) -> None:
        if self._busy:
            return
        groups = self._turns.groups
        while groups and not groups[0].waiting:
            self._turns.end_group()
        if groups:
            group, kernel = groups[0], self._compute.kernel
            wait_s = self._memory.switch_to(self._models[group.model])
            self._busy, self._until_s = True, kernel.time_s + wait_s
            group.switch_s = 0.0
            kernel.after(wait_s, self._start)

    def _start(self) -> None:
        group, now_s = self._turns.groups[0], self._compute.kernel.time_s
        model = self._models[group.model]
        request = self._running = group.waiting.popleft()
        request.started_s, request.device = now_s, self._memory.device.number
        blocks = blocks_of(model, request.prompt_tokens)
        if kv_bytes(model, blocks) > self._memory.kv_room_bytes():
            self._memory.drop_prefetched()  # this prompt joined after the prefetch had begun
        self._memory.set_kv(blocks)
        if (following := self._turns.following) is not None:
            most = max([blocks, *(blocks_of(model, r.prompt_tokens) for r in group.waiting)])
            self._memory.prefetch(self._models[following], kv_bytes(model, most))
        cost = model.parts[model.tp].cost
        usage = partial(cost.usage, [PromptChunk(request.prompt_tokens)], 0, 0)
        work_s = self._prompt_s(model, request)
        group.prompts_s -= work_s
        self._until_s = now_s + work_s
        self._compute.start(
            Job([device.gpu for device in self._memory.devices], work_s, usage, self._ended)
        )

    def _ended(self) -> None:
        request, self._running = self._running, None
        assert request is not None
        request.first_s, request.todo_tokens = self._compute.kernel.time_s, 0
        request.generated = 1
        self._memory.set_kv(0)
        self._done(self._models[self._turns.groups[0].model], request, self._memory)
        self._busy = False
        self._next()

    def _prompt_s(self, model: ModelSetup, request: SimRequest) -> float:
        return prompt_s(model.parts[model.tp].cost, request.prompt_tokens, self._chunk_tokens)
