"""The process of `prism-serve up --ray` that talks to Ray. It prints the machines' lines; the last
one says why it ends, if that is not in order. Ray ends it, too, when its head has gone for long.

    python -m prism.serve.on_ray.driver              the LaunchSpec is on its standard input
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
from prism.serve.children import EXIT_CONFIG, RestartBackoff
from prism.serve.on_ray.command import (
    ERROR,
    EXIT_FAILED,
    MACHINES,
    NodeFailedError,
    caught_signals,
)
from prism.serve.on_ray.machines import (
    LaunchSpec,
    Layout,
    Placement,
    RayMachine,
    layout,
    plain,
    usable,
)
from prism.serve.on_ray.membership import LEAVE_S, Membership
from prism.serve.on_ray.node_actor import NodeActor, NodeReport

_POLL_S = 0.5
_ANSWER_S = 30.0
_RESERVE_S = 15.0
_LOOK_FOR_S = 3.0
_STOP_S = 120.0
_LOST_S = 60.0
_CHANGE_S = 180.0  # more than a reload may take
_NOT_FOUND = "Could not find any running Ray"  # Ray's own words


@dataclass(slots=True)
class Node:
    """A node of the file, what Ray has reserved for it, and its actor."""

    placement: Placement
    group: Any = None
    actor: Any = None  # None: its machine is lost, or it has to wait for its next start
    backoff: RestartBackoff = field(default_factory=RestartBackoff)
    start_at_s: float = 0.0
    last_line: str = ""
    follows: bool | None = True  # the present layout, as its last report says
    is_new: bool = False  # a launcher that is found there is from before it left

    @property
    def name(self) -> str:
        return self.placement.name


@dataclass(frozen=True, slots=True)
class Change:
    """Of the machines, under way. before: what is asked for again if one refuses it."""

    machines: list[RayMachine]
    before: Layout


class NoRayError(ConfigError):
    """This machine is part of no Ray cluster."""


class RayCluster:
    """The actors of all nodes. `ray`: the module, connected."""

    def __init__(self, ray: Any, spec: LaunchSpec, say: Callable[[str], None]) -> None:
        """Raises ConfigError."""
        self._ray, self._spec, self._say = ray, spec, say
        self._layout = layout(spec.file, spec.machines)  # what all are to follow
        self._nodes = [Node(placement) for placement in self._layout.placements]
        named = usable(spec.file, []) is None
        self._membership = None if named else Membership(spec.machines)
        self._change: Change | None = None
        self._settled = spec.settled
        self._answered_s = time.monotonic()
        self._looked_s = self._asked_s = 0.0

    def run(self, asked: Sequence[int]) -> None:
        """Until a signal is in `asked`. Raises ConfigError, NodeFailedError, or a RayError."""
        try:
            while not asked:
                began_s = time.monotonic()
                self._turn()
                if not self._settled or self._answered_s >= began_s:
                    self._say("")  # Ray is there
                elif time.monotonic() - self._answered_s > _LOST_S:
                    raise NodeFailedError(f"no machine has answered for {_LOST_S:g} s")
                time.sleep(_POLL_S)
        finally:
            if asked or not self._settled:  # else the machines work on
                self._stop(asked)

    def _turn(self) -> None:
        now_s, there = time.monotonic(), None
        for node in self._nodes:
            if node.actor is not None:
                self._poll(node)
            elif now_s >= node.start_at_s:
                there = {each.address for each in machines(self._ray)} if there is None else there
                node.start_at_s = now_s + _LOOK_FOR_S
                if node.placement.address in there and self._reserve(node):
                    node.actor = self._start(node)
        if self._settled and self._membership is not None:
            self._look_for_change(self._membership, now_s)

    def _reserve(self, node: Node) -> bool:
        """A bundle for each device, all on its machine. Raises ConfigError at the first start."""
        from ray.util.placement_group import placement_group, remove_placement_group

        here = {f"node:{node.placement.address}": 0.001}
        node.group = placement_group([here, *node.placement.bundles], strategy="STRICT_PACK")
        if node.group.wait(_RESERVE_S):
            return True
        remove_placement_group(node.group)
        if not self._settled:
            raise ConfigError(
                f"node {node.name}: Ray has promised devices of {node.placement.address} to others;"
                " end these (ray status), or take devices out"
            )
        self._say(f"{node.name}: Ray cannot reserve its devices; tried again")
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
            return  # it is cut off; Ray says whether it is lost
        except self._ray.exceptions.RayError as error:
            self._say(f"{node.name}: Ray has lost it ({type(error).__name__})")
            self._again(node)
            return
        self._answered_s, node.follows = time.monotonic(), report.follows
        if node.is_new and not report.follows:
            node.actor.signal.remote(int(signal.SIGTERM))  # it may not take the new order over
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
        self._say(f"{node.name}: ended; it is started again")
        self._again(node)

    def _again(self, node: Node) -> None:
        from ray.util.placement_group import remove_placement_group

        now_s = time.monotonic()
        remove_placement_group(node.group)
        node.actor, node.start_at_s = None, now_s + node.backoff.died(now_s)

    # --- machines that come and go --------------------------------------------------------------

    def _look_for_change(self, membership: Membership, now_s: float) -> None:
        """One change after the other: the next one when all that run follow the present layout."""
        if now_s - self._looked_s < _LOOK_FOR_S:
            return
        self._looked_s = now_s
        membership.seen(usable(self._spec.file, machines(self._ray)) or [], now_s)
        said = [node.follows for node in self._nodes if node.actor is not None]
        late = now_s - self._asked_s > _CHANGE_S
        if self._change is not None:
            if all(said):
                self._took(membership, self._change)
            elif False in said or late:
                self._take_back(membership, self._change, now_s)
        elif not all(said):
            if late:
                self._ask(self._layout)
        elif (wanted := membership.wanted(now_s)) is not None:
            self._begin(membership, wanted, now_s)

    def _begin(self, membership: Membership, wanted: list[RayMachine], now_s: float) -> None:
        try:
            found = layout(self._spec.file, wanted)
        except ConfigError as error:
            again_s = membership.refused(wanted, now_s)
            self._say(f"{error}; the new nodes are tried again in {again_s:g} s")
            return
        self._change = Change(wanted, self._layout)
        self._ask(found)

    def _ask(self, wanted: Layout) -> None:
        self._layout, self._asked_s = wanted, time.monotonic()
        for node in self._nodes:
            if node.actor is not None:
                node.follows = None
                node.actor.follow.remote(wanted.text)

    def _took(self, membership: Membership, change: Change) -> None:
        """Machines start when the others know them. One that goes has no actor: it is away."""
        known = {node.name: node for node in self._nodes}
        places = {place.name: place for place in self._layout.placements}
        for name in places.keys() - known.keys():
            self._say(f"{name}: Ray has it; it joins")
        for name in known.keys() - places.keys():
            self._say(f"{name}: Ray has not had it for {LEAVE_S:g} s; it is no node any more")
        self._nodes = [known.get(n) or Node(place, is_new=True) for n, place in places.items()]
        self._change = None
        membership.took(change.machines)
        self._say(f"{MACHINES}{msgspec.json.encode(change.machines).decode()}")

    def _take_back(self, membership: Membership, change: Change, now_s: float) -> None:
        again_s = membership.refused(change.machines, now_s)
        self._say(f"not all machines take the new nodes over; tried again in {again_s:g} s")
        self._change = None
        self._ask(change.before)

    # --- the end ----------------------------------------------------------------------------

    def _stop(self, asked: Sequence[int]) -> None:
        """Until all nodes have ended, which the lease has told them to. SIGINT: it could not, and
        Ray is to. Nobody asked: this is the end of a start that failed."""
        until_s, sent = time.monotonic() + _STOP_S, 0
        left = [node for node in self._nodes if node.actor is not None]
        while left and time.monotonic() < until_s:
            if sent < (list(asked).count(signal.SIGINT) if asked else 1):
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
            pass  # its machine is lost, and all on it
        return True


def machines(ray: Any) -> list[RayMachine]:
    """Those that live."""
    return [
        RayMachine(plain(each["NodeManagerAddress"]), each["Resources"])
        for each in ray.nodes()
        if each["Alive"]
    ]


@contextmanager
def _connected(address: str) -> Iterator[Any]:
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
            " have the same token here (~/.ray/auth_token, or RAY_AUTH_TOKEN)"
        ) from error
    try:
        yield ray
    except ray.exceptions.RayError as error:
        raise NodeFailedError(str(error).splitlines()[0]) from error
    finally:
        ray.shutdown()


def _machines_at(address: str) -> list[RayMachine]:
    """None where `address` is auto and there is no Ray."""
    try:
        with _connected(address) as ray:
            return machines(ray)
    except NoRayError:
        return []


def _end_with(problem: Exception, code: int) -> int:
    print(f"{ERROR}{problem}", flush=True)
    return code


def main() -> int:
    """Exit codes: 0 after a signal, 2 for a wrong setting, 3 for a node's or Ray's failure."""
    die_with_parent()
    # What is on stderr is Ray's, which has much to say when its head goes.
    sys.excepthook = partial(traceback.print_exception, file=sys.stdout)
    try:
        if sys.argv[1:]:
            print(msgspec.json.encode(_machines_at(sys.argv[1])).decode(), flush=True)
            return 0
        spec = msgspec.json.decode(sys.stdin.buffer.read(), type=LaunchSpec)
        # Ray has handlers of its own.
        with _connected(spec.address) as ray, caught_signals() as asked:
            RayCluster(ray, spec, partial(print, flush=True)).run(asked)
    except ConfigError as error:
        return _end_with(error, EXIT_CONFIG)
    except NodeFailedError as error:
        return _end_with(error, EXIT_FAILED)
    return 0


if __name__ == "__main__":
    sys.exit(main())
