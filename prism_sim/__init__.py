"""Simulated cluster, which implements the ports of the live schedulers.

`simulate` and `compare` are the Python API (docs/prism-sim.md). They are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prism_sim.api import Comparison, Results, compare, simulate, to_pandas

__all__ = ["Comparison", "Results", "compare", "simulate", "to_pandas"]


def __getattr__(name: str) -> Any:
    """Imports the API on first use, so that a submodule's import does not load all of it."""
    if name in __all__:
        from prism_sim import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
