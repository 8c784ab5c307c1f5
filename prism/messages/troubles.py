"""Problems of a running cluster's processes, as its supervisor reports them.

The supervisor writes a file in the run directory, which can be read even if Redis or the scheduler
is what fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from prism.messages import MALFORMED_ERRORS

_FILE = "troubles.json"
_decoder = msgspec.json.Decoder(dict[str, str])


def write_troubles(run_dir: Path, troubles: Mapping[str, str]) -> None:
    """Writes the problem of each part. Raises OSError."""
    partial = run_dir / f"{_FILE}.partial"
    partial.write_bytes(msgspec.json.encode(troubles))
    partial.replace(run_dir / _FILE)


def read_troubles(run_dir: Path) -> dict[str, str]:
    """Returns the problem of each part. Empty without problems or without a supervisor."""
    try:
        return _decoder.decode((run_dir / _FILE).read_bytes())
    except (OSError, *MALFORMED_ERRORS):
        return {}
