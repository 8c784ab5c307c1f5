"""The console scripts. `pip install .` alone brings kvcached without what they need."""

from __future__ import annotations

import importlib
import signal
import sys


def serve() -> None:
    _run("prism-serve", "prism.cli.serve")


def replay() -> None:
    _run("prism-replay", "prism.cli.replay")


def models() -> None:
    _run("prism-models", "prism.cli.models")


def sim() -> None:
    _run("prism-sim", "prism.cli.sim")


def _run(command: str, module: str) -> None:
    """One line and exit code 2 where a package of the extra is missing. Ctrl-C during the imports,
    which may take seconds, ends the process without a word."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)
        cli = importlib.import_module(module)
        signal.signal(signal.SIGINT, before)
    except ModuleNotFoundError as error:
        print(
            f"error: {command} needs the package {error.name}; install the extra, in Prism's"
            " checkout: pip install '.[serve]'",
            file=sys.stderr,
        )
        sys.exit(2)
    except KeyboardInterrupt:  # a moment before it has no handler, or after
        sys.exit(128 + signal.SIGINT)
    try:
        cli.main()
    except KeyboardInterrupt:  # a moment before `main` looks for it, or after
        sys.exit(128 + signal.SIGINT)
