"""Background read that its owner can wait for or cancel."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvcached.checks import checked, duration


class Prefetch:
    """Background read made by `WeightStore.prefetch`. Thread rule: any thread."""

    def __init__(self, read: Callable[[threading.Event], None]) -> None:
        self._read = read
        self._cancel = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="weights-prefetch", daemon=True)
        self._thread.start()

    @checked(timeout_s=duration)
    def wait(self, timeout_s: float | None = None) -> bool:
        """Returns whether the read ended within `timeout_s`. Raises the error that ended it."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    @property
    def done(self) -> bool:
        """True once the read has ended, with or without success."""
        return not self._thread.is_alive()

    def cancel(self) -> None:
        """Stops after the chunks under way. No partly read entry stays in the store."""
        self._cancel.set()

    def _run(self) -> None:
        try:
            self._read(self._cancel)
        except BaseException as error:  # noqa: BLE001 (`wait` raises it, the callers' errors too)
            self._error = error
