"""Progress of a download in pipes and logs, and its end by a signal."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

from prism.models.hub.hub_model import Say

_LINE_S = 10.0
# The bar of bytes on the disk, among those that huggingface_hub makes.
_BYTES = "huggingface_hub.snapshot_download"


def lines(name: str, total_bytes: int, say: Say) -> type[tqdm]:
    """Returns a class of progress bars that prints a line every 10 s, for pipes and logs."""

    class Lines(tqdm):
        said_s = time.monotonic()

        def __init__(self, *args: Any, **more: Any) -> None:
            more["disable"] = more.get("name") != _BYTES
            super().__init__(*args, **more)  # type: ignore[no-untyped-call]

        def display(self, *_: object, **__: object) -> None:
            if time.monotonic() - self.said_s >= _LINE_S:
                self.said_s = time.monotonic()
                say(f"{name}: {shown(self.n)} of {shown(total_bytes)}")

        def close(self) -> None:
            self.disable = True  # the bar of a terminal would be drawn again

    return Lines


def shown(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"


@contextmanager
def ends_at_once() -> Iterator[None]:
    """Ends the process at Ctrl-C or SIGTERM within the block, without its partial files.

    Otherwise the threads of huggingface_hub would first finish their files, which may take minutes.
    """
    before = {each: signal.signal(each, _end) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, _frame: object) -> None:
    for link in os.scandir("/proc/self/fd"):
        with suppress(OSError):
            if (path := os.readlink(link.path)).endswith(".incomplete"):
                os.unlink(path)
    os._exit(128 + number)
