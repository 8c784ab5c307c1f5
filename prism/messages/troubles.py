"""Which parts of a running cluster are in trouble, as its supervisor sees them.

The supervisor writes a file in the run directory: it can be read while Redis or the scheduler is
what is in trouble.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from prism.messages import MALFORMED_ERRORS

_FILE = "troubles.json"
_decoder = msgspec.json.Decoder(dict[str, str])


def write_troubles(run_dir: Path, troubles: Mapping[str, str]) -> None:
    """Part -> what is wrong with it. Raises OSError."""
    partial = run_dir / f"{_FILE}.partial"
    partial.write_bytes(msgspec.json.encode(troubles))
    partial.replace(run_dir / _FILE)


def read_troubles(run_dir: Path) -> dict[str, str]:
    """Empty where nothing is wrong, or nobody supervises."""
    try:
        return _decoder.decode((run_dir / _FILE).read_bytes())
    except (OSError, *MALFORMED_ERRORS):
        return {}
