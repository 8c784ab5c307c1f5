"""A simulated cluster behind the ports that the live schedulers run on.

`simulate` and `Results` are the Python API (docs/prism-sim.md); they are imported when asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prism_sim.api import Results, simulate

__all__ = ["Results", "simulate"]


def __getattr__(name: str) -> Any:
    """Modules of the simulator import each other, and not all of it."""
    if name in __all__:
        from prism_sim import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
