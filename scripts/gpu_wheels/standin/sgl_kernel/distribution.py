"""Name and version of the stand-in, and a check that the real package is not installed too."""

from __future__ import annotations

from importlib import metadata

NAME = "sglang-kernel"
# Lower than every real version, so that pip replaces the stand-in if the real one is required.
VERSION = "0.0.0+prism.standin"


def refuse_beside_the_real_one() -> None:
    """Raises ImportError if the real kernels are installed on the same path."""
    for found in metadata.distributions(name=NAME):
        if found.version != VERSION:
            raise ImportError(
                f"{NAME} {found.version} is installed in addition to Prism's stand-in for it; "
                "remove the stand-in from the path"
            )
