"""The console scripts. `pip install prism-serving` alone brings kvcached without what they need."""

from __future__ import annotations

import importlib
import sys


def serve() -> None:
    """`prism-serve`."""
    _run("prism-serve", "prism.serve.cli")


def replay() -> None:
    """`prism-replay`."""
    _run("prism-replay", "prism.replay.cli")


def models() -> None:
    """`prism-models`."""
    _run("prism-models", "prism.models.cli")


def sim() -> None:
    """`prism-sim`."""
    _run("prism-sim", "prism.sim.cli")


def _run(command: str, module: str) -> None:
    """One line and exit code 2 where a package of the extra is missing."""
    try:
        cli = importlib.import_module(module)
    except ModuleNotFoundError as error:
        print(
            f"error: {command} needs the package {error.name}; install the extra: pip install"
            " 'prism-serving[serve]', in a checkout pip install '.[serve]'",
            file=sys.stderr,
        )
        sys.exit(2)
    cli.main()
