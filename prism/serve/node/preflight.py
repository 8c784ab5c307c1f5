"""Checks before anything is started, for what would fail at the start or soon after."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import redis

from kvcached.trust import untrusted_reason
from prism.config.schema.admin import host_and_port
from prism.config.schema.cluster_config import AUTO_STORE, ClusterConfig
from prism.config.schema.machines import is_gpu
from prism.config.schema.units import format_size
from prism.errors import ConfigError, QueueUnavailableError
from prism.frontend.http.listener import admin_listener, open_listener
from prism.queueing.request_queue import RequestQueue
from prism.serve.node import run_dir


def check_machine(config: ClusterConfig) -> None:
    """Checks memory and folders. Raises ConfigError that names the key."""
    _check_capacities(config.local())
    _check_store(config.engine.weight_store)


def check_addresses(config: ClusterConfig) -> list[str]:
    """Checks the addresses that the cluster listens on and connects to. A running cluster of this
    user may have them, since its YAML is checked before a reload. Returns notes that name such a
    cluster. Raises ConfigError."""
    running = run_dir.running()
    notes = [
        f"note: port {config.port} is that of the running cluster {each.run_dir}, which this YAML"
        " may replace by prism-serve reload; to start another cluster, choose another port"
        for each in running
        if config.port and each.port == config.port
    ]
    with ExitStack() as held:  # all at once, to detect equal addresses
        if not notes:
            held.enter_context(open_listener(config.host, config.port))
        if config.admin and config.admin not in {each.admin for each in running}:
            held.enter_context(admin_listener(config.admin))
        check_exposure(config)
        if config.here is not None:
            check_ports(config)
    if config.redis_url:
        asyncio.run(check_redis(config.redis_url))
    return notes


def check_ports(config: ClusterConfig) -> None:
    """Checks the ports of connections within the cluster on this node. Raises ConfigError."""
    here = config.place(config.node)
    family = socket.AF_INET6 if ":" in here.address else socket.AF_INET
    for port in (*range(here.port, here.port + 1 + here.devices), config.frontend_ports.stop):
        try:
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((here.address, port))
        except OSError as error:
            raise ConfigError(
                f"nodes[].port: {here.name} cannot listen on {here.address} port {port}:"
                f" {error.strerror}; correct the address, or choose another port"
            ) from error


def check_exposure(config: ClusterConfig) -> None:
    """Raises ConfigError if other machines could send requests without a key."""
    if config.keys or config.open_to_all:
        return
    admin, _ = host_and_port(config.admin) or ("localhost", 0)
    for key, host in (("frontend.host", config.host), ("frontend.admin", admin)):
        if not _is_loopback(host):
            raise ConfigError(
                f"{key}: other machines reach {host or 'all addresses'}, and no key is required:"
                " set access.keys (prism-serve new-key makes them), listen on 127.0.0.1, or set"
                " access.open_to_all: true"
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_capacities(config: ClusterConfig) -> None:
    wanted = sum(d.capacity_bytes for d in config.devices if not is_gpu(d.name))
    total = psutil.virtual_memory().total
    if wanted > total:
        raise ConfigError(
            f"devices[].capacity: {format_size(wanted)} for host devices exceed the"
            f" {format_size(total)} of this machine; lower the capacities"
        )


def _check_store(store: str) -> None:
    if store in ("", AUTO_STORE):
        return
    path = Path(store)
    there = next(p for p in (path, *path.parents) if p.exists())
    problem = ""
    if not there.is_dir():
        problem = f"{there} is not a folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        problem = f"{there} is not writable"
    elif there == path:
        problem = untrusted_reason(path) or ""
    if problem:
        raise ConfigError(
            f"engine.weight_store: {store} cannot be used: {problem}; choose another folder, auto"
            " or off"
        )


def _check_redis_is_private(url: str) -> None:
    """Raises ConfigError if the URL of another machine does not have a password. The message must
    not repeat the URL, which may have a password."""
    try:
        parts = urlsplit(url)
        host, password = parts.hostname or "localhost", parts.password
    except ValueError:  # check_redis reports it
        return
    if url.startswith("redis://") and not password and not _is_loopback(host):
        raise ConfigError(
            f"redis: {host} is another machine, and the URL does not have a password; write"
            " redis://:PASSWORD@host:port, or rediss:// for TLS"
        )


async def check_redis(url: str) -> None:
    """Raises ConfigError if the server does not answer, or if others could use or read it."""
    _check_redis_is_private(url)
    # Messages must not repeat the URL or a part of it, which may have a password.
    unreadable = (
        "redis: the URL cannot be read; write redis://:PASSWORD@host:port, with %2F for a / in the"
        " password and so on, and no options"
    )
    try:
        queue = RequestQueue.connect(url, "prism-check")
    except ValueError as error:
        raise ConfigError(unreadable) from error
    try:
        await queue.status()
    except TypeError as error:
        raise ConfigError(unreadable) from error
    except (QueueUnavailableError, redis.RedisError) as error:
        raise ConfigError(
            f"redis: {error}; start that server, correct the URL, or leave the key out to use the"
            " bundled one"
        ) from error
    finally:
        await queue.close()
