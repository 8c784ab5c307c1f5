"""Registration of this machine as a node of a cluster, in Redis."""

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
from prism.config.schema.cluster_config import ClusterConfig
from prism.config.schema.units import encoded
from prism.curve import public_key
from prism.errors import ConfigError
from prism.messages import MALFORMED_ERRORS, PROTOCOL
from prism.serve.node.run_dir import CONFIG_FILE

_TTL_S = 10.0
_RENEW_S = 2.0
_TIMEOUT_S = 5.0
_SHARED = ("models", "nodes", "policy", "knobs", "engine", "scheduler")


class NodeState(msgspec.Struct, frozen=True):
    """State that a node publishes while it lives."""

    owner: str  # process of prism-serve
    version: str
    shared: str  # digest of the settings that all nodes must share
    protocol: int = 0


def namespace_of(config: ClusterConfig) -> str:
    """Returns the namespace of a cluster: the same on all nodes, and different for every key."""
    return namespace_of_key(config.cluster_key)


def namespace_of_key(cluster_key: str) -> str:
    """Returns the namespace of the cluster with this key."""
    return f"prism-{sha256(public_key(cluster_key).encode()).hexdigest()[:8]}"


def state_of(config: ClusterConfig) -> NodeState:
    # Each node measures the memory of idle engine processes for its own devices.
    """Returns the state of this machine."""
    devices = [msgspec.structs.replace(device, idle_bytes=0) for device in config.devices]
    shared = {name: _non_default(getattr(config, name)) for name in _SHARED} | {
        "devices": _non_default(devices)
    }
    digest = sha256(msgspec.json.encode(shared, enc_hook=encoded)).hexdigest()
    owner = f"{socket.gethostname()}-{uuid4().hex}"
    return NodeState(owner, version("prism-serving"), digest, PROTOCOL)


def _non_default(value: Any) -> Any:
    """Returns the value without fields that have their defaults, since versions may differ in the
    keys that they know."""
    if isinstance(value, msgspec.Struct):
        found = [(field, getattr(value, field.name)) for field in msgspec.structs.fields(value)]
        return {
            field.name: _non_default(each) for field, each in found if not _is_default(field, each)
        }
    if isinstance(value, list | tuple):
        return [_non_default(each) for each in value]
    return (
        {key: _non_default(each) for key, each in value.items()}
        if isinstance(value, dict)
        else value
    )


def _is_default(field: msgspec.structs.FieldInfo, value: object) -> bool:
    if field.default_factory is not msgspec.NODEFAULT:
        return bool(value == field.default_factory())
    return bool(value == field.default)


