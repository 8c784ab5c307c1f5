"""A lease of the ledger (reserve, commit, release) against lock and unlock of a bare robust mutex.

    python bench/kv_ledger.py [--leases 200000] [--pairs 15] [--processes 8] [--hammer 300000]

Builds bench/kv_ledger.cpp with the layers of csrc/ and runs it. Both loops are C++, and no Python
is timed. The first case runs in one process: CPU time of a lease, which takes the ledger's lock
three times, against one lock and unlock. In the second case `processes` run at once on one ledger,
each leasing a random number of pages, against as many that lock and unlock one mutex as often as
the leases did. It measures wall-clock time from their common start to the end of the last. Results
are medians over the pairs. Meanwhile one more process reads the usage, and ends the run if more is
charged than the device has.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYERS = (
    "fork_guard",
    "futex",
    "ledger",
    "ledger_check",
    "ledger_file",
    "ledger_lock",
    "ledger_records",
    "liveness",
    "owned_lock",
)
FLAGS = ["-std=c++20", "-O3", "-DNDEBUG", "-D_GNU_SOURCE", "-pthread"]


def build(folder: Path) -> Path:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise SystemExit("this benchmark takes a C++ compiler; install one")
    program = folder / "kv_ledger"
    layers = [ROOT / "csrc" / f"{n}.cpp" for n in LAYERS]
    sources = [str(ROOT / "bench" / "kv_ledger.cpp"), *map(str, layers)]
    subprocess.run(
        [compiler, *FLAGS, "-I", str(ROOT / "csrc"), *sources, "-o", str(program)], check=True
    )
    return program


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leases", type=int, default=200_000, help="in one timing")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--hammer", type=int, default=300_000, help="leases of each process")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        counts = (options.leases, options.pairs, options.processes, options.hammer)
        subprocess.run([build(Path(folder)), *map(str, counts)], check=True)


if __name__ == "__main__":
    main()
