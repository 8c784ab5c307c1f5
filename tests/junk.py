"""Junk for the keys of Redis: other types, random bytes, truncated values, huge values."""

from __future__ import annotations

from contextlib import suppress
from random import Random

from redis import Redis, ResponseError

_TRIES = 5
_HUGE_BYTES = 4 << 20
_LAST_ID = f"{2**64 - 1}-{2**64 - 1}"


def junk_into(client: Redis, key: str, kind: str, rng: Random) -> None:
    """Replaces the value or parts of it. Retries if the key's owner writes it between two commands,
    so that the second one finds another type."""
    for _ in range(_TRIES - 1):
        with suppress(ResponseError):
            return JUNK[kind](client, key, rng)
    return JUNK[kind](client, key, rng)


def _other_type(client: Redis, key: str, rng: Random) -> None:
    is_hash = client.type(key) == b"hash"
    client.delete(key)
    if is_hash or rng.random() < 0.3:
        client.rpush(key, rng.randbytes(9))
    else:
        client.hset(key, rng.randbytes(9), rng.randbytes(9))


def _text(client: Redis, key: str, rng: Random) -> None:
    text = rng.choice(("junk", "", "|", "nan", "inf", "-1", "1e300", "9" * 5001, "null", "{}"))
    if rng.random() < 0.5:
        client.set(key, text)
    else:
        _write(client, key, text.encode(), rng)


def _bytes(client: Redis, key: str, rng: Random) -> None:
    _write(client, key, rng.randbytes(rng.choice((1, 40, 400))), rng)


def _huge(client: Redis, key: str, rng: Random) -> None:
    _write(client, key, rng.randbytes(_HUGE_BYTES), rng)


def _cut(client: Redis, key: str, rng: Random) -> None:
    """Truncates a string or a hash; writes empty values to other types."""
    if client.type(key) == b"string":
        body = client.get(key) or b""  # it may have expired
        client.set(key, body[: rng.randrange(len(body) + 1)])
        return
    _write(client, key, b"", rng)


def _late(client: Redis, key: str, rng: Random) -> None:
    """Makes a stream that accepts no more entries."""
    client.delete(key)
    client.xadd(key, {"id": rng.randbytes(3)}, id=_LAST_ID)


def _write(client: Redis, key: str, body: bytes, rng: Random) -> None:
    """Writes `body` into the values of the existing type."""
    kind = client.type(key)
    if kind == b"hash":
        fields = client.hkeys(key)
        client.hset(key, mapping=dict.fromkeys([*fields, rng.randbytes(5)], body))
    elif kind == b"set":
        client.sadd(key, body)
    elif kind == b"list":
        client.lpush(key, body)
    elif kind == b"stream":
        if client.xinfo_stream(key)["last-generated-id"] == _LAST_ID.encode():
            client.delete(key)  # it accepts no more entries
        client.xadd(key, {b"id": body} if rng.random() < 0.5 else {body: body, b"body": body})
    else:
        client.set(key, body)


JUNK = {
    "another type": _other_type,
    "text": _text,
    "bytes": _bytes,
    "huge": _huge,
    "cut": _cut,
    "late": _late,
}
