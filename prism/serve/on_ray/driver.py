"""The process of `prism-serve up --ray` that talks to Ray. It prints the machines' lines. The last
line is the reason of an end that was not in order. Ray also ends this process when its head is away
for long.

    python -m prism.serve.on_ray.driver              reads a LaunchSpec from standard input
    python -m prism.serve.on_ray.driver ADDRESS      only prints Ray's machines
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import msgspec

from prism.errors import ConfigError
from prism.process import die_with_parent
from prism.serve.on_ray.command import (
    ERROR,
    EXIT_FAILED,
    MACHINES,
    NodeFailedError,
    caught_signals,
)
from prism.serve.on_ray.membership import LEAVE_S, Membership
from prism.serve.on_ray.node_actor import NodeActor, NodeReport
from prism.serve.on_ray.ray_machines import (
    LaunchSpec,
    Layout,
    Placement,
    RayMachine,
    layout,
    machines_with_devices,
    normalized,
)
from prism.serve.processes.children import EXIT_CONFIG, RestartBackoff

_POLL_S = 0.5
_ANSWER_S = 30.0
_RESERVE_S = 15.0
_CHECK_S = 3.0
_STOP_S = 120.0
_LOST_S = 60.0
_CHANGE_S = 180.0  # exceeds the timeout of a reload
_NOT_FOUND = "Could not find any running Ray"  # Ray's message


@dataclass(slots=True)
class Node:
    """A node of the file, its reservation in Ray, and its actor."""

    placement: Placement
    group: Any = None
    actor: Any = None  # None: its machine is lost, or its restart is delayed
    backoff: RestartBackoff = field(default_factory=RestartBackoff)
    start_at_s: float = 0.0
    last_line: str = ""
    follows: bool | None = True  # it uses the present layout, by its last report
    is_new: bool = False  # a launcher that is found there is older than its removal

    @property
    def name(self) -> str:
        return self.placement.name


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the machines in progress."""

    machines: list[RayMachine]
    before: Layout  # restored if a node rejects the change


class NoRayError(ConfigError):
    """The machine is not part of a Ray cluster."""


