"""The console scripts. `--version` of each prints the version without further imports."""

from __future__ import annotations

import importlib
import signal
import sys
from pathlib import Path


def serve() -> None:
    start("prism.cli.serve", "prism-serving")


def models() -> None:
    start("prism.cli.models", "prism-serving")


def start(module: str, distribution: str) -> None:
    """Runs the command of `module`. Ctrl-C during the imports, which may take seconds, ends the
    process without output."""
    if sys.argv[1:] == ["--version"]:
        from importlib.metadata import version

        print(Path(sys.argv[0]).name, version(distribution))
        return
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)
        cli = importlib.import_module(module)
        signal.signal(signal.SIGINT, before)
    except KeyboardInterrupt:  # a moment before it has no handler, or after
        sys.exit(128 + signal.SIGINT)
    try:
        cli.main()
    except KeyboardInterrupt:  # a moment before `main` looks for it, or after
        sys.exit(128 + signal.SIGINT)
