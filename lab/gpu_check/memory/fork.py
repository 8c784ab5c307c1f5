"""Step "fork": the work of the fork server without SGLang: imports under stand-ins, fork, CUDA.

The parent imports torch and Triton while a separate process answers the questions of torch.cuda.
CUDA must not be initialised in the parent afterwards. Children then use device 0.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from lab.gpu_check.kv import CUDA, ledger, require_kvcached
from lab.gpu_check.report import ROOT, Report, Skip, run_as_step
from lab.gpu_check.sizes import PAGE_BYTES

# Asked by SGLang and its kernels when they are imported, with and without a device.
QUESTIONS: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("is_available", ()),
    ("device_count", ()),
    ("current_device", ()),
    ("get_device_capability", ()),
    ("get_device_capability", (0,)),
    ("get_device_properties", (0,)),
    ("get_device_properties", (CUDA,)),
    ("get_device_name", (0,)),
)


def main(arguments: list[str] | None = None) -> int:
    return run_as_step("fork", __doc__, body, arguments)


def body(report: Report) -> None:
    from prism.engines import cuda_facts

    require_kvcached()
    if importlib.util.find_spec("torch") is None:
        raise Skip("torch is not installed")
    try:
        facts = cuda_facts.ask()
    except cuda_facts.CudaFactsError as error:
        raise Skip(f"no usable GPU: {error}") from error
    report.fact(asked=facts)
    with report.check("import_initialises_nothing"):
        report.fact(preload=preload(facts))
        if cuda_facts.is_initialized():
            raise RuntimeError("importing torch and Triton under the stand-ins initialised CUDA")
    with report.check("children_use_the_device"):
        children = [in_child(use_device) for _ in range(2)]
        report.fact(children=children)
        report.figure("first_result", children[-1]["first_result_s"])
        if cuda_facts.is_initialized():
            raise RuntimeError("the fork initialised CUDA in the parent")
    with report.check("triton_in_a_child"):
        report.fact(triton=in_child(use_triton))
    with report.check("answers_are_true"):
        report.fact(compared=in_child(lambda: compare(facts)))
    with report.check("a_late_fork_is_named"):
        import torch

        torch.cuda.init()
        torch.zeros(1, device=CUDA)
        report.fact(late=in_child(use_too_late))


def stand_ins() -> ModuleType:
    """Returns prism.engines.sglang.platform.before_fork, imported by its path: its package needs
    packages that a bare machine lacks."""
    path = ROOT / "prism/engines/sglang/platform/before_fork.py"
    spec = importlib.util.spec_from_file_location("before_fork", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def preload(facts: list[dict[str, Any]]) -> dict[str, Any]:
    """Imports torch and Triton, and asks the questions of SGLang's import. Returns the answers."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    began_s = time.monotonic()
    before_fork = stand_ins()  # imports torch
    with before_fork.answering(facts, 0):
        import torch

        answers = {f"{name}{given}": str(ask(torch, name, given)) for name, given in QUESTIONS}
        has_triton = importlib.util.find_spec("triton") is not None
        if has_triton:
            import triton
            import triton.language

            answers["triton"] = triton.__version__
    return {"import_s": round(time.monotonic() - began_s, 2), "triton": has_triton} | answers


def ask(torch: Any, name: str, given: tuple[object, ...]) -> Any:
    return getattr(torch.cuda, name)(*given)


def use_device() -> dict[str, Any]:
    """Uses torch and kvcached on the device, in a child."""
    began_s = time.monotonic()
    import torch

    torch.cuda.set_device(0)
    total = float((torch.arange(1000, device=CUDA, dtype=torch.float32) * 2).sum().cpu())
    first_s = time.monotonic() - began_s
    with ledger(16) as device, device.client("child") as client:
        tensor = client.alloc_virtual_tensor(PAGE_BYTES)
        tensor.map(0, PAGE_BYTES)
        seen = torch.from_dlpack(tensor)
        seen.fill_(7)
        last = int(seen[-1].cpu())
        torch.cuda.synchronize()
        del seen
    if (total, last) != (999000.0, 7):
        raise RuntimeError(f"wrong results in a child: {total}, {last}")
    return {"first_result_s": round(first_s, 2), "all_s": round(time.monotonic() - began_s, 2)}


def use_triton() -> dict[str, Any]:
    """Compiles a kernel in a child, where Triton still has torch's functions of the parent."""
    if importlib.util.find_spec("triton") is None:
        raise Skip("Triton is not installed")
    import torch

    from lab.gpu_check.memory.triton_add import add_one

    began_s = time.monotonic()
    given = torch.arange(3000, device=CUDA, dtype=torch.float32)
    if not torch.equal(add_one(given), given + 1):
        raise RuntimeError("the kernel's sums are wrong")
    return {"compile_and_run_s": round(time.monotonic() - began_s, 2)}


def compare(facts: list[dict[str, Any]]) -> dict[str, Any]:
    """Compares the answers of the stand-ins with torch's own properties."""
    import torch

    real = torch.cuda.get_device_properties(0)
    shared = {name: value for name, value in facts[0].items() if hasattr(real, name)}
    wrong = {n: [v, getattr(real, n)] for n, v in shared.items() if v != getattr(real, n)}
    # The driver and torch round the memory of a device alike; clocks may be read anew.
    serious = {name: both for name, both in wrong.items() if not name.endswith("clock_rate")}
    if serious:
        raise RuntimeError(f"[stand-in, torch] differ: {serious}")
    missing = [n for n in dir(real) if not n.startswith("_") and n not in facts[0]]
    return {"compared": sorted(shared), "not_answered": missing}


def use_too_late() -> dict[str, str]:
    """Returns the errors of torch and kvcached in a child of a process that uses CUDA."""
    import torch

    from kvcached.errors import KvcachedError

    said = {}
    try:
        torch.zeros(1, device=CUDA)
    except RuntimeError as error:
        said["torch"] = str(error)[:120]
    try:
        with ledger(16) as device, device.client("late"):
            pass
    except KvcachedError as error:
        said["kvcached"] = f"{type(error).__name__}: {error}"
    if "ForkedClientError" not in said.get("kvcached", ""):
        raise RuntimeError(f"kvcached in the child of a process that uses CUDA: {said}")
    return said


def in_child(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the result of a call in a forked child. Raises RuntimeError, or the child's Skip."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(reader)
        os._exit(_answer(call, writer))
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not text:
        raise RuntimeError(f"the child ended with {status}")
    answer: dict[str, Any] = json.loads(text)
    if "skip" in answer:
        raise Skip(answer["skip"])
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer


def _answer(call: Callable[[], dict[str, Any]], writer: int) -> int:
    try:
        answer = call()
    except Skip as reason:
        answer = {"skip": str(reason)}
    except Exception as error:  # noqa: BLE001 - the parent reports any error
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(writer, json.dumps(answer).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
