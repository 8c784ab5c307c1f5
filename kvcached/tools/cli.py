"""Entry point of `kvctl`, which names the extra to install if it is missing."""

from __future__ import annotations

import sys

from kvcached.errors import KvcachedError

_NEEDED = {"typer", "rich"}
LOCK_TIMEOUT_S = 1.0
"""Limit of a command's wait for a ledger that another process keeps locked."""


def main() -> None:
    """Runs the command.

    Exits with code 2 and one line if a call is refused or the extra `tools` is not installed.
    """
    try:
        import kvcached._core as _core
        from kvcached.tools.commands import app

        _core.set_lock_timeout(LOCK_TIMEOUT_S)
        app(prog_name="kvctl")
    except KvcachedError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _NEEDED:
            raise
        _fail(
            f"the package {missing} is missing; run pip install '.[tools]' in a checkout, or"
            " pip install 'FILE[tools]' with the wheel's FILE"
        )


def _fail(message: str) -> None:
    print(f"kvctl: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
