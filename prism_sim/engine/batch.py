"""Decode batch of an engine, advanced many steps at once.

Every member gets one token per step, so no state is kept per step: a member stores the step at
which it ends, and the step number determines when it needs a new KV block.
"""

from __future__ import annotations

import heapq

from prism_sim.core.request import SimRequest
from prism_sim.core.setup import KvNeed


class Batch:
    """Requests that decode together. A member's KV grows by one token at the start of each step."""

    __slots__ = (
        "_ends",
        "_fills",
        "_need",
        "_serial",
        "_young",
        "block_tokens",
        "context_tokens",
        "deferred",
        "members",
        "step",
    )

    def __init__(self, need: KvNeed) -> None:
        self._need = need
        self.block_tokens = block_tokens = need.block_tokens
        # Number of decode steps so far.
        self.step = 0
        # KV tokens of all members before the next step.
        self.context_tokens = 0
        self.members: dict[int, SimRequest] = {}
        # Requests that join after the step in flight.
        self.deferred: list[SimRequest] = []
        # Index: step % block_tokens. Value: number of members that need a new block at that step.
        self._fills = [0] * block_tokens
        # Members whose KV is shorter than a window, where it grows too.
        self._young: dict[int, SimRequest] = {}
        self._ends: list[tuple[int, int, SimRequest]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self.members)

    def join(self, request: SimRequest) -> None:
        """Adds a request. REQUIRES: at least one of its tokens is left to decode."""
        request.join_step = self.step
        request.end_step = self.step + request.output_tokens - request.generated
        self.members[request.index] = request
        self.context_tokens += request.kv_tokens
        self._fills[(self.step - request.kv_tokens) % self.block_tokens] += 1
        if request.kv_tokens < self._need.window_tokens:
            self._young[request.index] = request
        self._serial += 1
        heapq.heappush(self._ends, (request.end_step, self._serial, request))

    def join_deferred(self) -> None:
        """Adds the deferred requests, in order."""
        for request in self.deferred:
            self.join(request)
        self.deferred.clear()

    def leave(self, request: SimRequest) -> None:
        """Removes a request and updates its counts to the steps so far. It may join again."""
        del self.members[request.index]
        self._young.pop(request.index, None)
        self._settle(request)
        self.context_tokens -= request.kv_tokens
        self._fills[(self.step - request.kv_tokens) % self.block_tokens] -= 1
        request.end_step = -1

    def newest(self) -> SimRequest:
        """Returns the member that joined last, which is retracted first."""
        return next(reversed(self.members.values()))

    def steps_to_end(self) -> int:
        """Returns the number of steps until the first member ends. REQUIRES: not empty."""
        while True:
            end_step, _, request = self._ends[0]
            if request.end_step == end_step and request.index in self.members:
                return end_step - self.step
            heapq.heappop(self._ends)

    def new_blocks(self, steps: int) -> int:
        """Returns the number of KV blocks that the next `steps` steps take."""
        size, fills = self.block_tokens, self._fills
        first = self.step % size
        found = self._new_in_windows(steps) if self._young else 0
        if steps == 1:
            return found + fills[first]
        rounds, rest = divmod(steps, size)
        found += rounds * len(self.members) + sum(fills[first : first + rest])
        return found + sum(fills[: first + rest - size]) if first + rest > size else found

    def _new_in_windows(self, steps: int) -> int:
        """Returns the blocks that the next `steps` steps take besides the main pool."""
        blocks, size = self._need.blocks, self.block_tokens
        taken = 0
        for request in self._young.values():
            before = request.kv_tokens + self.step - request.join_step
            after = before + steps
            taken += blocks(after) - -(-after // size) - (blocks(before) - -(-before // size))
        return taken

    def steps_within(self, blocks: int, steps: int) -> int:
        """Returns the largest part of `steps` that takes at most `blocks`; at least 1."""
        low, high = 1, steps
        while low < high:
            middle = (low + high + 1) // 2
            if self.new_blocks(middle) <= blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def advance(self, steps: int) -> list[SimRequest]:
        """Completes `steps` steps. Returns the members that end with the last step, in the order of
        joining. REQUIRES: steps <= steps_to_end()."""
        self.step += steps
        self.context_tokens += steps * len(self.members)
        for request in list(self._young.values()):
            tokens = request.kv_tokens + self.step - request.join_step
            if tokens >= self._need.window_tokens:
                del self._young[request.index]
        ended = []
        while self.members and self.steps_to_end() == 0:
            request = heapq.heappop(self._ends)[2]
            self.leave(request)
            ended.append(request)
        return ended

    def _settle(self, request: SimRequest) -> None:
        """Updates the request's counts to the present step."""
        steps = self.step - request.join_step
        request.generated += steps
        request.kv_tokens += steps
        request.join_step = self.step
