"""`prism-serve up --ray`: Ray runs a `prism-serve` on each of its nodes that the file names.

The driver is this process. Ray places the parts, ends them with the driver, and says which nodes
are there: a node that is lost and comes back gets its part again. Each part looks after its own
processes, and among themselves they are a cluster of several machines like any other.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import yaml

from prism.config.machines import NodeYaml, is_gpu
from prism.config.nodes import nodes_of
from prism.config.reader import read_mapping, read_yaml
from prism.curve import new_secret
from prism.errors import ConfigError, PrismError
from prism.serve.children import EXIT_CONFIG, RestartBackoff
from prism.serve.node_part import NodePart, Said

_LOOK_S = 0.5
_ANSWER_S = 30.0
_STOP_S = 120.0
_PATHS = (("access", "keys"), ("frontend", "tls_certificate"), ("frontend", "tls_key"))


class NodeFailedError(PrismError):
    """A node's part has ended before the cluster was ready."""


@dataclass(slots=True)
class Placed:
    """A node of the file, and its part."""

    node: NodeYaml
    actor: Any = None  # None: its machine is lost, or it has to wait for its next start
    backoff: RestartBackoff = field(default_factory=RestartBackoff)
    start_at_s: float = 0.0


def serve(path: Path, address: str, options: Sequence[str], say: Callable[[str], None]) -> None:
    """Until a signal; then nothing is left on any node. `address`: "auto" for the Ray cluster of
    this machine, or its HOST:PORT. `options`: of each node's `prism-serve`.

    Raises ConfigError (nothing was left running) or NodeFailedError. Main thread only.
    """
    ray = _ray()
    data = read_yaml(path)
    nodes_of(data)
    if not data.nodes:
        raise ConfigError(f"{path}: nodes: with --ray there must be some; name Ray's machines")
    if data.cluster_key is not None:
        raise ConfigError(f"{path}: cluster_key: Ray hands a new one out; leave the key out")
    text = portable(read_mapping(path), path.absolute().parent)
    with _connected(ray, address):
        cluster = RayCluster(ray, data.nodes, text, options, say)
        with _signals() as asked:
            cluster.run(asked)


def portable(data: Mapping[str, Any], folder: Path) -> str:
    """The file without relative paths."""

    def absolute(value: str) -> str:
        return str((folder / Path(value).expanduser()).resolve())

    whole = dict(data)
    whole["models"] = [{**model, "path": absolute(model["path"])} for model in data["models"]]
    for section, key in _PATHS:
        if (value := whole.get(section, {}).get(key)) is not None:
            whole[section] = {**whole[section], key: absolute(value)}
    store = whole.get("engine", {}).get("weight_store", "off")
    if store not in ("auto", "off", ""):
        whole["engine"] = {**whole["engine"], "weight_store": absolute(store)}
    return yaml.safe_dump(whole)


