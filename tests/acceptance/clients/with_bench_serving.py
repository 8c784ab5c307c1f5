"""SGLang's load generator as it is: python with_bench_serving.py SITE ARGUMENTS.

SITE has its further requirements; this environment's own packages come first.
"""

import runpy
import sys

from kvcached.engines import stand_ins

sys.path.append(sys.argv.pop(1))
stand_ins.install_for_sglang()

if __name__ == "__main__":
    runpy.run_module("sglang.bench_serving", run_name="__main__")
