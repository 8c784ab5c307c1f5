"""Time limits of the scheduler's process."""

from __future__ import annotations

from dataclasses import dataclass

from prism.config.schema.cluster_config import ClusterConfig

_ANSWER_S = 30.0  # margin, so that the agent's own limit expires first


@dataclass(frozen=True, slots=True)
class SchedulerTiming:
    probe_after_s: float = 1.5  # an agent silent for this long is lost if it has disconnected
    lost_after_s: float = 10.0  # an agent silent for this long is lost in any case
    start_grace_s: float = 30.0  # time for agents that never reported, after the scheduler's start
    activation_s: float = 180.0  # more than the agent's own limit, see `timing_of`
    eviction_slack_s: float = 30.0
    trim_s: float = 10.0
    prefetch_s: float = 280.0
    settle_s: float = 5.0  # longest delay of an agent's report after an action's result
    retry_s: float = 1.0  # pause after a failed activation; it doubles with each failure
    retry_max_s: float = 10.0  # longest pause
    retry_lasting_max_s: float = 600.0  # longest pause of a model that cannot be loaded
    forget_s: float = 60.0  # time after a pause without a failure that resets the pause
    queue_retry_s: float = 0.5


def timing_of(config: ClusterConfig) -> SchedulerTiming:
    """Returns the time limits for a configuration."""
    return SchedulerTiming(activation_s=config.engine.activation_timeout_s + _ANSWER_S)
