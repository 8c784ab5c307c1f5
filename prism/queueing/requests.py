"""The shared request queues in Redis: one stream per device, one for models placed nowhere.

A request is in exactly one place: waiting in one queue, running at one device, or gone. Every
change of more than one key is one Lua script (`*.lua` beside this file; keys are listed in
`common.lua`). Every call may be repeated after a QueueUnavailableError, whether or not the first
one reached the server. Redis stores and never sorts: order is the agent's (Prism §6.3).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
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
from prism.messages.beginnings import REMEMBERED_S, SLACK_REQUESTS, beginning
from prism.messages.cluster import ClusterStatus, FrontendState
from prism.messages.requests import KeptAnswer, Request
from prism.queueing.redis_errors import named_errors

UNPLACED = "unplaced"
_SOCKET_TIMEOUT_S = 10.0
_CONNECTIONS_MAX = 32
_BLOCK_MAX_S = 5.0
_LAST_ATTEMPT = 2**31 - 1
_ATTEMPT_DIGITS_MAX = 9
_KEYS_AT_ONCE = 100
_WRITABLE_TTL_S = 60.0
_SCRIPTS = (
    "enqueue", "admit", "finish", "requeue", "unplace", "route", "forget", "acquire", "renew",
    "release", "move", "unplaced_counts", "beat", "register", "discard", "set_aside", "bury",
    "claim", "settle", "take", "drop_damaged",
)  # fmt: skip
_HERE = Path(__file__).parent

log = logging.getLogger(__name__)

Row = tuple[str, str, dict[bytes, bytes]]
"""The key of a stream, an entry's id and its fields."""


