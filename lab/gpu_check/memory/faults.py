"""Step "faults": accesses that the GPU must refuse, each in a separate process.

Each is an MMU fault (Xid 31), after which the context of its process is lost. This is the last
step, since a fault may also take the GPU down.
"""

from __future__ import annotations

import sys
from typing import Any

from lab.gpu_check.driver import open_or_skip
from lab.gpu_check.memory.peers import Peer
from lab.gpu_check.report import Report, Skip, run_as_step
from lab.gpu_check.sizes import PAGE_BYTES


def main(arguments: list[str] | None = None) -> int:
    return run_as_step("faults", __doc__, body, arguments)


def body(report: Report) -> None:
    free_bytes = open_or_skip().free_bytes()
    with report.check("graph_over_a_hole"):
        report.fact(graph_over_a_hole=graph_over_a_hole())
    with report.check("write_to_a_read_only_page"):
        report.fact(read_only=write_to_a_read_only_page())
    with report.check("gpu_afterwards"):
        report.fact(kept_bytes=free_bytes - open_or_skip().free_bytes())


def graph_over_a_hole() -> dict[str, int]:
    """Launches a graph whose page was unmapped after the capture."""
    with Peer("hole", str(PAGE_BYTES)) as peer:
        mapped, launch, wait = (int(code) for code in peer.answer().split())
    if mapped or not (launch or wait):
        raise RuntimeError(f"a graph over a page gives {mapped}, over a hole {launch}, {wait}")
    return {"launch": launch, "wait": wait}


def write_to_a_read_only_page() -> dict[str, Any]:
    """Writes to a page without write access. Raises Skip if the driver refuses such access."""
    with Peer("write", str(PAGE_BYTES)) as peer:
        granted, *codes = (int(code) for code in peer.answer().split())
    if granted:
        raise Skip(f"the driver refuses read-only access with {granted}")
    if not any(codes):
        raise RuntimeError("a page without write access was written")
    return {"write_codes": codes}


if __name__ == "__main__":
    sys.exit(main())
