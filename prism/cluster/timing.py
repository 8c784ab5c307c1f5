"""Time limits of the scheduler's process, in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from prism.config.schema import ClusterConfig

_ANSWER_S = 30.0  # for the agent's own limit to be noticed first


@dataclass(frozen=True, slots=True)
class SchedulerTiming:
    probe_after_s: float = 1.5  # an agent silent for this long is gone if it has disconnected
    lost_after_s: float = 10.0  # an agent silent for this long is gone in any case
    start_grace_s: float = 30.0  # a fresh scheduler waits this long for agents that never reported
    activation_s: float = 180.0  # more than the agent's own limit, see `timing_of`
    eviction_slack_s: float = 30.0
    trim_s: float = 10.0
    prefetch_s: float = 280.0
    settle_s: float = 5.0  # an agent's report may follow this long after an action's result
    retry_s: float = 1.0  # pause after a failed activation; it doubles with each failure
    retry_max_s: float = 10.0  # longest pause
    forget_s: float = 60.0  # without a failure for this long, the pause starts over
    queue_retry_s: float = 0.5


def timing_of(config: ClusterConfig) -> SchedulerTiming:
    """With the limits that the configuration sets."""
    return SchedulerTiming(activation_s=config.engine.activation_timeout_s + _ANSWER_S)
