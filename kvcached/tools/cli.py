"""Entry point of `kvctl`; says what to install where the extra is missing."""

from __future__ import annotations

import sys

from kvcached.errors import KvcachedError

_NEEDED = {"typer", "rich"}
LOCK_TIMEOUT_S = 1.0
"""How long a command waits for a ledger that another process keeps locked."""


def main() -> None:
    """Exit code 2 with one line when a call is refused or the extra `tools` is not installed."""
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
        _fail(f"the package {missing} is missing; pip install 'prism-kvcached[tools]'")


def _fail(message: str) -> None:
    print(f"kvctl: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
