"""The fork server's imports leave CUDA alone: on the test double of torch's CUDA front."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from tests.torchcuda import cuda_environment

pytestmark = pytest.mark.sglang

# Modules of SGLang 0.5.23 that read a GPU's properties when they are imported.
ASKING = (
    "sglang.srt.layers.quantization.fp8_utils",
    "sglang.kernels.ops.attention.fla.utils",
    "sglang.kernels.jit.utils.arch",
    "sglang.kernels.ops.attention.prefill_attention",
    "sglang.kernels.ops.attention.fused_qk_rmsnorm_rope_gate",
)

PRELOAD = """
    import importlib, json, os, sys, warnings
    warnings.simplefilter("ignore")
    from prism.engines import cuda_facts
    from prism.engines.sglang import adapter
    from prism.engines.sglang.platform import gpu
    if "unprotected" in sys.argv:
        import contextlib
        gpu.importing = lambda device: contextlib.nullcontext()
    adapter.preload("cuda:1")
    asking = json.loads(sys.argv[1])
    facts = {"loaded": [name for name in asking if name in sys.modules]}
    facts["preloaded"] = cuda_facts.is_initialized()
    import torch
    with gpu.importing("cuda:1"):
        for name in asking:
            importlib.import_module(name)
        kept = torch.cuda.get_device_capability
        facts["answers"] = [kept(), torch.cuda.current_device(), torch.cuda.device_count()]
        facts["name"] = torch.cuda.get_device_name("cuda:0")
        facts["memory"] = torch.cuda.get_device_properties(torch.device("cuda")).total_memory
    facts["imported"] = cuda_facts.is_initialized()
    facts["restored"] = kept is not torch.cuda.get_device_capability
    if facts["imported"]:
        print(json.dumps(facts))
        sys.exit()
    reader, writer = os.pipe()
    if os.fork() == 0:
        torch.cuda.set_device(1)
        tensor = torch.ones(4, device="cuda")
        child = [kept(), torch.cuda.current_device(), float(tensor.sum())]
        os.write(writer, json.dumps([*child, cuda_facts.is_initialized()]).encode())
        os._exit(0)
    os.wait()
    facts["child"] = json.loads(os.read(reader, 4096))
    facts["after"] = cuda_facts.is_initialized()
    print(json.dumps(facts))
"""


def preloaded(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-c", textwrap.dedent(PRELOAD), json.dumps(ASKING), *arguments]
    environment = cuda_environment(devices=2, bytes=256 << 20, context_bytes=16 << 20)
    done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr.decode()
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def test_a_preloaded_process_forks_children_that_use_cuda() -> None:
    """Functions of torch.cuda that modules found during their import are torch's own in the
    child."""
    facts = preloaded()
    assert facts["loaded"]
    assert (facts["preloaded"], facts["imported"], facts["after"]) == (False, False, False)
    capability, current, count = facts["answers"]
    assert (current, count, facts["memory"]) == (1, 2, 256 << 20)
    assert facts["name"]
    assert facts["restored"]
    assert facts["child"] == [capability, 1, 4.0, True]


def test_without_the_stand_ins_the_imports_initialise_cuda() -> None:
    """Shows that the test above can fail on the double."""
    assert preloaded("unprotected")["preloaded"] is True
