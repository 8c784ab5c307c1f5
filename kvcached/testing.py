"""What users of kvcached test with: streams of a host device, content of any."""

from __future__ import annotations

from typing import Any

import kvcached._core as _core
from kvcached.weights.tensor_reader import read_bytes


def read_tensor(array: Any) -> bytes:
    """A copy of a contiguous DLPack tensor's content, wherever it is: the CPU cannot read a GPU's
    memory. After the work on its owner's current stream; one of kvcached's own has no stream."""
    return read_bytes(array)


class HostStream:
    """A stream of a host device whose work ends when the test says so (`Client.set_streams`).

    Stands in for a CUDA stream. Used from any thread.
    """

    def __init__(self) -> None:
        self._core = _core.HostStream()

    @property
    def handle(self) -> int:
        """For `set_streams`; valid as long as this object lives."""
        return self._core.handle

    def pending(self) -> int:
        """Pieces of work that are submitted and not done."""
        return self._core.pending

    def submit(self) -> None:
        """One more piece of work, which may touch any memory."""
        self._core.submit()

    def complete(self) -> None:
        """The oldest piece is done; nothing happens if there is none."""
        self._core.complete()

    def complete_all(self) -> None:
        """All of it is done."""
        self._core.complete_all()