class RayCluster:
    """The actors of all nodes. `ray` is the connected module."""

    def __init__(self, ray: Any, spec: LaunchSpec, say: Callable[[str], None]) -> None:
        """Raises ConfigError."""
        self._ray, self._spec, self._say = ray, spec, say
        self._layout = layout(spec.file, spec.machines)  # layout for all nodes
        self._nodes = [Node(placement) for placement in self._layout.placements]
        named = machines_with_devices(spec.file, []) is None
        self._membership = None if named else Membership(spec.machines)
        self._change: Change | None = None
        self._settled = spec.settled
        self._answered_s = time.monotonic()
        self._checked_s = self._sent_s = 0.0

    def run(self, signals: Sequence[int]) -> None:
        """Runs until a signal is in `signals`. Raises ConfigError, NodeFailedError, or a
        RayError."""
        try:
            while not signals:
                began_s = time.monotonic()
                self._step()
                if not self._settled or self._answered_s >= began_s:
                    self._say("")  # Ray answers
                elif time.monotonic() - self._answered_s > _LOST_S:
                    raise NodeFailedError(f"no machine has answered for {_LOST_S:g} s")
                time.sleep(_POLL_S)
        finally:
            if signals or not self._settled:  # otherwise the machines keep working
                self._stop(signals)

    def _step(self) -> None:
        now_s, present = time.monotonic(), None
        for node in self._nodes:
            if node.actor is not None:
                self._poll(node)
            elif now_s >= node.start_at_s:
                present = (
                    {each.address for each in machines(self._ray)} if present is None else present
                )
                node.start_at_s = now_s + _CHECK_S
                if node.placement.address in present and self._reserve(node):
                    node.actor = self._start(node)
        if self._settled and self._membership is not None:
            self._check_changes(self._membership, now_s)

    def _reserve(self, node: Node) -> bool:
        """Reserves a bundle for each device, all on the node's machine. Returns False if that is
        not possible now. Raises ConfigError at the first start."""
        from ray.util.placement_group import placement_group, remove_placement_group

        here = {f"node:{node.placement.address}": 0.001}
        node.group = placement_group([here, *node.placement.bundles], strategy="STRICT_PACK")
        if node.group.wait(_RESERVE_S):
            return True
        remove_placement_group(node.group)
        if not self._settled:
            raise ConfigError(
                f"node {node.name}: Ray has reserved devices of {node.placement.address} for other"
                " jobs; end these (ray status), or remove devices"
            )
        self._say(f"{node.name}: Ray cannot reserve its devices; retrying")
        return False

    def _start(self, node: Node) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        here = {f"node:{node.placement.address}": 0.001}
        remote = self._ray.remote(num_cpus=0, resources=here, max_restarts=0)(NodeActor)
        where = PlacementGroupSchedulingStrategy(node.group, placement_group_bundle_index=0)
        return remote.options(scheduling_strategy=where).remote(
            self._layout.text, self._spec.key, node.name, self._spec.options
        )

    def _poll(self, node: Node) -> None:
        try:
            report = cast(NodeReport, self._ray.get(node.actor.poll.remote(), timeout=_ANSWER_S))
        except self._ray.exceptions.GetTimeoutError:
            return  # unreachable; Ray reports whether it is lost
        except self._ray.exceptions.RayError as error:
            self._say(f"{node.name}: Ray lost it ({type(error).__name__})")
            self._schedule_restart(node)
            return
        self._answered_s, node.follows = time.monotonic(), report.follows
        if node.is_new and not report.follows:
            node.actor.signal.remote(int(signal.SIGTERM))  # it may reject the new order
        node.is_new = False
        for line in report.lines:
            node.last_line = line
            self._say(f"{node.name}: {line}")
            self._settled |= line.startswith("ready in ")
        if report.code is not None:
            self._ended(node, report.code)

    def _ended(self, node: Node, code: int) -> None:
        self._ray.kill(node.actor)
        if not self._settled:
            node.actor, why = None, node.last_line.removeprefix(ERROR)
            if code == EXIT_CONFIG:
                raise ConfigError(f"node {node.name}: {why}")
            raise NodeFailedError(f"node {node.name} ended with {code}: {why}")
        self._say(f"{node.name}: ended; restarting")
        self._schedule_restart(node)

    def _schedule_restart(self, node: Node) -> None:
        from ray.util.placement_group import remove_placement_group

        now_s = time.monotonic()
        remove_placement_group(node.group)
        node.actor, node.start_at_s = None, now_s + node.backoff.died(now_s)

    # --- added and removed machines -------------------------------------------------------------

    def _check_changes(self, membership: Membership, now_s: float) -> None:
        """Advances changes of the machines, one at a time: the next one starts when all running
        nodes use the present layout."""
        if now_s - self._checked_s < _CHECK_S:
            return
        self._checked_s = now_s
        membership.observe(machines_with_devices(self._spec.file, machines(self._ray)) or [], now_s)
        reported = [node.follows for node in self._nodes if node.actor is not None]
        late = now_s - self._sent_s > _CHANGE_S
        if self._change is not None:
            if all(reported):
                self._complete_change(membership, self._change)
            elif False in reported or late:
                self._revert_change(membership, self._change, now_s)
        elif not all(reported):
            if late:
                self._send_layout(self._layout)
        elif (wanted := membership.wanted(now_s)) is not None:
            self._start_change(membership, wanted, now_s)

    def _start_change(self, membership: Membership, wanted: list[RayMachine], now_s: float) -> None:
        try:
            found = layout(self._spec.file, wanted)
        except ConfigError as error:
            again_s = membership.rejected(wanted, now_s)
            self._say(f"{error}; retrying the new nodes in {again_s:g} s")
            return
        self._change = Change(wanted, self._layout)
        self._send_layout(found)

    def _send_layout(self, wanted: Layout) -> None:
        self._layout, self._sent_s = wanted, time.monotonic()
        for node in self._nodes:
            if node.actor is not None:
                node.follows = None
                node.actor.follow.remote(wanted.text)

    def _complete_change(self, membership: Membership, change: Change) -> None:
        """Completes a change that the running nodes have taken over. New nodes start afterwards. A
        removed node does not have an actor, since its machine is away."""
        known = {node.name: node for node in self._nodes}
        places = {place.name: place for place in self._layout.placements}
        for name in places.keys() - known.keys():
            self._say(f"{name}: found by Ray; joining")
        for name in known.keys() - places.keys():
            self._say(f"{name}: missing in Ray for {LEAVE_S:g} s; removed")
        self._nodes = [known.get(n) or Node(place, is_new=True) for n, place in places.items()]
        self._change = None
        membership.applied(change.machines)
        self._say(f"{MACHINES}{msgspec.json.encode(change.machines).decode()}")

    def _revert_change(self, membership: Membership, change: Change, now_s: float) -> None:
        again_s = membership.rejected(change.machines, now_s)
        self._say(f"not all machines accepted the new nodes; retrying in {again_s:g} s")
        self._change = None
        self._send_layout(change.before)

    # --- the end ----------------------------------------------------------------------------

    def _stop(self, signals: Sequence[int]) -> None:
        """Waits until all nodes have ended, which the lease asked for. Sends them SIGTERM by Ray
        for each SIGINT, by which `command.py` reports that Redis does not answer, or after a failed
        start."""
        until_s, sent = time.monotonic() + _STOP_S, 0
        left = [node for node in self._nodes if node.actor is not None]
        while left and time.monotonic() < until_s:
            if sent < (list(signals).count(signal.SIGINT) if signals else 1):
                sent += 1
                for node in left:
                    node.actor.signal.remote(int(signal.SIGTERM))
            left = [node for node in left if not self._has_ended(node)]
            time.sleep(_POLL_S)
        for node in left:
            self._say(f"{node.name} did not end in time")
            self._ray.kill(node.actor)

    def _has_ended(self, node: Node) -> bool:
        try:
            report = cast(NodeReport, self._ray.get(node.actor.poll.remote(), timeout=_ANSWER_S))
            for line in report.lines:
                self._say(f"{node.name}: {line}")
            if report.code is None:
                return False
            self._ray.kill(node.actor)
        except self._ray.exceptions.RayError:
            pass  # its machine is lost, with all its processes
        return True


