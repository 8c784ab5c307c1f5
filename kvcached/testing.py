"""What users of kvcached test with on a host device."""

from __future__ import annotations

from kvcached import _core


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
