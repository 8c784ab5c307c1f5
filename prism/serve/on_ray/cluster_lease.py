"""The lease in Redis by which `prism-serve up --ray` keeps a cluster's launchers running.

Ray ends its processes when its head or a machine's raylet ends, or when it considers a machine
lost. Launchers keep running until the lease says stop or has expired.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import redis

from prism.errors import ConfigError
from prism.serve.node.registration import namespace_of_key, node_key

# Values of the lease. STOP sends one signal to the launchers, KILL two.
SERVE, STOP, KILL = b"serve", b"stop", b"kill"
_TTL_S = 10.0
_RENEW_S = 2.0
_POLL_S = 1.0
_MISSING_S = 5.0  # a restarted Redis may not have the lease yet
_NO_REDIS_S = 300.0
_TIMEOUT_S = 5.0


class ClusterLease:
    """Lease that a thread renews until `close`."""

    def __init__(self, redis_url: str, cluster_key: str) -> None:
        """Raises ConfigError if Redis does not answer."""
        self._value = SERVE
        self._namespace, self._over = namespace_of_key(cluster_key), threading.Event()
        try:
            self._client = redis.Redis.from_url(
                redis_url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S
            )
            self._write()
        except (redis.RedisError, OSError, ValueError) as error:
            raise ConfigError(f"redis: {error}; start that server, or correct the URL") from error
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self._thread.start()

    def set(self, value: bytes) -> bool:
        """Changes the value. Returns False if Redis does not answer; the thread then writes it
        later."""
        self._value = value
        try:
            self._write()
        except (redis.RedisError, OSError):
            return False
        return True

    def is_over(self) -> bool:
        """Returns True if the lease says stop, also by another process."""
        return self._value != SERVE

    def nodes_left(self) -> int | None:
        """Returns the number of running nodes, or None if Redis does not answer."""
        keys = self._client.scan_iter(node_key(self._namespace, "*"), count=1000)
        try:
            return sum(1 for _ in keys)
        except (redis.RedisError, OSError):
            return None

    def close(self) -> None:
        self._over.set()
        self._thread.join(2 * _TIMEOUT_S)
        with suppress(redis.RedisError, OSError):
            self._client.delete(_key(self._namespace))
        self._client.close()

    def _write(self) -> None:
        self._client.set(_key(self._namespace), self._value, px=round(_TTL_S * 1000))

    def _renew(self) -> None:
        while not self._over.wait(_RENEW_S):
            # Written even if it cannot be read, to replace a value of another type.
            with suppress(redis.RedisError, OSError):
                if self._client.get(_key(self._namespace)) == STOP:
                    self._value = STOP
            with suppress(redis.RedisError, OSError):
                self._write()


def stop(redis_url: str, cluster_key: str) -> bool:
    """Ends the cluster's command and launchers. Returns False if no command has a lease. Raises
    ConfigError if Redis does not answer."""
    with redis.Redis.from_url(redis_url, socket_timeout=_TIMEOUT_S) as client:
        try:
            key = _key(namespace_of_key(cluster_key))
            return bool(client.set(key, STOP, xx=True, keepttl=True))
        except (redis.RedisError, OSError) as error:
            raise ConfigError(
                f"redis: {error}; start it, or send SIGTERM to prism-serve"
            ) from error


@contextmanager
def ends_with_lease(redis_url: str, cluster_key: str, parent_fd: int) -> Iterator[None]:
    """Sends SIGTERM to this process within the block when the lease says stop, and again when it
    says kill. Also when the lease has expired and the pipe `parent_fd` was closed, which means that
    Ray has ended."""
    over = threading.Event()
    arguments = (redis_url, namespace_of_key(cluster_key), _closed_event(parent_fd), over)
    threading.Thread(target=_poll_lease, args=arguments, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _closed_event(fd: int) -> threading.Event:
    """Returns an event that is set when the other end of a pipe is closed."""
    closed = threading.Event()

    def wait() -> None:
        os.read(fd, 1)
        closed.set()

    threading.Thread(target=wait, daemon=True).start()
    return closed


def _poll_lease(url: str, namespace: str, closed: threading.Event, over: threading.Event) -> None:
    sent, held_s = 0, time.monotonic()
    answered_s = held_s
    with redis.Redis.from_url(url, socket_timeout=_TIMEOUT_S) as client:
        while not over.wait(_POLL_S):
            now_s, value = time.monotonic(), None
            try:
                value = client.get(_key(namespace))
                answered_s, held = now_s, value is not None
            except (redis.RedisError, OSError):
                held = now_s - answered_s < _NO_REDIS_S
            if held or not closed.is_set():
                held_s = now_s
            wanted = 2 if value == KILL else int(value == STOP or now_s - held_s > _MISSING_S)
            for _ in range(sent, wanted):
                os.kill(os.getpid(), signal.SIGTERM)
            sent = max(sent, wanted)


def _key(namespace: str) -> str:
    return f"{namespace}:lease:cluster"
