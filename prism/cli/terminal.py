"""Console of the commands."""

from __future__ import annotations

from rich.console import Console

_PIPE_COLUMNS = 10_000


def new_console(*, stderr: bool = False) -> Console:
    """Returns a console. In a file or a pipe it neither wraps lines nor cuts names of tables."""
    console = Console(stderr=stderr)
    if not console.is_terminal:
        console.width = _PIPE_COLUMNS
    return console