def machines(ray: Any) -> list[RayMachine]:
    """Returns Ray's live machines."""
    return [
        RayMachine(normalized(each["NodeManagerAddress"]), each["Resources"])
        for each in ray.nodes()
        if each["Alive"]
    ]


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Connects to Ray within the block. Raises ConfigError or NodeFailedError."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    try:
        ray.init(address=address, namespace="prism", log_to_driver=False, configure_logging=False)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        if why.startswith(_NOT_FOUND):
            raise NoRayError(why) from error
        raise ConfigError(
            f"ray: no Ray cluster answers at {address}: {why}; start one with ray start --head, and"
            " use the same token here (~/.ray/auth_token, or RAY_AUTH_TOKEN)"
        ) from error
    try:
        yield ray
    except ray.exceptions.RayError as error:
        raise NodeFailedError(str(error).splitlines()[0]) from error
    finally:
        ray.shutdown()


def _machines_at(address: str) -> list[RayMachine]:
    """Returns Ray's live machines. Empty without a Ray cluster, if `address` is auto."""
    try:
        with _connected(address) as ray:
            return machines(ray)
    except NoRayError:
        return []


def _print_error(problem: Exception, code: int) -> int:
    """Prints the reason of the end, and returns the exit code."""
    print(f"{ERROR}{problem}", flush=True)
    return code


def main() -> int:
    """Returns the exit code: 0 after a signal, 2 for a wrong setting, 3 for a failure of a node or
    Ray."""
    die_with_parent()
    # stderr has Ray's output, of which there is much when its head ends.
    sys.excepthook = partial(traceback.print_exception, file=sys.stdout)
    try:
        if sys.argv[1:]:
            print(msgspec.json.encode(_machines_at(sys.argv[1])).decode(), flush=True)
            return 0
        spec = msgspec.json.decode(sys.stdin.buffer.read(), type=LaunchSpec)
        # Ray installs signal handlers, which these replace.
        with _connected(spec.address) as ray, caught_signals() as signals:
            RayCluster(ray, spec, partial(print, flush=True)).run(signals)
    except ConfigError as error:
        return _print_error(error, EXIT_CONFIG)
    except NodeFailedError as error:
        return _print_error(error, EXIT_FAILED)
    return 0


if __name__ == "__main__":
    sys.exit(main())
