"""Prefill device for all models, which processes groups of prompts in order (Aegaeon §4.2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from prism.policies.multiplexing.turns import PrefillGroup, PrefillQueue
from prism_sim.cluster.turns.turn_memory import TurnMemory, blocks_of, kv_bytes
from prism_sim.core.request import SimRequest
from prism_sim.core.setup import ModelSetup
from prism_sim.costs.model import PromptChunk, prompt_s
from prism_sim.engine.compute import Compute, Job


@dataclass(slots=True)
class PromptGroup:
    """Prompts of one model."""

    model: ModelSetup
    # Time of the switch from the previous group's model; 0 once the switch has begun.
    switch_s: float
    # Prefill time of the waiting prompts.
    prompts_s: float = 0.0
    waiting: deque[SimRequest] = field(default_factory=deque)
    # Number of prompts that ever joined.
    size: int = 0


class PrefillDevice:
    """Instance that prefills one prompt at a time, since a batch of prompts takes as long (§4.2).

    done: Called with each request at its first token, when the copy of its KV to the host starts.
    """

    def __init__(
        self,
        compute: Compute,
        memory: TurnMemory,
        chunk_tokens: int,
        done: Callable[[ModelSetup, SimRequest, TurnMemory], None],
    ) -> None:
        self._compute = compute
        self._memory = memory
        self._chunk_tokens = chunk_tokens
        self._done = done
        self._groups: deque[PromptGroup] = deque()
        self._running: SimRequest | None = None
        # True while a switch or a prefill is in progress.
        self._busy = False
        # End of that switch or prefill.
        self._until_s = 0.0

    def view(self) -> PrefillQueue:
        """Returns the queue's groups and its load according to the cost tables."""
        left_s = max(0.0, self._until_s - self._compute.kernel.time_s)
        load_s = left_s + sum([g.switch_s + g.prompts_s for g in self._groups])
        groups = tuple([PrefillGroup(g.model.name, g.size) for g in self._groups])
        return PrefillQueue(groups, load_s)

    def requests(self) -> list[SimRequest]:
        """Returns all requests on the device."""
        held = [request for group in self._groups for request in group.waiting]
        return held if self._running is None else [self._running, *held]

    def add(self, model: ModelSetup, request: SimRequest, place: int | None) -> None:
        """Adds a request to the group at index `place`, or to a new one if it is None."""
        if place is None:
            last = self._groups[-1].model if self._groups else self._memory.model
            switch_s = 0.0 if model is last else self._memory.switch_s(model)
            self._groups.append(PromptGroup(model, switch_s))
            place = -1
        group = self._groups[place]
        group.waiting.append(request)
        group.prompts_s += self._prompt_s(model, request)
        group.size += 1
        self._next()

    def _next(self) -> None:
        if self._busy:
            return
        while self._groups and not self._groups[0].waiting:
            self._groups.popleft()
        if self._groups:
            group, kernel = self._groups[0], self._compute.kernel
            wait_s = self._memory.switch_to(group.model)
            self._busy, self._until_s = True, kernel.time_s + wait_s
            group.switch_s = 0.0
            kernel.after(wait_s, self._start)

    def _start(self) -> None:
        group, now_s = self._groups[0], self._compute.kernel.time_s
        request = self._running = group.waiting.popleft()
        request.started_s, request.device = now_s, self._memory.device.number
        blocks = blocks_of(group.model, request.prompt_tokens)
        if kv_bytes(group.model, blocks) > self._memory.kv_room_bytes():
            self._memory.drop_prefetched()  # this prompt joined after the prefetch had begun
        self._memory.set_kv(blocks)
        following = next((g.model for g in self._groups if g.model is not group.model), None)
        if following is not None:
            most = max([blocks, *(blocks_of(group.model, r.prompt_tokens) for r in group.waiting)])
            self._memory.prefetch(following, kv_bytes(group.model, most))
        cost = group.model.parts[group.model.tp].cost
        usage = partial(cost.usage, [PromptChunk(request.prompt_tokens)], 0, 0)
        work_s = self._prompt_s(group.model, request)
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
        self._done(self._groups[0].model, request, self._memory)
        self._busy = False
        self._next()

    def _prompt_s(self, model: ModelSetup, request: SimRequest) -> float:
        return prompt_s(model.parts[model.tp].cost, request.prompt_tokens, self._chunk_tokens)
