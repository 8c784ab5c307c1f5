"""Time limits of the agent, in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """lease_ttl_s: the queue is free for another agent this long after we died.
    lease_wait_s: how long a fresh agent waits for an earlier one's lease to run out.
    tick_s: how often time limits are looked at. retry_s: pause after Redis did not answer.
    silent_s: an engine without a message for so long is killed; hello_s, activation_s: the same
    while it starts and while it loads a model, when it cannot send. away_s: an agent that looks at
    time limits so late was stopped itself, and counts no engine's silence of that time.
    absent_grace_s: how long requests wait for a model that is not here, since the queue is often
    faster than the scheduler's order to activate; failed_grace_s: the same where it failed.
    frontend_missing_s: a frontend whose heartbeat is gone for so long is dead.
    reclaim_s: an engine that was asked for memory and has not answered for so long is not counted
    on; flush_s: how long an order to give everything back waits for it; memory_retry_s: pause
    before an activation that lacked memory is tried again, memory_tries times.
    revive_window_s, revives_max: a model whose engines die more often than that in that window is
    reported as failed instead of being activated again.
    sweep_s: how often KV that nobody came for is looked for.
    fork_retry_s, fork_retry_max_s: pause after an engine died before it was ready, doubling.
    """

    lease_ttl_s: float = 5.0
    lease_wait_s: float = 30.0
    tick_s: float = 0.1
    retry_s: float = 0.2
    silent_s: float = 20.0
    away_s: float = 2.0
    hello_s: float = 60.0
    activation_s: float = 150.0
    absent_grace_s: float = 3.0
    failed_grace_s: float = 0.5
    frontend_check_s: float = 1.0
    frontend_missing_s: float = 3.0
    reclaim_s: float = 1.0
    flush_s: float = 5.0
    memory_retry_s: float = 0.3
    memory_tries: int = 3
    revive_window_s: float = 60.0
    revives_max: int = 3
    fork_retry_s: float = 0.5
    fork_retry_max_s: float = 30.0
    nursery_stop_s: float = 15.0
    sweep_s: float = 30.0