@contextmanager
def joined(config: ClusterConfig, say: Callable[[str], None]) -> Iterator[None]:
    """Registers this machine as a node within the block. The last node that leaves removes the
    cluster's keys from Redis. Raises ConfigError if the nodes' settings differ, or another process
    is this node."""
    state, file = state_of(config), ConfigFile(Path(config.run_dir) / CONFIG_FILE, config)
    with redis.Redis.from_url(config.redis_url, socket_timeout=_TIMEOUT_S) as client:
        try:
            _check_same_settings(config, state, client)
            _register(config, state, client)
        except redis.RedisError as error:
            raise ConfigError(f"redis: {error}; start that server, or correct the URL") from error
        over = threading.Event()
        thread = threading.Thread(target=_renew, args=(file, state, say, over), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(2 * _TIMEOUT_S)
            with suppress(redis.RedisError, OSError):
                _unregister(file.config, state, client)


def registered(config: ClusterConfig, client: redis.Redis) -> dict[str, NodeState]:
    """Returns the states of running nodes by name, without states that cannot be read. Raises
    redis.RedisError."""
    names = [node.name for node in config.nodes]
    found = client.mget([_key(config, name) for name in names])
    assert isinstance(found, list)
    states = {name: _read(body) for name, body in zip(names, found, strict=True)}
    return {name: state for name, state in states.items() if state is not None}


def _read(body: object) -> NodeState | None:
    """Returns None for a damaged state. A running node writes it again within seconds."""
    try:
        return msgspec.msgpack.decode(body, type=NodeState) if isinstance(body, bytes) else None
    except MALFORMED_ERRORS:
        return None


def running_nodes(config: ClusterConfig, names: Collection[str]) -> set[str]:
    """Returns the running nodes among `names`. Raises ConfigError."""
    if not names:
        return set()
    with redis.Redis.from_url(config.redis_url, socket_timeout=_TIMEOUT_S) as client:
        try:
            return registered(config, client).keys() & names
        except redis.RedisError as error:
            raise ConfigError(f"redis: {error}; try again") from error


def wait_published(config: ClusterConfig, timeout_s: float) -> bool:
    """Waits until this machine's `prism-serve` has published that it uses `config`. Returns False
    after `timeout_s`."""
    digest, until_s = state_of(config).shared, time.monotonic() + timeout_s
    with redis.Redis.from_url(config.redis_url, socket_timeout=_TIMEOUT_S) as client:
        while time.monotonic() < until_s:
            with suppress(redis.RedisError):
                published = registered(config, client).get(config.node)
                if published is not None and published.shared == digest:
                    return True
            time.sleep(0.2)
    return False


def _check_same_settings(config: ClusterConfig, state: NodeState, client: redis.Redis) -> None:
    """Raises ConfigError if another node has another protocol or other settings."""
    for name, other in registered(config, client).items():
        if name == config.node:
            continue
        if other.protocol != state.protocol:
            raise ConfigError(
                f"nodes: {name} runs version {other.version} with protocol {other.protocol}, and"
                f" this machine {state.version} with {state.protocol}, which are incompatible; stop"
                " all nodes and install one version"
            )
        if other.shared != state.shared:
            raise ConfigError(
                f"nodes: {name} has other devices, models or settings; use the same file and the"
                " same model paths on all nodes (of hubs: HF_HOME and revision), with prism-serve"
                " reload where the file is new"
            )


def _register(config: ClusterConfig, state: NodeState, client: redis.Redis) -> None:
    """Registers the node. Waits for the state of a killed process to expire, and overwrites a
    damaged state. Raises ConfigError if another process is this node."""
    if config.node not in registered(config, client):
        client.delete(_key(config, config.node))
    until_s, packed = time.monotonic() + _TTL_S + 1, msgspec.msgpack.encode(state)
    while not client.set(_key(config, config.node), packed, nx=True, px=round(_TTL_S * 1000)):
        if time.monotonic() > until_s:
            other = registered(config, client).get(config.node)
            where = other.owner.rpartition("-")[0] if other else "another process"
            raise ConfigError(
                f"--node: {config.node} is already running on {where}; choose another"
            )
        time.sleep(0.2)


def _renew(
    file: ConfigFile, state: NodeState, say: Callable[[str], None], over: threading.Event
) -> None:
    """Renews the registration and prints changes of other nodes until `over` is set."""
    known: dict[str, NodeState] = {}
    config = file.config
    with redis.Redis.from_url(config.redis_url, socket_timeout=_TIMEOUT_S) as client:
        while not over.wait(_RENEW_S):
            if (newer := file.newer()) is not None:
                config = newer
                state = msgspec.structs.replace(state, shared=state_of(config).shared)
            packed = msgspec.msgpack.encode(state)
            try:
                client.set(_key(config, config.node), packed, px=round(_TTL_S * 1000))
                now = registered(config, client)
            except (redis.RedisError, OSError):
                continue  # the agents report it
            now.pop(config.node, None)
            for name in sorted(now.keys() - known.keys()):
                other = now[name].version
                say(f"node {name} joined{f', version {other}' * (other != state.version)}")
            for name in sorted(known.keys() - now.keys()):
                say(f"node {name} left")
            known = now


def _unregister(config: ClusterConfig, state: NodeState, client: redis.Redis) -> None:
    """Removes the registration, and the cluster's keys after the last node.

    REQUIRES: this node's processes have ended.
    """
    own_state = registered(config, client).get(config.node)
    if own_state is not None and own_state.owner == state.owner:
        client.delete(_key(config, config.node))
    if not registered(config, client):
        delete_redis_keys(config)


def delete_redis_keys(config: ClusterConfig) -> None:
    """Deletes the cluster's keys from a Redis that prism-serve did not start."""
    with redis.Redis.from_url(config.redis_url, socket_timeout=_TIMEOUT_S) as client:
        for key in client.scan_iter(f"{config.namespace}:*", count=1000):
            client.unlink(key)


def _key(config: ClusterConfig, node: str) -> str:
    return node_key(config.namespace, node)


def node_key(namespace: str, node: str) -> str:
    """Returns the key that exists while the node is running."""
    return f"{namespace}:node:{node}"