class RequestQueue:
    """All of Prism's state in Redis. For use from one event loop.

    Raises QueueUnavailableError when the server cannot be reached, from every method, and
    LeaseLostError where an `epoch` is given and another holder came after it.
    """

    def __init__(self, client: redis_async.Redis, namespace: str) -> None:
        self._redis = client
        self._prefix = f"{namespace}:"
        common = (_HERE / "common.lua").read_text()
        self._scripts: dict[str, AsyncScript] = {
            name: client.register_script(common + (_HERE / f"{name}.lua").read_text())
            for name in _SCRIPTS
        }
        self._requests = msgspec.msgpack.Decoder(Request)
        self._answers = msgspec.msgpack.Decoder(KeptAnswer)
        self._statuses = msgspec.msgpack.Decoder(ClusterStatus)
        self._frontends = msgspec.msgpack.Decoder(FrontendState)

    @classmethod
    def connect(cls, url: str, namespace: str) -> RequestQueue:
        """`url`: redis://, rediss:// or unix://. Opens no connection yet."""
        # A burst waits its turn for a connection; redis-py's plain pool refuses it.
        pool = redis_async.BlockingConnectionPool.from_url(
            url,
            max_connections=_CONNECTIONS_MAX,
            timeout=_SOCKET_TIMEOUT_S,
            socket_timeout=_SOCKET_TIMEOUT_S,
            socket_connect_timeout=_SOCKET_TIMEOUT_S,
            # A silent server stays silent: only a broken connection is worth another try.
            retry=Retry(ExponentialBackoff(cap=0.1, base=0.01), 2, (exceptions.ConnectionError,)),
        )
        return cls(redis_async.Redis.from_pool(pool), namespace)

    async def close(self) -> None:
        await self._redis.aclose()

    # --- frontends --------------------------------------------------------------------------

    async def enqueue(self, request: Request) -> str:
        return (await self.enqueue_all([request]))[0]

    async def enqueue_all(self, requests: Sequence[Request]) -> list[str]:
        """All of them, or none, to where their models are placed. Returns devices, or UNPLACED.

        The same (id, attempt) again changes nothing; a newer attempt replaces an older one.
        """
        args: list[str | int | bytes] = [SLACK_REQUESTS, _ms(REMEMBERED_S)]
        for each in requests:
            args += each.id, each.model, each.attempt, msgspec.msgpack.encode(each), beginning(each)
        return [_text(queue) for queue in await self._run("enqueue", *args)] if requests else []

    async def forget(self, request_ids: Collection[str]) -> set[str]:
        """Drop these if they wait; returns those dropped. Running ones: cancel at the agent."""
        return await self.forget_attempts(dict.fromkeys(request_ids, _LAST_ATTEMPT))

    async def forget_attempts(self, attempts: Mapping[str, int]) -> set[str]:
        """The same of requests up to these attempts, by id: what was sent again stays."""
        if not attempts:
            return set()
        pairs = [part for pair in attempts.items() for part in pair]
        return _texts(await self._run("forget", *pairs))

    async def open_attempts(self, request_ids: Sequence[str]) -> dict[str, int]:
        """Request id -> attempt, of those that wait or run."""
        if not request_ids:
            return {}
        ids = list(request_ids)
        found = await self._call(lambda: self._redis.hmget(self._prefix + "open", ids))
        pairs = zip(
            ids, (_attempt((value or b"").partition(b"|")[0]) for value in found), strict=True
        )
        return {request_id: attempt for request_id, attempt in pairs if attempt}

    async def beat(self, frontend_id: str, ttl_s: float, state: FrontendState | None = None) -> str:
        """This frontend lives for another `ttl_s`. Returns the incarnation of the data: another
        one than before means that the server was started again, or is another server, and may
        have lost data."""
        await self._hear_time()
        said = msgspec.msgpack.encode(state or FrontendState())
        return _text(await self._run("beat", frontend_id, _ms(ttl_s), secrets.token_hex(8), said))

    async def claim(
        self, key: str, frontend_id: str, fingerprint: str, ttl_s: float
    ) -> KeptAnswer | str | None:
        """The answer that is kept under `key`; or the fingerprint of the request that another
        frontend computes; or None: this one computes it now, as long as its heart beats."""
        args = (key, frontend_id, fingerprint, _ms(ttl_s))
        whose, known = await self._run("claim", *args)
        if whose == b"answered":
            try:
                return self._answers.decode(known)
            except MALFORMED_ERRORS:
                await self._call(lambda: self._redis.unlink(self._key("answer", key)))
                return await self.claim(key, frontend_id, fingerprint, ttl_s)
        return _text(known) if whose == b"open" else None

    async def settle(
        self, key: str, frontend_id: str, answer: KeptAnswer | None, ttl_s: float
    ) -> None:
        """A claim ends. `answer` is kept for `ttl_s`, unless another one is kept already."""
        body = b"" if answer is None else msgspec.msgpack.encode(answer)
        await self._run("settle", key, frontend_id, body, _ms(ttl_s))

    async def take_rate(
        self, key: str, requests: int, tokens: int, cost_tokens: int, *, spent: bool = False
    ) -> float:
        """A request of an API key that has so many requests and tokens a minute (0: no bound).
        Returns the seconds until it may be tried again; 0: it may begin. `spent`: these tokens were
        computed already. Counted twice where the connection breaks before Redis's answer."""
        costs = (0 if spent else 1, cost_tokens)
        return int(await self._run("take", key, requests, tokens, *costs, int(spent))) / 1000

    async def give_rate_back(self, key: str, requests: int, tokens: int, cost_tokens: int) -> None:
        """What `take_rate` took for a request that did not begin."""
        await self._run("take", key, requests, tokens, -1, -cost_tokens, 1)

    async def bury(self, frontend_id: str) -> int:
        """Its process has ended: its heartbeat goes, and so do its requests in UNPLACED. Returns
        how many."""
        return int(await self._run("bury", frontend_id))

    # --- the device's agent -----------------------------------------------------------------

    async def acquire(
        self,
        device: str,
        owner: str,
        ttl_s: float,
        keep: Collection[str] = (),
        since_epoch: int = 0,
    ) -> int:
        """Take the device's queue and return a new epoch, larger than all before.

        What an earlier holder left running waits again, except the ids in `keep` (those that this
        very owner still runs after an outage). `owner` must be unique to the process. Raises
        LeaseLostError while another owner's lease lives, and where one lived after `since_epoch`.
        """
        await self._hear_time()
        ttl_ms = _ms(ttl_s)
        epoch, holder = await self._run("acquire", device, owner, ttl_ms, since_epoch, *keep)
        if not epoch:
            raise LeaseLostError(f"the queue of {device} is held by {_text(holder)}")
        return int(epoch)

    async def renew(self, device: str, owner: str, epoch: int, ttl_s: float) -> None:
        """Raises LeaseLostError on another server than at `acquire`, too: its data may be old."""
        await self._hear_time()
        await self._run("renew", device, owner, epoch, _ms(ttl_s))

    async def release(self, device: str, owner: str, epoch: int) -> None:
        await self._run("release", device, owner, epoch)

    async def read(self, device: str, cursor: str, count: int = 256) -> list[tuple[str, Request]]:
        """(entry id, request) pairs after `cursor`, oldest first; "0" replays all that wait.

        Raises MalformedRequestError where one of them is no request; `set_aside` makes way for the
        rest."""
        found = await self._read_streams({self._key("queue", device): cursor}, 0, count)
        return self._decoded(found)

    async def follow(
        self, device: str, cursor: str, left: str, block_s: float, count: int = 256
    ) -> tuple[list[tuple[str, Request]], str]:
        """As `read`, waiting up to `block_s` (at most 5 s) for the first one, and for word that
        requests left this queue for other copies: `left` as returned last, "0" at first. Another
        one means that what was read before is stale."""
        queue, gone = self._key("queue", device), self._key("left", device)
        found = await self._read_streams({queue: cursor, gone: left}, block_s, count)
        ids = [entry for key, entry, _ in found if key == gone]
        requests = self._decoded([row for row in found if row[0] == queue])
        return requests, ids[-1] if ids else left

    def _decoded(self, found: Sequence[Row]) -> list[tuple[str, Request]]:
        requests: list[tuple[str, Request]] = []
        malformed: dict[str, tuple[str, int]] = {}
        for _, entry, fields in found:
            try:
                requests.append((entry, self._requests.decode(fields.get(b"body", b""))))
            except MALFORMED_ERRORS:
                malformed[entry] = _headline(fields)
        if malformed:
            raise MalformedRequestError(malformed)
        return requests

    async def admit(self, device: str, epoch: int, entry_ids: Collection[str]) -> set[str]:
        """Waiting -> running. Returns the entries that run here now; the others have left."""
        if not entry_ids:
            return set()
        return _texts(await self._run("admit", device, epoch, *entry_ids))

    async def register(self, device: str, epoch: int, requests: Collection[Request]) -> None:
        """These run here, whether or not the server still knows of them. A newer attempt stays."""
        if not requests:
            return
        rows: list[str | int | bytes] = []
        for each in requests:
            rows += (each.id, each.model, each.attempt, msgspec.msgpack.encode(each))
        await self._run("register", device, epoch, *rows)

    async def discard(self, device: str, epoch: int, entry_ids: Collection[str]) -> None:
        """These waiting entries are gone, whatever newer attempts of their requests there are."""
        if entry_ids:
            await self._run("discard", device, epoch, *entry_ids)

    async def set_aside(self, device: str, epoch: int, entry_ids: Collection[str]) -> set[str]:
        """These waiting entries are no requests: they go to a stream of their own, for a look at
        them. Returns the frontends that live; one of them may have sent them."""
        return _texts(await self._run("set_aside", device, epoch, *entry_ids))

    async def finish(self, device: str, epoch: int, request_ids: Collection[str]) -> None:
        """Acknowledge: these are gone from Redis. Unknown ids are ignored."""
        if request_ids:
            await self._run("finish", device, epoch, *request_ids)

    async def requeue(self, device: str, epoch: int, request_ids: Collection[str]) -> int:
        """Running -> waiting where the model is placed now; returns how many."""
        if not request_ids:
            return 0
        return int(await self._run("requeue", device, epoch, *request_ids))

    async def move(self, device: str, epoch: int, requests: Collection[Request]) -> int:
        """Running -> waiting as these say, at the copy with their KV, if any; returns how many."""
        if not requests:
            return 0
        parts = [p for r in requests for p in (r.id, msgspec.msgpack.encode(r), r.kv_device)]
        return int(await self._run("move", device, epoch, *parts))

    async def unplace(self, device: str, epoch: int, entry_ids: Collection[str]) -> int:
        """Waiting here -> UNPLACED, for models that this device does not serve; returns how many.

        The placement stays as it is: only the scheduler changes it.
        """
        if not entry_ids:
            return 0
        return int(await self._run("unplace", device, epoch, *entry_ids))

    async def live_frontends(self, frontend_ids: Sequence[str]) -> set[str]:
        """Those whose heartbeat has not run out.

        Raises QueueUnavailableError while Redis takes no writes too: no heartbeat arrives then.
        """
        if not frontend_ids:
            return set()
        keys = [self._key("frontend", name) for name in frontend_ids]
        await self.check_writable()
        beats = await self._call(lambda: self._redis.mget(keys))
        return {name for name, beat in zip(frontend_ids, beats, strict=True) if beat is not None}

    async def check_writable(self) -> None:
        """Raises QueueUnavailableError while Redis takes no writes. A pause holds it up."""
        key, ttl_ms = self._prefix + "writable", _ms(_WRITABLE_TTL_S)
        await self._call(lambda: self._redis.set(key, b"1", px=ttl_ms))

    # --- the cluster scheduler --------------------------------------------------------------

    async def route(self, model: str, *devices: str) -> int:
        """Place the copies of `model` (none: nowhere) and move its waiting requests; returns how
        many moved. Only the cluster scheduler calls this."""
        return int(await self._run("route", model, *devices))

    async def placement(self, *models: str) -> dict[str, tuple[str, ...]]:
        """Model -> the devices of its copies, of these models or of all."""
        key, client = self._prefix + "placement", self._redis
        found = await self._call(
            lambda: client.hmget(key, models) if models else client.hgetall(key)
        )
        pairs = zip(models, found, strict=True) if models else found.items()
        return {_text(name): tuple(_text(d).split("|")) for name, d in pairs if d is not None}

    async def depth(self, device: str) -> int:
        """Requests waiting in this queue."""
        key = self._key("queue", device)
        return int(await self._call(lambda: self._redis.xlen(key)))

    async def unplaced_counts(self) -> dict[str, int]:
        """Model -> requests waiting in UNPLACED."""
        flat = iter(await self._run("unplaced_counts"))
        return {_text(model): int(count) for model, count in zip(flat, flat, strict=True)}

    async def wait_unplaced(self, cursor: str, block_s: float) -> tuple[str, dict[str, int]]:
        """Wait up to `block_s` (at most 5 s) for arrivals in UNPLACED after `cursor` ("0": all).

        Returns the new cursor and model -> new arrivals.
        """
        entries = await self._read_streams({self._key("queue", UNPLACED): cursor}, block_s, 1024)
        counts = Counter(_text(fields.get(b"model", b"")) for _, _, fields in entries)
        return (entries[-1][1] if entries else cursor), dict(counts)

    async def frontends(self) -> list[FrontendState]:
        """What those that live said last."""
        names = await self._call(lambda: self._redis.smembers(self._prefix + "frontends"))
        keys = [self._key("frontend", name) for name in sorted(_texts(names))]
        beats = await self._call(lambda: self._redis.mget(keys)) if keys else []
        return [self._state_of(beat) for beat in beats if beat is not None]

    def _state_of(self, beat: bytes) -> FrontendState:
        try:
            return self._frontends.decode(beat)
        except MALFORMED_ERRORS:  # of a version that said nothing
            return FrontendState()

    async def publish_status(self, status: ClusterStatus) -> None:
        await self._hear_time()
        key, body = self._prefix + "status", msgspec.msgpack.encode(status)
        await self._call(lambda: self._redis.set(key, body))

    async def status(self) -> ClusterStatus | None:
        """Returns what the scheduler published last, None if that is damaged or missing."""
        body = await self._call(lambda: self._redis.get(self._prefix + "status"))
        try:
            return None if body is None else self._statuses.decode(body)
        except MALFORMED_ERRORS as error:
            log.warning("the cluster's status in Redis is not readable: %s", error)
            return None

    # --- below ------------------------------------------------------------------------------

    async def _hear_time(self) -> None:
        """Those that come here every few seconds keep the cluster's clock by it."""
        asked_s = time.monotonic()
        seconds, micros = await self._call(self._redis.time)
        clock.heard(seconds + micros / 1e6, asked_s, time.monotonic())

    def _key(self, kind: str, name: str) -> str:
        return f"{self._prefix}{kind}:{name}"

    async def _run(self, script: str, *args: str | int | bytes) -> Any:
        return await self._call(lambda: self._scripts[script](keys=[self._prefix], args=args))

    async def _call(self, call: Callable[[], Any]) -> Any:
        """Calls Redis. After an error of Redis, damaged keys are dropped as if they were lost, and
        the call is repeated."""
        try:
            return await self._answer(call())
        except exceptions.ResponseError as error:
            damaged = await self._drop_damaged()
            log.error("Redis says: %s; damaged keys were dropped: %s", error, damaged or "none")
        return await self._answer(call())

    async def _drop_damaged(self) -> list[str]:
        """Returns their names. What they held comes back as after any loss of data (decision 027),
        for which frontends and agents have to take the server for another one."""
        with named_errors():
            keys = [key async for key in self._redis.scan_iter(f"{self._prefix}*", count=1000)]
        damaged: list[bytes] = []
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            batch = keys[start : start + _KEYS_AT_ONCE]
            script = self._scripts["drop_damaged"]
            damaged += await self._answer(script(keys=[self._prefix], args=batch))
        if damaged:
            acquired = [key for key in keys if key.startswith(self._key("acquired", "").encode())]
            known = [self._prefix + "incarnation", self._prefix + "server", *acquired]
            await self._answer(self._redis.unlink(*known))
        return sorted(_texts(damaged))

    async def _answer(self, answer: Any) -> Any:
        # redis-py waits with asyncio.wait_for, which before Python 3.12 swallows a cancellation
        # that comes in the moment it is done: the caller would go on for ever.
        task = asyncio.current_task()
        before = task.cancelling() if task else 0
        with named_errors():
            value = await cast("Awaitable[Any]", answer)
        if task and task.cancelling() > before:
            raise asyncio.CancelledError
        return value

    async def _read_streams(self, cursors: dict[Any, Any], block_s: float, count: int) -> list[Row]:
        """Of each stream what comes after its cursor."""
        block_ms = max(1, _ms(min(block_s, _BLOCK_MAX_S))) if block_s > 0 else None
        answer = await self._call(lambda: self._redis.xread(cursors, count=count, block=block_ms))
        return [
            (_text(key), _text(entry), fields)
            for key, entries in answer or ()
            for entry, fields in entries
        ]


def _headline(fields: dict[bytes, bytes]) -> tuple[str, int]:
    """Id and attempt of a malformed entry, as far as it has them."""
    return _text(fields.get(b"id", b"")), _attempt(fields.get(b"attempt", b""))


def _attempt(text: bytes) -> int:
    """0 where it is none."""
    return int(text) if text.isdigit() and len(text) <= _ATTEMPT_DIGITS_MAX else 0


def _text(value: bytes | str) -> str:
    """Bytes that are damaged are a name that nothing has."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _texts(values: Sequence[bytes]) -> set[str]:
    return {_text(value) for value in values}


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
