"""Virtual queues, which bind requests to devices before their model is active there (QLM §4).

The live cluster scheduler and the simulator run the same code. Their adapters build the
`QueueView`, and start the requests that `VirtualQueues.starting` selects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prism.policies.queues import Assign, QueueView, RequestGroup, VirtualQueue

ASSIGN_S_PER_REQUEST = 1e-4
"""Minimum time between two assignments per waiting request, as in `LocalScheduler`."""


class VirtualQueues:
    """Virtual queues of one cluster. Step-driven: owns no clock, and no requests."""

    def __init__(self, assign: Assign) -> None:
        self._assign = assign
        self.queues: tuple[VirtualQueue, ...] = ()
        self.due_s = 0.0
        """Time from which the next assignment is due, if requests or devices have changed."""

    def update(self, view: QueueView) -> None:
        """Assigns all waiting requests to queues. REQUIRES: it is due, and `view` has `queues`."""
        self.queues = self._assign(view)
        self.due_s = view.now_s + len(view.waiting) * ASSIGN_S_PER_REQUEST

    def starting(self, is_active: Callable[[str, str], bool]) -> Iterator[tuple[str, RequestGroup]]:
        """Yields the leading groups whose model is active, with the device of their queue.

        They stay in `queues` until the next assignment, without the requests that have started.

        Args:
            is_active: (device, model) -> whether the model is active there.
        """
        for queue in self.queues:
            for group in queue.groups:
                if not is_active(queue.device, group.model):
                    break
                yield queue.device, group


def tokens_per_s(
    decode_s: Callable[[int], float], room_bytes: float, request_bytes: float, batch_max: int
) -> float:
    """Returns the output tokens per second at the largest batch whose KV fits.

    Args:
        decode_s: Number of requests -> time of a decode step.
        room_bytes: Memory for KV.
        request_bytes: KV of a request of mean length.
        batch_max: Requests that an engine runs at once.
    """
    batch = max(1, min(batch_max, int(room_bytes / max(1.0, request_bytes))))
    return batch / decode_s(batch)
