"""What agents of different machines say to each other: KV of running requests, file by file."""

from __future__ import annotations

from prism.messages import Wire


class KvPart(Wire, frozen=True):
    """Bytes of a file; parts come in order."""

    sender: str  # the device whose agent sends it
    name: str  # the file's
    size_bytes: int  # of the whole file
    offset: int
    data: bytes


class KvTaken(Wire, frozen=True):
    """The answer to a part."""

    name: str
    taken_bytes: int = 0  # so much of the file has come
    path: str = ""  # where the whole file is
    problem: str = ""  # why it is not taken
