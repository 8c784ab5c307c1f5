"""What this package is installed as, and that the real one is not there too."""

from __future__ import annotations

from importlib import metadata

NAME = "sglang-kernel"
# Below every real version: whoever asks pip for the real one gets it in this one's place.
VERSION = "0.0.0+prism.standin"


def refuse_beside_the_real_one() -> None:
    """Raises ImportError if the real kernels are installed on the same path."""
    for found in metadata.distributions(name=NAME):
        if found.version != VERSION:
            raise ImportError(
                f"{NAME} {found.version} is installed beside Prism's stand-in for it; "
                "remove the stand-in from the path, the real kernels need none"
            )
