"""torchvision's operators are declared where its binary cannot load, and only there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# A torchvision whose import loads its binary, as the real one's does. Loading a library defines
# the operator, once for each path; without CUDA's libraries the loader raises.
TORCHVISION = """
import torch
from pathlib import Path
try:
    torch.ops.load_library(Path(__file__).with_name("_C.so"))
except OSError:
    pass
"""
PROGRAM = """
import sys
import torch
loads, loaded = sys.argv[1] == "loads", set()
library = torch.library.Library("torchvision", "FRAGMENT")
def load(path):
    if not loads:
        raise OSError("libcudart.so.13: cannot open shared object file")
    if str(path) not in loaded:
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    loaded.add(str(path))
torch.ops.load_library = load
from kvcached.engines.stand_ins import declare_torchvision_operators
declare_torchvision_operators()
import torchvision
declare_torchvision_operators()
torch.ops.torchvision.nms
print("whole")
"""


@pytest.mark.parametrize("binary", ["loads", "lacks CUDA"])
def test_an_operator_is_declared_exactly_once(tmp_path: Path, binary: str) -> None:
    """Fails on a second definition of an operator, which would end a process with a real binary."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(TORCHVISION)
    (package / "_C.so").touch()
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, binary],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{root}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "whole\n", done.stderr
