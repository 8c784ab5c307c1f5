"""Maps exceptions to exit codes and one-line messages."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

import typer

from prism.errors import ConfigError, PrismError

INTERRUPTED = 128 + signal.SIGINT


def new_app(help_: str | None = None, name: str | None = None) -> typer.Typer:
    """Returns the app of a program for `run`. With a help text, it is also shown without
    arguments."""
    return typer.Typer(
        name=name,
        help=help_,
        no_args_is_help=help_ is not None,
        pretty_exceptions_enable=False,
    )


def run(command: Callable[[], object], name: str) -> None:
    """Runs a command. Exit codes: 0 success, 1 failure, 2 wrong input, 130 Ctrl-C. The line of an
    error on stderr begins with `name`."""
    try:
        command()
    except PrismError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
