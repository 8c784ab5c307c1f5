"""Runs the adapter on the test double of torch's CUDA front, in a separate process."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from tests.torchcuda import cuda_environment

BEGIN = """
    import json, sys, warnings
    from pathlib import Path
    warnings.simplefilter("ignore")
    from prism.engines.sglang.platform import gpu
    from tests.torchcuda.life import DEVICE, LLAMA, Life, config_of, prompts, request
    life = Life(config_of(Path(sys.argv[1]), *sys.argv[2:]))
    import torch
    from prism.engines.sglang.scheduling import warm_up
    sample = warm_up.sample
    warm_up.sample = lambda *_: None  # takes long on the double, and is tested elsewhere
    core, facts = life.core, {}
"""
END = """
    core.close()
    life.ledger.destroy(force=True)
    print(json.dumps(facts))
"""


def facts_of(script: str, folder: Path, attention: str, graphs: str) -> dict[str, Any]:
    """Returns what `script` puts into `facts`. `attention`, `graphs`: engine settings."""
    text = textwrap.dedent(BEGIN) + textwrap.dedent(script) + textwrap.dedent(END)
    command = [sys.executable, "-c", text, str(folder), attention, graphs]
    environment = cuda_environment(devices=1, bytes=3 << 30)
    done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
