"""Shared request queues in Redis: one stream per device, and one for models without a placement.

A request is in exactly one place: waiting in one queue, running at one device, or gone. Every
change of more than one key is one Lua script (`*.lua` in this folder; `common.lua` lists the keys).
Every call may be repeated after a QueueUnavailableError, whether or not the first one reached the
server. Redis stores requests and does not sort them: the agent orders them (Prism §6.3).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import redis.asyncio as redis_async
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.commands.core import AsyncScript

from prism import clock
from prism.errors import LeaseLostError, MalformedRequestError
from prism.messages import MALFORMED_ERRORS
from prism.messages.cluster import ClusterStatus, FrontendState
from prism.messages.image_tensors import Tensors
from prism.messages.prompt_prefix import PREFIX_KEPT_S, SLACK_REQUESTS, prefix_hash
from prism.messages.requests import KeptAnswer, Request
from prism.queueing.redis_errors import queue_errors
from prism.queueing.server_sleep import ServerSleep
from prism.queueing.stream_entries import Row, Unplaced, attempt, decoded, text, texts

UNPLACED = "unplaced"
_SOCKET_TIMEOUT_S = 10.0
_CONNECTIONS_MAX = 32
_BLOCK_MAX_S = 5.0
_LAST_ATTEMPT = 2**31 - 1
_KEYS_AT_ONCE = 100
_UNPLACED_AT_ONCE = 256
_REPAIRS_MAX = 5  # of damaged keys, in one call
_WRITABLE_TTL_S = 60.0
# Several heartbeats of frontends, which keep the images of their open requests.
IMAGES_KEPT_S = 10.0
# Images of all frontends, which are in the server's memory and its append-only file.
IMAGES_BYTES_MAX = 4 << 30
_SCRIPTS = (
    "enqueue", "admit", "finish", "requeue", "unplace", "route", "forget", "acquire", "renew",
    "release", "move", "unplaced_counts", "beat", "register", "discard", "set_aside",
    "remove_frontend", "claim", "settle", "take", "drop_damaged",
    "keep_images", "read_unplaced", "bind", "enter_server", "leave_server", "look_asleep",
    "claim_sleep", "write_asleep",
)  # fmt: skip
_HERE = Path(__file__).parent

log = logging.getLogger(__name__)


class RequestQueue:
    """All of Prism's state in Redis. For use from one event loop.

    Every method raises QueueUnavailableError if the server cannot be reached. Methods with an
    `epoch` raise LeaseLostError if the lease was acquired again after that epoch.
    """

    def __init__(self, client: redis_async.Redis, namespace: str) -> None:
        self._redis = client
        self._prefix = f"{namespace}:"
        common = (_HERE / "common.lua").read_text()
        self._scripts: dict[str, AsyncScript] = {
            name: client.register_script(common + (_HERE / f"{name}.lua").read_text())
            for name in _SCRIPTS
        }
        self.sleep = ServerSleep(self._run)
        self._answers = msgspec.msgpack.Decoder(KeptAnswer)
        self._images = msgspec.msgpack.Decoder(Tensors)
        self._statuses = msgspec.msgpack.Decoder(ClusterStatus)
        self._frontends = msgspec.msgpack.Decoder(FrontendState)

    @classmethod
    def connect(cls, url: str, namespace: str) -> RequestQueue:
        """Returns a queue that connects at its first call.

        Args:
            url: redis://, rediss:// or unix://.
            namespace: prefix of all keys, without the colon.
        """
        # Calls of a burst wait for a connection. redis-py's plain pool raises an error instead.
        pool = redis_async.BlockingConnectionPool.from_url(
            url,
            max_connections=_CONNECTIONS_MAX,
            timeout=_SOCKET_TIMEOUT_S,
            socket_timeout=_SOCKET_TIMEOUT_S,
            socket_connect_timeout=_SOCKET_TIMEOUT_S,
            # Only a broken connection is retried: a server that timed out once is likely to again.
            retry=Retry(ExponentialBackoff(cap=0.1, base=0.01), 2, (exceptions.ConnectionError,)),
        )
        return cls(redis_async.Redis.from_pool(pool), namespace)

    async def close(self) -> None:
        await self._redis.aclose()

    # --- frontends --------------------------------------------------------------------------

    async def enqueue(self, request: Request) -> str:
        return (await self.enqueue_all([request]))[0]

    async def enqueue_all(self, requests: Sequence[Request]) -> list[str]:
        """Adds all requests, or none, to the queues of the devices where their models are placed.

        Returns the device of each, or UNPLACED. Repeating an (id, attempt) changes nothing. A newer
        attempt replaces an older one.
        """
        args: list[str | int | bytes] = [SLACK_REQUESTS, _ms(PREFIX_KEPT_S)]
        for each in requests:
            packed = msgspec.msgpack.encode(each)
            args += each.id, each.model, each.attempt, packed, prefix_hash(each)
        return [text(queue) for queue in await self._run("enqueue", *args)] if requests else []

    async def store_images(self, images: Mapping[str, Tensors]) -> bool:
        """Stores images for IMAGES_KEPT_S by their digests. Known ones are not sent again.

        Returns False if all stored images would exceed IMAGES_BYTES_MAX.
        """
        limits = _ms(IMAGES_KEPT_S), IMAGES_BYTES_MAX
        for digest in await self.keep_images(images):
            body = msgspec.msgpack.encode(images[digest])
            if await self._run("keep_images", *limits, body, digest):
                return False
        return True

    async def keep_images(self, digests: Collection[str]) -> set[str]:
        """Keeps stored images for IMAGES_KEPT_S from now. Returns the digests of unknown ones."""
        if not digests:
            return set()
        limits = _ms(IMAGES_KEPT_S), IMAGES_BYTES_MAX
        return texts(await self._run("keep_images", *limits, "", *digests))

    async def images(self, digests: Collection[str]) -> dict[str, Tensors]:
        """Returns digest -> image, for those that are stored."""
        found = {}
        for digest in digests:
            body = await self._call(partial(self._redis.get, self._key("image", digest)))
            with suppress(*MALFORMED_ERRORS):
                found[digest] = self._images.decode(body or b"")
        return found

    async def forget(self, request_ids: Collection[str]) -> set[str]:
        """Drops those requests that wait and returns their ids.

        Requests that run are not dropped: cancel them at their agent.
        """
        return await self.forget_attempts(dict.fromkeys(request_ids, _LAST_ATTEMPT))

    async def forget_attempts(self, attempts: Mapping[str, int]) -> set[str]:
        """Drops waiting requests and returns their ids. Attempts newer than the given ones stay.

        Args:
            attempts: request id -> the newest attempt to drop.
        """
        if not attempts:
            return set()
        pairs = [part for pair in attempts.items() for part in pair]
        return texts(await self._run("forget", *pairs))

    async def open_attempts(self, request_ids: Sequence[str]) -> dict[str, int]:
        """Returns request id -> attempt of those requests that wait or run."""
        if not request_ids:
            return {}
        ids = list(request_ids)
        found = await self._call(lambda: self._redis.hmget(self._prefix + "open", ids))
        pairs = zip(
            ids, (attempt((value or b"").partition(b"|")[0]) for value in found), strict=True
        )
        return {request_id: number for request_id, number in pairs if number}

    async def beat(self, frontend_id: str, ttl_s: float, state: FrontendState | None = None) -> str:
        """Sets the frontend's heartbeat for `ttl_s` and returns the incarnation of the data.

        A new incarnation means that the server was restarted or replaced and may have lost data.
        """
        await self._sync_clock()
        body = msgspec.msgpack.encode(state or FrontendState())
        return text(await self._run("beat", frontend_id, _ms(ttl_s), secrets.token_hex(8), body))

    async def claim(
        self, key: str, frontend_id: str, fingerprint: str, ttl_s: float
    ) -> KeptAnswer | str | None:
        """Claims an idempotency key, unless it has an answer or another frontend claimed it.

        Returns the stored answer; or the fingerprint of the request that another live frontend
        computes under `key`; or None if the claim is this frontend's. A claim ends with its
        frontend's heartbeat.
        """
        args = (key, frontend_id, fingerprint, _ms(ttl_s))
        outcome, known = await self._run("claim", *args)
        if outcome == b"answered":
            try:
                return self._answers.decode(known)
            except MALFORMED_ERRORS:
                await self._call(lambda: self._redis.unlink(self._key("answer", key)))
                return await self.claim(key, frontend_id, fingerprint, ttl_s)
        return text(known) if outcome == b"open" else None

    async def settle(
        self, key: str, frontend_id: str, answer: KeptAnswer | None, ttl_s: float
    ) -> None:
        """Ends a claim. Stores `answer` for `ttl_s`, unless the key has an answer already."""
        body = b"" if answer is None else msgspec.msgpack.encode(answer)
        await self._run("settle", key, frontend_id, body, _ms(ttl_s))

    async def take_rate(
        self, key: str, requests: int, tokens: int, cost_tokens: int, *, spent: bool = False
    ) -> float:
        """Takes a request and its tokens from the rates of an API key.

        Returns 0 if the request may begin, else the seconds until it may be tried again. If the
        connection breaks before Redis answers, the cost may be counted twice.

        Args:
            key: name of the API key.
            requests: requests per minute; 0 means unlimited.
            tokens: tokens per minute; 0 means unlimited.
            cost_tokens: tokens of this request.
            spent: the tokens were computed already: they are taken even if the key owes them then,
                and no request is counted.
        """
        costs = (0 if spent else 1, cost_tokens)
        return int(await self._run("take", key, requests, tokens, *costs, int(spent))) / 1000

    async def refund_rate(self, key: str, requests: int, tokens: int, cost_tokens: int) -> None:
        """Gives back what `take_rate` took for a request that did not begin."""
        await self._run("take", key, requests, tokens, -1, -cost_tokens, 1)

    async def remove_frontend(self, frontend_id: str) -> int:
        """Removes the heartbeat of a frontend that ended, its claims and its requests in UNPLACED.

        Returns the number of these requests.
        """
        return int(await self._run("remove_frontend", frontend_id))

    # --- called by the device's agent -------------------------------------------------------

    async def acquire(
        self,
        device: str,
        owner: str,
        ttl_s: float,
        keep: Collection[str] = (),
        since_epoch: int = 0,
    ) -> int:
        """Takes the lease of the device's queue and returns a new epoch, larger than all before.

        Requests that an earlier holder left running wait again.

        Args:
            owner: unique to this process.
            keep: ids that stay running, because this owner still runs them after an outage.
            since_epoch: the caller's last epoch; 0 if a holder in between does not matter.

        Raises:
            LeaseLostError: another owner's lease is valid, or one was acquired after `since_epoch`.
        """
        await self._sync_clock()
        ttl_ms = _ms(ttl_s)
        epoch, holder = await self._run("acquire", device, owner, ttl_ms, since_epoch, *keep)
        if not epoch:
            raise LeaseLostError(f"the queue of {device} is held by {text(holder)}")
        return int(epoch)

    async def renew(self, device: str, owner: str, epoch: int, ttl_s: float) -> None:
        """Extends the lease.

        Raises LeaseLostError also if the server is not the one of `acquire`: its data may be old.
        """
        await self._sync_clock()
        await self._run("renew", device, owner, epoch, _ms(ttl_s))

    async def release(self, device: str, owner: str, epoch: int) -> None:
        await self._run("release", device, owner, epoch)

    async def read(self, device: str, cursor: str, count: int = 256) -> list[tuple[str, Request]]:
        """Returns (entry id, request) pairs after `cursor`, oldest first. "0" reads all that wait.

        Raises MalformedRequestError if an entry is not a request: pass it to `set_aside`, then read
        again.
        """
        found = await self._read_streams({self._key("queue", device): cursor}, 0, count)
        return self._decoded(found)

    async def follow(
        self, device: str, cursor: str, left: str, block_s: float, count: int = 256
    ) -> tuple[list[tuple[str, Request]], str]:
        """Reads like `read`, but waits up to `block_s` (at most 5 s) for the first entry.

        Returns the pairs and a new `left`. A `left` that changed means that requests left this
        queue for other copies of their model: what was read before is stale.

        Args:
            left: as returned by the last call; "0" at first.
        """
        queue, gone = self._key("queue", device), self._key("left", device)
        found = await self._read_streams({queue: cursor, gone: left}, block_s, count)
        ids = [entry for key, entry, _ in found if key == gone]
        requests = self._decoded([row for row in found if row[0] == queue])
        return requests, ids[-1] if ids else left

    def _decoded(self, found: Sequence[Row]) -> list[tuple[str, Request]]:
        requests, malformed = decoded(found)
        if malformed:
            raise MalformedRequestError(malformed)
        return requests

    async def admit(self, device: str, epoch: int, entry_ids: Collection[str]) -> set[str]:
        """Moves entries from waiting to running.

        Returns those that run here now. The others have left the queue.
        """
        if not entry_ids:
            return set()
        return texts(await self._run("admit", device, epoch, *entry_ids))

    async def register(self, device: str, epoch: int, requests: Collection[Request]) -> None:
        """Records that these requests run here. A newer attempt of one of them stays as it is."""
        if not requests:
            return
        rows: list[str | int | bytes] = []
        for each in requests:
            rows += (each.id, each.model, each.attempt, msgspec.msgpack.encode(each))
        await self._run("register", device, epoch, *rows)

    async def discard(self, device: str, epoch: int, entry_ids: Collection[str]) -> None:
        """Removes waiting entries. Newer attempts of their requests stay."""
        if entry_ids:
            await self._run("discard", device, epoch, *entry_ids)

    async def set_aside(self, device: str, epoch: int, entry_ids: Collection[str]) -> set[str]:
        """Moves waiting entries that are not requests to the stream `malformed`, for inspection.

        Returns the live frontends, one of which may have sent them.
        """
        return texts(await self._run("set_aside", device, epoch, *entry_ids))

    async def finish(self, device: str, epoch: int, request_ids: Collection[str]) -> None:
        """Acknowledges requests that ended: removes them from Redis. Unknown ids are ignored."""
        if request_ids:
            await self._run("finish", device, epoch, *request_ids)

    async def requeue(self, device: str, epoch: int, request_ids: Collection[str]) -> int:
        """Moves requests from running to waiting at the model's present placement.

        Returns the number of requests that moved.
        """
        if not request_ids:
            return 0
        return int(await self._run("requeue", device, epoch, *request_ids))

    async def move(self, device: str, epoch: int, requests: Collection[Request]) -> int:
        """Moves running requests, in their new form, to waiting at the copy that has their KV.

        Without such a copy they go to the model's present placement. Returns the number of requests
        that moved.
        """
        if not requests:
            return 0
        parts = [p for r in requests for p in (r.id, msgspec.msgpack.encode(r), r.kv_device)]
        return int(await self._run("move", device, epoch, *parts))

    async def unplace(self, device: str, epoch: int, entry_ids: Collection[str]) -> int:
        """Moves waiting entries, of models that this device does not serve, to UNPLACED.

        Returns the number of entries that moved. Only the scheduler changes the placement.
        """
        if not entry_ids:
            return 0
        return int(await self._run("unplace", device, epoch, *entry_ids))

    async def live_frontends(self, frontend_ids: Sequence[str]) -> set[str]:
        """Returns those frontends whose heartbeat has not expired.

        Raises QueueUnavailableError also while Redis takes no writes: no heartbeat arrives then.
        """
        if not frontend_ids:
            return set()
        keys = [self._key("frontend", name) for name in frontend_ids]
        await self.check_writable()
        beats = await self._call(lambda: self._redis.mget(keys))
        return {name for name, beat in zip(frontend_ids, beats, strict=True) if beat is not None}

    async def check_writable(self) -> None:
        """Raises QueueUnavailableError while Redis takes no writes.

        Does not return while Redis is paused (CLIENT PAUSE), until the socket times out.
        """
        key, ttl_ms = self._prefix + "writable", _ms(_WRITABLE_TTL_S)
        await self._call(lambda: self._redis.set(key, b"1", px=ttl_ms))

    # --- called by the cluster scheduler ----------------------------------------------------

    async def route(self, model: str, *devices: str) -> int:
        """Sets the placement of `model` and moves its waiting requests there.

        Without devices the model has no placement. Returns the number of requests that moved. Only
        the cluster scheduler calls this.
        """
        return int(await self._run("route", model, *devices))

    async def placement(self, *models: str) -> dict[str, tuple[str, ...]]:
        """Returns model -> devices of its copies, for these models or for all."""
        key, client = self._prefix + "placement", self._redis
        found = await self._call(
            lambda: client.hmget(key, models) if models else client.hgetall(key)
        )
        pairs = zip(models, found, strict=True) if models else found.items()
        return {text(name): tuple(text(d).split("|")) for name, d in pairs if d is not None}

    async def depth(self, device: str) -> int:
        """Returns the number of requests that wait in the device's queue."""
        key = self._key("queue", device)
        return int(await self._call(lambda: self._redis.xlen(key)))

    async def unplaced_counts(self) -> dict[str, int]:
        """Returns model -> number of requests that wait in UNPLACED."""
        flat = iter(await self._run("unplaced_counts"))
        return {text(model): int(count) for model, count in zip(flat, flat, strict=True)}

    async def wait_unplaced(self, cursor: str, block_s: float) -> tuple[str, dict[str, int]]:
        """Waits up to `block_s` (at most 5 s) for arrivals in UNPLACED after `cursor` ("0": all).

        Returns the new cursor and model -> number of new arrivals.
        """
        entries = await self._read_streams({self._key("queue", UNPLACED): cursor}, block_s, 1024)
        counts = Counter(text(fields.get(b"model", b"")) for _, _, fields in entries)
        return (entries[-1][1] if entries else cursor), dict(counts)

    async def read_unplaced(self, cursor: str, devices: Sequence[str]) -> Unplaced:
        """Reads UNPLACED after `cursor` ("0": all). From now on requests are held: they wait there
        until `bind` moves them, whatever the placement of their model."""
        found = await self._run("read_unplaced", cursor, _UNPLACED_AT_ONCE, *devices)
        size, entries, open_ = found
        rows = [Row("", text(e), dict(zip(f[::2], f[1::2], strict=True))) for e, f in entries]
        requests, malformed = decoded(rows)
        return Unplaced(
            rows[-1][1] if rows else cursor,
            len(rows) < _UNPLACED_AT_ONCE,
            requests,
            list(malformed),
            int(size),
            dict(zip(devices, map(int, open_), strict=True)),
        )

    async def still_unplaced(self, entries: Mapping[str, str]) -> set[str]:
        """Returns those of the entries that wait in UNPLACED.

        Args:
            entries: entry id -> request id.
        """
        found = await self._call(
            lambda: self._redis.hmget(self._prefix + "open", list(entries.values()))
        )
        places = (text(value or b"").split("|")[1:3] for value in found)
        pairs = zip(entries, places, strict=True)
        return {entry for entry, place in pairs if place == [entry, UNPLACED]}

    async def bind(
        self, device: str, entry_ids: Collection[str], *, anywhere: bool = False
    ) -> set[str]:
        """Moves entries from UNPLACED to a device that has a copy of their model, or to any device
        if `anywhere`. Returns those that moved."""
        return texts(await self._run("bind", device, int(anywhere), *entry_ids))

    async def stop_holding(self) -> None:
        """Lets requests go to the devices of their models, the opposite of `read_unplaced`."""
        await self._call(lambda: self._redis.unlink(self._prefix + "held"))

    async def frontends(self) -> dict[str, FrontendState]:
        """Returns the last state of each live frontend by its id."""
        found = await self._call(lambda: self._redis.smembers(self._prefix + "frontends"))
        names = sorted(texts(found))
        keys = [self._key("frontend", name) for name in names]
        beats = await self._call(lambda: self._redis.mget(keys)) if keys else []
        known = zip(names, beats, strict=True)
        return {name: self._state_of(beat) for name, beat in known if beat is not None}

    def _state_of(self, beat: bytes) -> FrontendState:
        try:
            return self._frontends.decode(beat)
        except MALFORMED_ERRORS:  # a heartbeat of a version that sent no state
            return FrontendState()

    async def publish_status(self, status: ClusterStatus) -> None:
        await self._sync_clock()
        key, body = self._prefix + "status", msgspec.msgpack.encode(status)
        await self._call(lambda: self._redis.set(key, body))

    async def status(self) -> ClusterStatus | None:
        """Returns what the scheduler published last, or None if it is damaged or missing."""
        body = await self._call(lambda: self._redis.get(self._prefix + "status"))
        try:
            return None if body is None else self._statuses.decode(body)
        except MALFORMED_ERRORS as error:
            log.warning("the cluster's status in Redis is not readable: %s", error)
            return None

    # --- helpers ----------------------------------------------------------------------------

    async def _sync_clock(self) -> None:
        """Reads Redis's clock, which is the cluster's clock.

        Called from the methods that every process calls every few seconds.
        """
        asked_s = time.monotonic()
        seconds, micros = await self._call(self._redis.time)
        clock.synchronize(seconds + micros / 1e6, asked_s, time.monotonic())

    def _key(self, kind: str, name: str) -> str:
        return f"{self._prefix}{kind}:{name}"

    async def _run(self, script: str, *args: str | int | bytes) -> Any:
        return await self._call(lambda: self._scripts[script](keys=[self._prefix], args=args))

    async def _call(self, call: Callable[[], Any]) -> Any:
        """Calls Redis. After an error response, drops damaged keys and repeats the call, which may
        need another repair if more keys are damaged meanwhile."""
        for _ in range(_REPAIRS_MAX):
            try:
                return await self._answer(call())
            except exceptions.ResponseError as error:
                damaged = await self._drop_damaged()
                log.error("Redis answers: %s; dropped damaged keys: %s", error, damaged or "none")
            if not damaged:
                break
        return await self._answer(call())

    async def _drop_damaged(self) -> list[str]:
        """Drops damaged keys and returns their names.

        Their content is restored as after any loss of data (decision 027). To start that, the ids
        of the server are removed, so that frontends and agents see a new server.
        """
        with queue_errors():
            keys = [key async for key in self._redis.scan_iter(f"{self._prefix}*", count=1000)]
        damaged: list[bytes] = []
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            batch = keys[start : start + _KEYS_AT_ONCE]
            script = self._scripts["drop_damaged"]
            damaged += await self._answer(script(keys=[self._prefix], args=batch))
        if damaged:
            acquired = [key for key in keys if key.startswith(self._key("acquired", "").encode())]
            known = [self._prefix + name for name in ("incarnation", "server", "sleeper")]
            await self._answer(self._redis.unlink(*known, *acquired))
        return sorted(texts(damaged))

    async def _answer(self, answer: Any) -> Any:
        # redis-py waits with asyncio.wait_for, which before Python 3.12 swallows a cancellation
        # that arrives just as the wait completes: the caller would never end.
        task = asyncio.current_task()
        before = task.cancelling() if task else 0
        with queue_errors():
            value = await cast("Awaitable[Any]", answer)
        if task and task.cancelling() > before:
            raise asyncio.CancelledError
        return value

    async def _read_streams(self, cursors: dict[Any, Any], block_s: float, count: int) -> list[Row]:
        """Returns the entries of each stream after its cursor."""
        block_ms = max(1, _ms(min(block_s, _BLOCK_MAX_S))) if block_s > 0 else None
        answer = await self._call(lambda: self._redis.xread(cursors, count=count, block=block_ms))
        return [
            Row(text(key), text(entry), fields)
            for key, entries in answer or ()
            for entry, fields in entries
        ]


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
