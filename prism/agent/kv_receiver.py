"""KV of requests that come from agents of other machines, part by part into a file."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from prism.agent.sockets import PeerLinks
from prism.engines import kv_file
from prism.messages.kv import KvPart, KvTaken

SILENT_S = 10.0  # a file of which nothing comes for so long is given up

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Incoming:
    path: Path
    file: BinaryIO
    size_bytes: int
    seen_s: float
    taken_bytes: int = 0


class KvReceiver:
    """At most one unfinished file per sender. For one event loop, which a part keeps for about as
    long as copying it takes: `folder` is in shared memory. bytes_max: of a file."""

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
        """Writes it, and answers. A file that cannot be taken leaves nothing behind; its further
        parts, which are under way, are dropped."""
        if part.offset and not self._expects(part):
            return
        try:
            answer = self._write(part)
        except OSError as error:
            self._give_up(part.sender)
            log.warning("KV from %.100r is not taken: %s", part.sender, error)
            answer = KvTaken(part.name, problem=str(error)[:200])
        try:
            self._peers.send(part.sender, answer)
        except ConnectionError as error:
            log.warning("%s", error)
            self._give_up(part.sender)

    def tick(self) -> None:
        """Gives up files whose senders are silent."""
        for sender, incoming in list(self._incoming.items()):
            if self._now_s() - incoming.seen_s > SILENT_S:
                log.warning("KV from %s does not come any more", sender)
                self._give_up(sender)

    def close(self) -> None:
        for sender in list(self._incoming):
            self._give_up(sender)

    def _expects(self, part: KvPart) -> bool:
        incoming = self._incoming.get(part.sender)
        return incoming is not None and incoming.path.name == part.name

    def _write(self, part: KvPart) -> KvTaken:
        """Raises OSError."""
        if part.offset == 0:
            self._give_up(part.sender)
            self._incoming[part.sender] = self._begin(part)
        incoming = self._incoming[part.sender]
        if part.offset != incoming.taken_bytes:
            raise ConnectionError(f"{incoming.taken_bytes} bytes have come before {part.offset}")
        if not 0 < len(part.data) <= incoming.size_bytes - part.offset:
            raise ConnectionError(f"{len(part.data)} bytes are no part of it")
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
            raise PermissionError("no other machine of the cluster has this device")
        if not 0 < part.size_bytes <= self._bytes_max:
            raise PermissionError(f"{part.size_bytes} bytes are too many for one request")
        file = kv_file.create(self._folder, part.name)
        return _Incoming(self._folder / part.name, file, part.size_bytes, self._now_s())

    def _give_up(self, sender: str) -> None:
        if (incoming := self._incoming.pop(sender, None)) is not None:
            with suppress(OSError):
                incoming.file.close()
            with suppress(OSError):
                incoming.path.unlink(missing_ok=True)
