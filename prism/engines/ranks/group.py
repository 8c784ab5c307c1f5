"""Collectives and messages between the ranks of one engine.

Rank 0 has a socket pair to each of the others.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from prism.engines.ranks.orders import FromFollower, FromLeader, Vote
from prism.errors import RankLostError
from prism.messages import MALFORMED_ERRORS
from prism.transport import ENGINE_MESSAGE_BYTES_MAX

M = TypeVar("M")
_LENGTH_BYTES = 8


class RankGroup:
    """One rank's connection to the others. All ranks make the same collective calls in the same
    order.

    Calls block without a time limit. A suspended rank stalls the engine; the agent then ends rank
    0, which closes its sockets. Every call raises RankLostError once a rank is gone or sends an
    unexpected message. The engine must then end, since the state of the other ranks is unknown.
    Thread rule: one thread.
    """

    def __init__(
        self, rank: int, size: int, links: Sequence[socket.socket], folder: str = ""
    ) -> None:
        self.rank = rank
        self.size = size
        self._links = list(links)
        self._folder = folder
        self._rendezvous_count = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._from_follower = msgspec.msgpack.Decoder(FromFollower)
        self._from_leader = msgspec.msgpack.Decoder(FromLeader)

    # --- collectives -----------------------------------------------------------------------

    def least(self, value: int) -> int:
        """Returns the smallest of all ranks' values, on every rank."""
        if self.rank > 0:
            self.answer(Vote(value))
            return self._take(self.order(), Vote, 0).value
        smallest = min(value, *(vote.value for vote in self.gather(Vote))) if self._links else value
        self.broadcast(Vote(smallest))
        return smallest

    def all_true(self, ok: bool) -> bool:
        """Returns on every rank whether all ranks passed True."""
        return self.least(int(ok)) == 1

    def rendezvous_path(self) -> Path:
        """Returns a new path, the same on all ranks. The ranks of torch.distributed find each other
        through a file at this path."""
        self._rendezvous_count += 1
        return Path(self._folder) / f"rendezvous-{self._rendezvous_count}"

    # --- rank 0 ----------------------------------------------------------------------------

    def broadcast(self, message: FromLeader) -> None:
        """Sends a message to every other rank."""
        payload = self._encoder.encode(message)
        for rank, link in enumerate(self._links, 1):
            _send(link, payload, rank)

    def gather(self, kind: type[M] | tuple[type[M], ...]) -> list[M]:
        """Returns the next answer of every other rank, in the order of the ranks."""
        kinds = kind if isinstance(kind, tuple) else (kind,)
        answers = [(r, _receive(link, r)) for r, link in enumerate(self._links, 1)]
        return [self._take(_decoded(self._from_follower, d, r), kinds, r) for r, d in answers]

    # --- the other ranks -------------------------------------------------------------------

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `order` does not block. REQUIRES: this is not
        rank 0."""
        return self._links[0].fileno()

    def order(self) -> FromLeader:
        """Waits for rank 0's next message and returns it."""
        order: FromLeader = _decoded(self._from_leader, _receive(self._links[0], 0), 0)
        return order

    def answer(self, message: FromFollower) -> None:
        """Sends a message to rank 0."""
        _send(self._links[0], self._encoder.encode(message), 0)

    def close(self) -> None:
        for link in self._links:
            link.close()

    @staticmethod
    def _take(message: object, kind: type[M] | tuple[type[M], ...], rank: int) -> M:
        if not isinstance(message, kind):
            raise RankLostError(f"rank {rank} is out of step: it sent {type(message).__name__}")
        return message


ALONE = RankGroup(0, 1, ())


def _send(link: socket.socket, payload: bytes, rank: int) -> None:
    try:
        link.sendall(len(payload).to_bytes(_LENGTH_BYTES, "little") + payload)
    except OSError as error:
        raise RankLostError(f"rank {rank} is gone: {error}") from error


def _receive(link: socket.socket, rank: int) -> bytes:
    length = int.from_bytes(_read(link, _LENGTH_BYTES, rank), "little")
    if length > ENGINE_MESSAGE_BYTES_MAX:
        raise RankLostError(f"rank {rank} is out of step: it announces {length} bytes")
    return _read(link, length, rank)


def _decoded(decoder: msgspec.msgpack.Decoder[Any], data: bytes, rank: int) -> Any:
    try:
        return decoder.decode(data)
    except MALFORMED_ERRORS as error:
        raise RankLostError(f"rank {rank} is out of step: {error}") from error


def _read(link: socket.socket, size_bytes: int, rank: int) -> bytes:
    data = bytearray()
    while len(data) < size_bytes:
        try:
            part = link.recv(size_bytes - len(data))
        except OSError as error:
            raise RankLostError(f"rank {rank} is gone: {error}") from error
        if not part:
            raise RankLostError(f"rank {rank} is gone")
        data += part
    return bytes(data)
