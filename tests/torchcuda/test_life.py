"""Life of a model on a GPU: SGLang's own CUDA path on the double, from build to the next model.

The driver's counts are compared with the ledger's after every step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.models import LLAMA, QWEN3
from tests.torchcuda import MIB, ROOT, cuda_environment
from tests.torchcuda.life import STATIC_BYTES

pytestmark = pytest.mark.sglang

SLACK_BYTES = 2 * MIB  # kept by SGLang in torch's memory between two models
CONTEXT_BYTES = 64 * MIB

Step = dict[str, Any]


def live(run_dir: Path, *arguments: str, module: str = "life") -> list[Step]:
    """Returns the steps that tests/torchcuda/life.py or another module prints."""
    env = cuda_environment(bytes=3072 * MIB, context_bytes=CONTEXT_BYTES)
    done = subprocess.run(
        [sys.executable, "-m", f"tests.torchcuda.{module}", str(run_dir), *arguments],
        check=False,
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[Step]:
    return live(tmp_path_factory.mktemp("life"))


def of_stage(steps: list[Step], stage: str) -> list[Step]:
    return [step for step in steps if step["stage"] == stage]


def test_the_imports_leave_cuda_alone(steps: list[Step]) -> None:
    assert steps[0] == {"stage": "preloaded", "initialised": False}


def test_greedy_answers_are_transformers_own(steps: list[Step]) -> None:
    served = [step for step in of_stage(steps, "served") if step["temperature"] == 0.0]
    assert [step["model"] for step in served] == [LLAMA, QWEN3, LLAMA]
    for step in served:
        assert step["equal"] == [True] * 3


def test_sampled_requests_are_answered(steps: list[Step]) -> None:
    served = [step for step in of_stage(steps, "served") if step["temperature"] > 0.0]
    assert [step["lengths"] for step in served] == [[12] * 3] * 3


def test_the_second_time_weights_come_from_the_store(steps: list[Step]) -> None:
    first, _other, again = of_stage(steps, "activated")
    assert first["stages"]["keep"] > 0.0
    assert again["stages"]["keep"] == 0.0


def test_the_drivers_books_are_the_ledgers(steps: list[Step]) -> None:
    """Attributes all that the driver counts to pages of KV and weights, torch's segments,
    and the context. The ledger leases at least that much."""
    for step in [*of_stage(steps, "activated"), *of_stage(steps, "served")]:
        weights = step["static"] - STATIC_BYTES
        parts = step["committed"] + weights + step["torch"] + CONTEXT_BYTES
        assert step["driver"] == parts, step
        assert step["driver"] <= step["committed"] + step["static"], step


def test_pages_stay_ready_while_an_engine_is_idle(steps: list[Step]) -> None:
    """Spares the first step of the next request a wait for the driver."""
    assert {step["unmaps"] for step in of_stage(steps, "served")} == {0}


def test_a_deactivated_model_leaves_nothing(steps: list[Step]) -> None:
    opened = of_stage(steps, "opened")[0]
    for step in of_stage(steps, "deactivated"):
        assert step["committed"] == 0
        assert step["driver"] <= opened["driver"] + SLACK_BYTES, step
        assert step["driver"] == step["static"], step  # the context's lease follows its memory
    first, *_, last = of_stage(steps, "deactivated")
    assert first["driver"] == last["driver"], "it grows with every model"


def test_no_page_was_taken_from_a_running_kernel(steps: list[Step]) -> None:
    assert {step["violations"] for step in steps[1:]} == {0}


def test_kv_grows_past_what_was_free_at_activation(tmp_path: Path) -> None:
    """Grows after another process had nearly all of the GPU at activation. SGLang alone would cap
    its KV permanently at the memory that was free then."""
    steps = live(tmp_path, module="growth")
    crowded, grown, written = (of_stage(steps, name)[0] for name in ("crowded", "grown", "written"))
    assert grown["pool"] == grown["planned"]
    assert written["committed"] > crowded["free"]
    assert written["value"] == 3.0
    assert of_stage(steps, "strayed")[0]["value"] == 0.0
    assert all(all(step["equal"]) for step in of_stage(steps, "served"))


@pytest.mark.long
def test_decode_graphs_and_triton_attention_leave_nothing_either(tmp_path: Path) -> None:
    """Graphs are captured late, in idle steps, and are freed with their model."""
    steps = live(tmp_path, "triton", "lazy")
    assert all(all(step["equal"]) for step in of_stage(steps, "served") if "equal" in step)
    opened = of_stage(steps, "opened")[0]
    gone = {step["driver"] for step in of_stage(steps, "deactivated")}
    assert len(gone) == 1
    assert gone.pop() <= opened["driver"] + SLACK_BYTES
