"""Receiver of requests' KV from agents of other machines, part by part into files."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from prism.agent.network.sockets import PeerLinks
from prism.engines.kv_moves import kv_file
from prism.messages.kv import KvPart, KvTaken

SILENT_S = 10.0  # without a part for this long, a file is discarded

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Incoming:
    path: Path
    file: BinaryIO
    size_bytes: int
    seen_s: float
    taken_bytes: int = 0


class KvReceiver:
    """Receiver with at most one unfinished file per sender. For one event loop.

    A part blocks the loop for about as long as copying it takes, since `folder` is in shared
    memory.

    Args:
        folder: where files are written.
        bytes_max: maximum size of a file.
    """

    def __init__(
        self,
        peers: PeerLinks,
        folder: Path,
        bytes_max: int,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._peers = peers
        self._folder = folder
        self._bytes_max = bytes_max
        self._now_s = now_s
        self._incoming: dict[str, _Incoming] = {}

    def take(self, part: KvPart) -> None:
        """Writes a part and answers it.

        A file with an error is discarded. Its further parts, which are already on the network, are
        dropped.
        """
        if part.offset and not self._expects(part):
            return
        try:
            answer = self._write(part)
        except OSError as error:
            self._discard(part.sender)
            log.warning("KV from %.100r is not accepted: %s", part.sender, error)
            answer = KvTaken(part.name, problem=str(error)[:200])
        try:
            self._peers.send(part.sender, answer)
        except ConnectionError as error:
            log.warning("%s", error)
            self._discard(part.sender)

    def tick(self) -> None:
        """Discards files whose senders are silent."""
        for sender, incoming in list(self._incoming.items()):
            if self._now_s() - incoming.seen_s > SILENT_S:
                log.warning("KV from %s is discarded: no part for %g s", sender, SILENT_S)
                self._discard(sender)

    def close(self) -> None:
        for sender in list(self._incoming):
            self._discard(sender)

    def _expects(self, part: KvPart) -> bool:
        incoming = self._incoming.get(part.sender)
        return incoming is not None and incoming.path.name == part.name

    def _write(self, part: KvPart) -> KvTaken:
        """Writes a part and returns the answer. Raises OSError."""
        if part.offset == 0:
            self._discard(part.sender)
            self._incoming[part.sender] = self._begin(part)
        incoming = self._incoming[part.sender]
        if part.offset != incoming.taken_bytes:
            received = f"the {incoming.taken_bytes} bytes received"
            raise ConnectionError(f"offset {part.offset} does not follow {received}")
        if not 0 < len(part.data) <= incoming.size_bytes - part.offset:
            raise ConnectionError(f"a part of {len(part.data)} bytes is empty or exceeds the file")
        incoming.file.write(part.data)
        incoming.taken_bytes += len(part.data)
        incoming.seen_s = self._now_s()
        if incoming.taken_bytes < incoming.size_bytes:
            return KvTaken(part.name, incoming.taken_bytes)
        incoming.file.close()
        del self._incoming[part.sender]
        return KvTaken(part.name, incoming.taken_bytes, str(incoming.path))

    def _begin(self, part: KvPart) -> _Incoming:
        if not self._peers.knows(part.sender):
            raise PermissionError("the sender is not a device of another machine of the cluster")
        if not 0 < part.size_bytes <= self._bytes_max:
            raise PermissionError(f"{part.size_bytes} bytes is not a valid size of a request's KV")
        file = kv_file.create(self._folder, part.name)
        return _Incoming(self._folder / part.name, file, part.size_bytes, self._now_s())

    def _discard(self, sender: str) -> None:
        if (incoming := self._incoming.pop(sender, None)) is not None:
            with suppress(OSError):
                incoming.file.close()
            with suppress(OSError):
                incoming.path.unlink(missing_ok=True)
