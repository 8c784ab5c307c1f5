"""Every benchmark runs, with counts too small to mean anything, and prints its ratio."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent.parent / "bench"

SMALL = {
    "kv_alloc": ["--rounds", "20", "--pairs", "2"],
    "kv_fit": ["--requests", "80", "--live", "8", "--slab-blocks", "16"],
    "kv_ledger": ["--leases", "200", "--pairs", "2", "--processes", "2", "--hammer", "500"],
    "kv_map": ["--layers", "2", "--pages", "4", "--pairs", "2", "--aging", "50"],
    "kv_pool": ["--layers", "2", "--slabs", "2", "--rounds", "10", "--pairs", "2"],
}


def test_all_benchmarks_are_run_here() -> None:
    assert {path.stem for path in BENCH.glob("kv_*.py")} == set(SMALL)


@pytest.mark.parametrize("name", SMALL)
def test_benchmark_runs(name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH / f"{name}.py"), *SMALL[name]],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "ratio" in done.stdout
