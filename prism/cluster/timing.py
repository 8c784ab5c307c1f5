"""Time limits of the scheduler's process, in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """probe_after_s: an agent that reports nothing for so long is gone if its connection is closed;
    lost_after_s: it is gone in any case. start_grace_s: how long a
    fresh scheduler waits for agents that it has not heard of yet. settle_s: how long after an
    action's result the agent's report may take to show it. activation_s: longer than the agent's
    own limit, which covers engines that are starting. retry_s, retry_max_s: pause after a failed
    activation, doubling; forget_s: without failure for so long, the pause starts over.
    """

    probe_after_s: float = 1.5
    lost_after_s: float = 10.0
    start_grace_s: float = 30.0
    activation_s: float = 180.0
    eviction_slack_s: float = 30.0
    trim_s: float = 10.0
    prefetch_s: float = 280.0
    settle_s: float = 5.0
    retry_s: float = 1.0
    retry_max_s: float = 10.0
    forget_s: float = 60.0
    queue_retry_s: float = 0.5
