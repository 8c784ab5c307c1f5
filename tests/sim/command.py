"""`prism-sim` as a shell calls it."""

from __future__ import annotations

import sys

import pytest

from prism.cli import sim


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Exit code of the command."""
    monkeypatch.setattr(sys, "argv", ["prism-sim", *arguments])
    try:
        sim.main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    return 0
