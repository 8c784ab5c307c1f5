"""Time of `import kvcached`, against `import numpy`, each in fresh interpreters.

    python bench/import_time.py [--pairs 15]

The start of the interpreter is measured in the same rounds and subtracted. Times are CPU times
including the kernel, because the machine may be busy. Targets: 100 ms, and 10 ms for the modules
that engines import and call in every process without KVCACHED_DEVICE.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from resource import RUSAGE_CHILDREN, getrusage
from statistics import median

TARGET_MS = 100
PLUGINS_TARGET_MS = 10
PLUGINS = "import kvcached_plugins as p; p.vllm_general(); p.sglang_platform()"


def start_ms(code: str) -> float:
    """Returns the CPU time of an interpreter that runs `code`, with compiled bytecode."""
    before = getrusage(RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True)
    after = getrusage(RUSAGE_CHILDREN)
    return (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime) * 1e3


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    pairs = parser.parse_args(arguments).pairs
    codes = ("pass", "import kvcached", "import numpy", PLUGINS)
    for code in codes:
        start_ms(code)
    turns = [[start_ms(code) for code in codes] for _ in range(pairs)]
    kvcached_ms = median(kvcached - bare for bare, kvcached, _, _ in turns)
    numpy_ms = median(numpy - bare for bare, _, numpy, _ in turns)
    ratio = median((kvcached - bare) / (numpy - bare) for bare, kvcached, numpy, _ in turns)
    print(
        f"import kvcached {kvcached_ms:.0f} ms (at most {TARGET_MS}), import numpy {numpy_ms:.0f} "
        f"ms: ratio {ratio:.2f}"
    )
    plugins_ms = median(plugins - bare for bare, _, _, plugins in turns)
    print(f"unused plugins {plugins_ms:.1f} ms (at most {PLUGINS_TARGET_MS})")


if __name__ == "__main__":
    main()
