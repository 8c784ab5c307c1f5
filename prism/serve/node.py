"""This machine among the nodes of a cluster: said in Redis, so that the others know of it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import redis

from prism.config.resolved import ConfigFile
from prism.config.schema import ClusterConfig
from prism.config.units import encoded
from prism.curve import public_key
from prism.errors import ConfigError
from prism.messages import MALFORMED_ERRORS, PROTOCOL
from prism.serve.run_dir import CONFIG_FILE

_TTL_S = 10.0
_SAY_S = 2.0
_TIMEOUT_S = 5.0
_SHARED = ("models", "nodes", "policy", "knobs", "engine", "scheduler")


class NodeState(msgspec.Struct, frozen=True):
    """What each node says of itself for as long as it lives."""

    owner: str
    version: str
    shared: str  # a digest of what all nodes must have in common
    protocol: int = 0


def namespace_of(config: ClusterConfig) -> str:
    """The same on all nodes, and another one for every key."""
    return namespace_of_key(config.cluster_key)


def namespace_of_key(cluster_key: str) -> str:
    return f"prism-{sha256(public_key(cluster_key).encode()).hexdigest()[:8]}"


def state_of(config: ClusterConfig) -> NodeState:
    # What engine processes take without a model is measured by each node for its own devices.
    devices = [msgspec.structs.replace(device, idle_bytes=0) for device in config.devices]
    shared = {name: _set(getattr(config, name)) for name in _SHARED} | {"devices": _set(devices)}
    digest = sha256(msgspec.json.encode(shared, enc_hook=encoded)).hexdigest()
    owner = f"{socket.gethostname()}-{uuid4().hex}"
    return NodeState(owner, version("prism-serving"), digest, PROTOCOL)


def _set(value: Any) -> Any:
    """Without what has its default: a version may know more keys than another one."""
    if isinstance(value, msgspec.Struct):
        found = [(field, getattr(value, field.name)) for field in msgspec.structs.fields(value)]
        return {field.name: _set(each) for field, each in found if not _is_default(field, each)}
    if isinstance(value, list | tuple):
        return [_set(each) for each in value]
    return {key: _set(each) for key, each in value.items()} if isinstance(value, dict) else value


def _is_default(field: msgspec.structs.FieldInfo, value: object) -> bool:
    if field.default_factory is not msgspec.NODEFAULT:
        return bool(value == field.default_factory())
    return bool(value == field.default)


@contextmanager
def joined(config: ClusterConfig, say: Callable[[str], None]) -> Iterator[None]:
    """Within the block this machine is a node of the cluster; the last one that leaves removes
    what the cluster has in Redis. Raises ConfigError where the nodes are not alike, or another
    process is this node already."""
    state, file = state_of(config), ConfigFile(Path(config.run_dir) / CONFIG_FILE, config)
    with redis.Redis.from_url(config.redis_url, socket_timeout=_TIMEOUT_S) as client:
        try:
            _check_alike(config, state, client)
            _take(config, state, client)
        except redis.RedisError as error:
            raise ConfigError(f"redis: {error}; start that server, or correct the URL") from error
        over = threading.Event()
        thread = threading.Thread(target=_keep, args=(file, state, say, over), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(2 * _TIMEOUT_S)
            with suppress(redis.RedisError, OSError):
                _leave(file.config, state, client)


def present(config: ClusterConfig, client: redis.Redis) -> dict[str, NodeState]:
    """Returns the nodes that live, by name, without those whose state cannot be read. Raises
    redis.RedisError."""
    names = [node.name for node in config.nodes]
    found = client.mget([_key(config, name) for name in names])
    assert isinstance(found, list)
    states = {name: _read(body) for name, body in zip(names, found, strict=True)}
    return {name: state for name, state in states.items() if state is not None}


def _read(body: object) -> NodeState | None:
    """Returns None for damaged state. A node that lives writes its own again within seconds."""
    try:
        return msgspec.msgpack.decode(body, type=NodeState) if isinstance(body, bytes) else None
    except MALFORMED_ERRORS:
        return None


def living(config: ClusterConfig, names: Collection[str]) -> set[str]:
    """Those of these nodes that live. Raises ConfigError."""
    if not names:
        return set()
    with redis.Redis.from_url(config.redis_url, socket_timeout=_TIMEOUT_S) as client:
        try:
            return present(config, client).keys() & names
        except redis.RedisError as error:
            raise ConfigError(f"redis: {error}; try again") from error


def has_told(config: ClusterConfig, timeout_s: float) -> bool:
    """Waits until this machine's `prism-serve` has told the others that it follows `config`."""
    wanted, until_s = state_of(config).shared, time.monotonic() + timeout_s
    with redis.Redis.from_url(config.redis_url, socket_timeout=_TIMEOUT_S) as client:
        while time.monotonic() < until_s:
            with suppress(redis.RedisError):
                said = present(config, client).get(config.node)
                if said is not None and said.shared == wanted:
                    return True
            time.sleep(0.2)
    return False


