"""Command that runs `python -m sglang.launch_server ARGS` on a machine without a GPU.

Run it as `python -m kvcached.engines.sglang.launch ARGS`. Triton and torchvision's compiled half
cannot be imported there. Every process that SGLang spawns imports this module first, and so has the
stand-ins too.
"""

from __future__ import annotations

import runpy

from kvcached.engines import stand_ins

stand_ins.install_for_sglang()

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
