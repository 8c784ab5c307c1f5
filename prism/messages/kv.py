"""Messages between agents of different machines: KV files of running requests, in parts."""

from __future__ import annotations

from prism.messages import Wire


class KvPart(Wire, frozen=True):
    """Bytes of a file. The parts of a file are sent in order."""

    sender: str  # device of the sending agent
    name: str  # of the file
    size_bytes: int  # of the whole file
    offset: int
    data: bytes


class KvTaken(Wire, frozen=True):
    """Answer to a part."""

    name: str
    taken_bytes: int = 0  # bytes of the file received so far
    path: str = ""  # path of the complete file
    problem: str = ""  # reason of a refusal
