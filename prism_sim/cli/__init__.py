"""Console script `prism-sim`."""

from __future__ import annotations

from prism.cli.commands import start


def main() -> None:
    """Runs the command. Prints the version without importing it."""
    start("prism_sim.cli.sim", "prism-sim")
