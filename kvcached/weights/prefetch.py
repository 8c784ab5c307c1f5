"""Work in the background that its owner can wait for or give up."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvcached.checks import checked, duration


class Prefetch:
    """Made by `WeightStore.prefetch`. Thread rule: any thread."""

    def __init__(self, read: Callable[[threading.Event], None]) -> None:
        self._read = read
        self._cancel = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="weights-prefetch", daemon=True)
        self._thread.start()

    @checked(timeout_s=duration)
    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it is through, after at most that long. Raises what ended it early."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    @property
    def done(self) -> bool:
        """Whether it is through, well or not."""
        return not self._thread.is_alive()

    def cancel(self) -> None:
        """Ends it after the chunks that are under way; nothing half read stays in the store."""
        self._cancel.set()

    def _run(self) -> None:
        try:
            self._read(self._cancel)
        except BaseException as error:  # noqa: BLE001 (`wait` raises it, the caller's own too)
            self._error = error