def _check_alike(config: ClusterConfig, state: NodeState, client: redis.Redis) -> None:
    for name, other in present(config, client).items():
        if name == config.node:
            continue
        if other.protocol != state.protocol:
            raise ConfigError(
                f"nodes: {name} runs version {other.version}, whose protocol is {other.protocol},"
                f" and this machine {state.version} with {state.protocol}: they do not understand"
                " each other; install one version on all, with all of them stopped"
            )
        if other.shared != state.shared:
            raise ConfigError(
                f"nodes: {name} has other devices, models or settings; give all nodes the same"
                " file, and the models the same paths, and prism-serve reload where it is new"
            )


def _take(config: ClusterConfig, state: NodeState, client: redis.Redis) -> None:
    """One that was killed is known for some seconds yet; junk in its place is overwritten."""
    if config.node not in present(config, client):
        client.delete(_key(config, config.node))
    until_s, mine = time.monotonic() + _TTL_S + 1, msgspec.msgpack.encode(state)
    while not client.set(_key(config, config.node), mine, nx=True, px=round(_TTL_S * 1000)):
        if time.monotonic() > until_s:
            other = present(config, client).get(config.node)
            where = other.owner.rpartition("-")[0] if other else "another process"
            raise ConfigError(f"--node: {config.node} runs already, on {where}; choose another")
        time.sleep(0.2)


def _keep(
    file: ConfigFile, state: NodeState, say: Callable[[str], None], over: threading.Event
) -> None:
    known: dict[str, NodeState] = {}
    config = file.config
    with redis.Redis.from_url(config.redis_url, socket_timeout=_TIMEOUT_S) as client:
        while not over.wait(_SAY_S):
            if (newer := file.newer()) is not None:
                config = newer
                state = msgspec.structs.replace(state, shared=state_of(config).shared)
            mine = msgspec.msgpack.encode(state)
            try:
                client.set(_key(config, config.node), mine, px=round(_TTL_S * 1000))
                now = present(config, client)
            except (redis.RedisError, OSError):
                continue  # the agents say so
            now.pop(config.node, None)
            for name in sorted(now.keys() - known.keys()):
                other = now[name].version
                say(f"node {name} is there{f', version {other}' * (other != state.version)}")
            for name in sorted(known.keys() - now.keys()):
                say(f"node {name} is gone")
            known = now


def _leave(config: ClusterConfig, state: NodeState, client: redis.Redis) -> None:
    """REQUIRES: this node's processes have ended."""
    here = present(config, client).get(config.node)
    if here is not None and here.owner == state.owner:
        client.delete(_key(config, config.node))
    if not present(config, client):
        forget_keys(config)


def forget_keys(config: ClusterConfig) -> None:
    """A Redis that is not ours keeps nothing of this cluster."""
    with redis.Redis.from_url(config.redis_url, socket_timeout=_TIMEOUT_S) as client:
        for key in client.scan_iter(f"{config.namespace}:*", count=1000):
            client.unlink(key)


def _key(config: ClusterConfig, node: str) -> str:
    return node_key(config.namespace, node)


def node_key(namespace: str, node: str) -> str:
    """There for as long as the node lives."""
    return f"{namespace}:node:{node}"
