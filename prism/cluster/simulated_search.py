"""Placement search of a policy that simulates placements (AlpaServe §4.2, SeaLLM §4.1).

The simulator is another package, an entry point of `registry.SIMULATORS`. A search takes seconds to
minutes and holds the interpreter, so each runs in a process of lower priority, which ends with
the scheduler's.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import replace

import msgspec

from prism.config.policy_knobs import own_knobs
from prism.config.resolved import read_back
from prism.config.schema.cluster_config import ClusterConfig
from prism.config.schema.units import Bytes, Seconds
from prism.errors import PlacementSearchError
from prism.policies import profiles, registry
from prism.policies.data import ClusterView
from prism.policies.placement import Placement, Simulate, better
from prism.process import child_environment, die_with_parent, set_process_name

Simulator = Callable[[ClusterConfig, ClusterView], Simulate]
"""Returns a simulation of the traffic that the view's models have, on a cluster of this
configuration and under its policy, as a function of the placement."""
NICENESS = 5
"""Lower priority than that of other processes: engines of host devices may use all cores."""


class SearchInput(msgspec.Struct, frozen=True):
    """Input of a search. A placement that is not better than the view's target does not replace
    it."""

    config: ClusterConfig
    view: ClusterView


async def search(given: SearchInput) -> Placement:
    """Searches in a new process, which a cancellation ends. Raises PlacementSearchError if it
    fails."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "prism.cluster.simulated_search",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=child_environment(),
    )
    try:
        found, _ = await process.communicate(msgspec.msgpack.encode(given, enc_hook=_number))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise PlacementSearchError(
            f"the placement search of {given.config.policy} ended with status"
            f" {process.returncode}; its error is above"
        )
    return msgspec.msgpack.decode(found, type=Placement)


def _number(value: Bytes | Seconds) -> int | float:
    """Encodes sizes and times as plain numbers, as msgspec's `enc_hook`."""
    return +value


def found_by(given: SearchInput) -> Placement:
    """Returns the result of the policy's search. Raises ConfigError without a simulator."""
    config, view = given.config, given.view
    policy = registry.with_knobs(
        registry.get(config.policy), own_knobs(config.policy, config.knobs)
    )
    simulator: Simulator = registry.simulator(policy.name).load()
    problem = replace(profiles.problem(view), simulate=simulator(config, view))
    assert policy.search is not None
    found = policy.search(problem)
    return found if view.target is None else better(problem, view.target, found)


def main() -> int:
    """Reads a SearchInput from stdin and writes the placement to stdout."""
    die_with_parent()
    set_process_name("prism-search")
    os.nice(NICENESS)
    given = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=SearchInput, dec_hook=read_back)
    sys.stdout.buffer.write(msgspec.msgpack.encode(found_by(given)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
