"""What an engine has in flight: a prefill step, or a run of decode steps."""

from __future__ import annotations

from dataclasses import dataclass

from prism.sim.compute import Job
from prism.sim.request import Request


@dataclass(slots=True)
class Flight:
    """What a job in flight does: a prefill step, or `steps` decode steps. It began as run_steps of
    them, which take `blocks` of KV in all. done: of the steps, at seen_s."""

    job: Job
    chunks: list[tuple[Request, int]]
    steps: int = 0
    context_tokens: int = 0
    run_steps: int = 0
    blocks: int = 0
    allocated: int = 0
    allocated_blocks: int = 0
    done: int = 0
    seen_s: float = -1.0
