"""Former place of `prism_sim.simulate` and `prism_sim.Results`. It goes after release 0.1."""

from __future__ import annotations

import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    """Returns the attribute of `prism_sim`. Raises AttributeError if it does not have one."""
    if name in ("Results", "simulate"):
        import prism_sim

        warnings.warn("prism.sim is prism_sim now", DeprecationWarning, stacklevel=2)
        return getattr(prism_sim, name)
    raise AttributeError(f"module {__name__!r} does not have an attribute {name!r}")
