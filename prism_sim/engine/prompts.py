"""Admitted requests whose prompt is not computed, and the speed at which prompts are computed."""

from __future__ import annotations

from collections import deque

from prism.models.prefill_speed import Speed
from prism_sim.core.kernel import Kernel
from prism_sim.core.request import SimRequest
from prism_sim.core.setup import EngineSettings
from prism_sim.costs.model import CostModel
from prism_sim.engine.kv import KvSpace

# Requests, each with a number of prompt tokens.
Chunks = list[tuple[SimRequest, int]]


class Prompts:
    """Prompts of one engine."""

    def __init__(
        self, kernel: Kernel, kv: KvSpace, settings: EngineSettings, cost: CostModel
    ) -> None:
        self._kernel = kernel
        self._kv = kv
        self._settings = settings
        # Requests with KV for their prompt, oldest first.
        self.ready: deque[SimRequest] = deque()
        # Requests that wait for memory.
        self.retracted: deque[SimRequest] = deque()
        self.speed = Speed()
        chunk_tokens = settings.prefill_chunk_tokens
        self.tokens_per_s = chunk_tokens / cost.prefill_s(chunk_tokens)

    def add(self, request: SimRequest) -> None:
        """Takes KV for the request. Without memory, it waits like a retracted one."""
        if self._kv.hold(request, self._kernel.time_s):
            self.ready.append(request)
        else:
            self._starve(request)

    def recompute(self, request: SimRequest) -> None:
        """Lets a request whose KV is gone wait for memory to compute all of it again."""
        request.forget_kv()
        self._starve(request)

    def readmit(self, running: int, decoding: int) -> bool:
        """Takes KV for retracted requests, oldest first, while it fits. Returns whether any has it.

        Args:
            running: Number of requests in the engine.
            decoding: Number of these in the batch, whose next step must fit too.
        """
        kv, readmitted = self._kv, False
        while self.retracted:
            request = self.retracted[0]
            left = request.output_tokens - request.generated
            headroom = min(left, self._settings.headroom_tokens) if running > 1 else 1
            spare = kv.blocks(request.kv_tokens + headroom) + decoding * kv.step_blocks
            spare -= kv.blocks(request.kv_tokens)
            if not kv.hold(request, self._kernel.time_s, spare):
                return readmitted
            self.ready.append(self.retracted.popleft())
            readmitted = True
        kv.sites[0].starved.discard(kv)
        return readmitted

    def take_retracted(self) -> list[SimRequest]:
        """Removes and returns the requests that wait for memory."""
        left = list(self.retracted)
        self.retracted.clear()
        self._kv.sites[0].starved.discard(self._kv)
        return left

    def _starve(self, request: SimRequest) -> None:
        self.retracted.append(request)
        self._kv.sites[0].starved.add(self._kv)

    def chunks(self) -> Chunks:
        """Returns the requests of the next prefill step, each with a part of its prompt.
        REQUIRES: the first may start."""
        left, now_s = self._settings.prefill_chunk_tokens, self._kernel.time_s
        found: Chunks = []
        for request in self.ready:
            if request.ready_s > now_s:
                break
            tokens = min(left, request.todo_tokens)
            found.append((request, tokens))
            left -= tokens
            if left <= 0:
                break
        return found

    def pending_s(self) -> float:
        """Returns the prefill time of the prompts with KV at the speed measured so far. A partly
        computed prompt counts whole, as in the live system, where the agent learns of a prompt's
        progress with its first token."""
        return sum([request.kv_tokens for request in self.ready]) / self.tokens_per_s

    def measure(self, tokens: int, seconds: float) -> None:
        """Updates the speed that admission assumes. As in the reports of live engines, it includes
        the slowdown by other engines on the GPU."""
        if seconds > 0:
            self.speed.add(tokens, seconds)
            self.tokens_per_s = self.speed.tokens_per_s
