"""Test helpers for users of kvcached: streams of a host device, contents of any tensor."""

from __future__ import annotations

from typing import Any

import kvcached._core as _core
from kvcached.weights.tensor_reader import read_bytes


def read_tensor(array: Any) -> bytes:
    """Returns a copy of a contiguous DLPack tensor's content, from a GPU too.

    Reads after the work on the owner's current stream. kvcached's own tensors have no stream.
    """
    return read_bytes(array)


class HostStream:
    """A stream of a host device whose work ends when the test calls for it (`Client.set_streams`).

    Replaces a CUDA stream. Used from any thread.
    """

    def __init__(self) -> None:
        self._core = _core.HostStream()

    @property
    def handle(self) -> int:
        """Handle for `set_streams`, valid while this object lives."""
        return self._core.handle

    def pending(self) -> int:
        """Returns the number of submitted pieces of work that are not done."""
        return self._core.pending

    def submit(self) -> None:
        """Submits one piece of work, which may access any memory."""
        self._core.submit()

    def complete(self) -> None:
        """Completes the oldest piece of work, if there is one."""
        self._core.complete()

    def complete_all(self) -> None:
        """Completes all pieces of work."""
        self._core.complete_all()