class RayCluster:
    """The parts of all nodes. `ray`: the module, connected."""

    def __init__(
        self,
        ray: Any,
        nodes: Sequence[NodeYaml],
        text: str,
        options: Sequence[str],
        say: Callable[[str], None],
    ) -> None:
        self._ray, self._say = ray, say
        self._text, self._key, self._options = text, new_secret(), tuple(options)
        self._placed = [Placed(node) for node in nodes]
        self._settled = False

    def run(self, asked: Sequence[int]) -> None:
        """Until a signal is in `asked`. Raises ConfigError or NodeFailedError."""
        self._check()
        try:
            while not asked:
                self._turn()
                time.sleep(_LOOK_S)
        finally:
            self._stop(asked)

    def _check(self) -> None:
        """That Ray has the machines, and GPUs enough. Raises ConfigError."""
        there = self._machines()
        for index, placed in enumerate(self._placed):
            node = placed.node
            found = there.get(_plain(node.address))
            if found is None:
                known = ", ".join(sorted(there))
                raise ConfigError(
                    f"nodes[{index}].address: no machine of the Ray cluster has {node.address}: it"
                    f" has {known}; start Ray there (ray start --address=...), or correct it"
                )
            if (wanted := _gpus(node)) > (have := found["Resources"].get("GPU", 0)):
                raise ConfigError(
                    f"nodes[{index}].devices: {wanted} GPUs, and Ray's {node.address} has"
                    f" {have:g}; take some out"
                )

    def _machines(self) -> dict[str, Any]:
        """Of Ray, by address: those that live."""
        return {
            _plain(each["NodeManagerAddress"]): each for each in self._ray.nodes() if each["Alive"]
        }

    def _turn(self) -> None:
        now_s, there = time.monotonic(), None
        for placed in self._placed:
            if placed.actor is not None:
                self._look(placed)
            elif now_s >= placed.start_at_s:
                there = self._machines() if there is None else there
                if (found := there.get(_plain(placed.node.address))) is not None:
                    placed.actor = self._start(placed.node, found["NodeID"])
                placed.start_at_s = now_s + _ANSWER_S / 10

    def _start(self, node: NodeYaml, ray_node: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        remote = self._ray.remote(num_cpus=0, num_gpus=_gpus(node), max_restarts=0)(NodePart)
        there = NodeAffinitySchedulingStrategy(node_id=ray_node, soft=False)
        return remote.options(scheduling_strategy=there).remote(
            self._text, self._key, node.name, self._options
        )

    def _look(self, placed: Placed) -> None:
        name = placed.node.name
        try:
            said = cast(Said, self._ray.get(placed.actor.look.remote(), timeout=_ANSWER_S))
        except self._ray.exceptions.GetTimeoutError:
            return  # it is cut off; Ray says whether it is lost
        except self._ray.exceptions.RayError as error:
            self._say(f"{name}: the machine is lost ({type(error).__name__})")
            self._again(placed)
            return
        for line in said.lines:
            self._say(f"{name}: {line}")
            self._settled |= line.startswith("ready in ")
        if said.code is not None:
            self._ended(placed, said)

    def _ended(self, placed: Placed, said: Said) -> None:
        name, last = placed.node.name, "".join(said.lines[-1:]).removeprefix("error: ")
        self._ray.kill(placed.actor)
        if not self._settled:
            placed.actor = None
            if said.code == EXIT_CONFIG:
                raise ConfigError(f"node {name}: {last}")
            raise NodeFailedError(f"node {name} ended with {said.code}: {last}")
        self._say(f"{name}: ended with {said.code}; it is started again")
        self._again(placed)

    def _again(self, placed: Placed) -> None:
        now_s = time.monotonic()
        placed.actor, placed.start_at_s = None, now_s + placed.backoff.died(now_s)

    # --- the end ----------------------------------------------------------------------------

    def _stop(self, asked: Sequence[int]) -> None:
        """All parts at once; another signal ends them at once."""
        until_s, sent = time.monotonic() + _STOP_S, 0
        left = [placed for placed in self._placed if placed.actor is not None]
        while left and time.monotonic() < until_s:
            if sent < max(1, len(asked)):
                sent += 1
                for placed in left:
                    placed.actor.signal.remote(int(signal.SIGTERM))
            left = [placed for placed in left if not self._has_ended(placed)]
            time.sleep(_LOOK_S)
        for placed in left:
            self._say(f"{placed.node.name} did not end in time")
            self._ray.kill(placed.actor)

    def _has_ended(self, placed: Placed) -> bool:
        try:
            said = cast(Said, self._ray.get(placed.actor.look.remote(), timeout=_ANSWER_S))
            for line in said.lines:
                self._say(f"{placed.node.name}: {line}")
            if said.code is None:
                return False
            self._ray.kill(placed.actor)
        except self._ray.exceptions.RayError:
            pass  # its machine is lost, and all on it
        return True


def _ray() -> Any:
    if find_spec("ray") is None:
        raise ConfigError("--ray: Ray is not installed; pip install 'prism-serving[ray]'")
    if os.environ.get("RAY_AUTH_MODE") != "token":
        raise ConfigError(
            "--ray: who reaches Ray's ports runs code on all its machines; set RAY_AUTH_MODE=token"
            " here and for ray start (ray get-auth-token --generate makes the token)"
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    return ray


@contextmanager
def _connected(ray: Any, address: str) -> Iterator[None]:
    try:
        ray.init(address=address, namespace="prism", log_to_driver=False, configure_logging=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"--ray: no Ray cluster answers at {address}: {why}; start one with ray start --head"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Those that asked for the end, within the block."""
    asked: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {n: signal.signal(n, lambda number, _frame: asked.append(number)) for n in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _gpus(node: NodeYaml) -> int:
    return sum(is_gpu(device.name) for device in node.devices)


def _plain(address: str) -> str:
    return str(ipaddress.ip_address(address))
