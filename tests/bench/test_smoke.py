"""Every benchmark runs, with counts too small to mean anything, and prints its ratio."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from statistics import median

import pytest

from tests.engines.subjects import prepared
from tests.frontend.tiny_model import make_model
from tests.kvcached.compiling import build_libcuda
from tests.torchcuda import cuda_environment

BENCH = Path(__file__).parent.parent.parent / "bench"
sys.path.insert(0, str(BENCH))

SMALL = {
    "gpu_attention": ["--layers", "2", "--batch", "2", "--context", "64", "--pairs", "2"],
    "gpu_map": ["--page-bytes", "65536", "--buffers", "4", "--slabs", "2", "--pairs", "2"],
    "gpu_weights": [
        *("--gigabytes", "0.002,0.003", "--tensor-mb", "0.5", "--pairs", "1", "--links", "2"),
    ],
    "grammar_masks": ["--outputs", "2", "--tokens", "8", "--rounds", "2", "--forward-ms", "1"],
    "import_time": ["--pairs", "2"],
    "kv_alloc": ["--rounds", "20", "--pairs", "2"],
    "kv_fit": ["--requests", "80", "--live", "8", "--slab-blocks", "16"],
    "kv_layout": ["--layers", "2", "--batch", "2", "--context", "64", "--pairs", "2"],
    "kv_ledger": ["--leases", "200", "--pairs", "2", "--processes", "2", "--hammer", "500"],
    "kv_map": ["--layers", "2", "--pages", "4", "--pairs", "2", "--aging", "50"],
    "kv_move": ["--tokens", "64", "--layers", "2", "--pairs", "2", "--network-pairs", "2"],
    "kv_refill": ["--layers", "2", "--pairs", "3", "--live", "2"],
    "kv_pool": ["--layers", "2", "--slabs", "2", "--rounds", "10", "--pairs", "2"],
    "policies": ["--pairs", "2", "--models", "20", "--gpus", "20", "--requests", "50"],
    "sim_speed": ["--seconds", "20"],
    "weight_peer": ["--megabytes", "4", "--tensors", "3", "--pairs", "2"],
    "weight_load": ["--megabytes", "4", "--tensors", "3", "--pairs", "2"],
}


def run(name: str, *arguments: str) -> str:
    # Benchmarks of GPUs are rehearsed on the test libcuda, or on torch's CUDA front over it.
    driver = {"KVCACHED_LIBCUDA": str(build_libcuda())} if name.startswith("gpu_") else {}
    driver = cuda_environment() if name == "gpu_attention" else driver
    done = subprocess.run(
        [sys.executable, str(BENCH / f"{name}.py"), *arguments],
        env={**os.environ, **driver},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_benchmarks_are_run_here() -> None:
    not_run_alone = {
        "gpu_attention_kernel",
        "pairs",
        "devices",
        "specs",
        "sglang_side",
        "sglang_throughput",
        "sglang_elastic",
        "activation",
        "routers",
        "served_sglang",
        "serving",
        "step_control",
        "stream_load",
        "stock_servers",
        "cluster_load",
        "stub_agents",
    }
    assert {path.stem for path in BENCH.glob("*.py")} - not_run_alone == set(SMALL)


@pytest.mark.parametrize("name", SMALL)
def test_benchmark_runs(name: str) -> None:
    assert "ratio" in run(name, *SMALL[name])


def test_the_scheduler_is_loaded() -> None:
    """Agents of two machines report, models come up, requests are served."""
    small = ["--agents", "9", "--models", "18", "--rate", "20", "--processes", "1"]
    said = run("cluster_load", *small, "--start-s", "15", "--seconds", "2").splitlines()
    figures = {line[:66].rstrip(): [float(each) for each in line[66:].split()] for line in said[1:]}
    assert all(figures["requests sent, served a second"])
    assert all(figures["reports a second"])
    assert figures["an action beyond what the agent takes, p50 p99 ms"][0] > 0


def test_serving_is_compared_with_a_pass_through(tmp_path: Path) -> None:
    make_model(tmp_path / "tiny")
    small = ["--streams", "2", "--tokens", "20", "--requests", "4", "--rounds", "1"]
    said = run("serving", "--model", str(tmp_path / "tiny"), *small)
    assert len([line for line in said.splitlines() if "ratio" in line]) == 4


def test_step_control_is_compared_with_none(tmp_path: Path) -> None:
    make_model(tmp_path / "tiny")
    small = ["--streams", "2", "--tokens", "20", "--rounds", "1"]
    said = run("step_control", "--model", str(tmp_path / "tiny"), *small)
    assert len([line for line in said.splitlines() if "ratio" in line]) == 5


def test_bursts_and_paces_are_measured(tmp_path: Path) -> None:
    make_model(tmp_path / "tiny")
    small = ["--bursts", "4", "--paced", "2", "--rounds", "1"]
    said = run("routers", "--model", str(tmp_path / "tiny"), *small)
    assert said.count("prism-serve") == said.count("upstream alone") == 2


@pytest.mark.long
@pytest.mark.sglang
def test_prism_serve_is_compared_with_a_stock_server() -> None:
    small = ["--streams", "2", "--pairs", "1", "--requests", "1"]
    said = run("served_sglang", "--model", str(prepared("tiny-llama")), *small)
    assert said.count("ratio") == 2


def test_models_are_found_where_they_are_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import specs

    monkeypatch.setenv("PRISM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(specs, "CHECKOUT", tmp_path / "checkout")
    for folder in (tmp_path / "checkout" / ".cache" / "models", tmp_path / "home" / "models"):
        make_model(folder / "tiny")
        assert specs.model_folder("tiny") == folder / "tiny"  # the default folder comes first
    assert specs.model_folder(f"{tmp_path}/home/models/tiny") == tmp_path / "home/models/tiny"


@pytest.mark.parametrize("name", ["sglang_elastic", "sglang_throughput"])
def test_a_missing_model_is_an_error_of_one_line(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH / f"{name}.py"), "--model", "never-prepared"],
        env={**os.environ, "PRISM_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: --model: {tmp_path}/models/never-prepared is not a directory")
    assert "run prism-models prepare" in line


@pytest.mark.sglang
@pytest.mark.parametrize("prefix_cache", [False, pytest.param(True, marks=pytest.mark.long)])
def test_sglang_on_either_pool_says_the_same(tmp_path: Path, prefix_cache: bool) -> None:
    from tests.sglang.models import LLAMA, path_of

    report = tmp_path / "report.json"
    small = ["--pairs", "2", "--steps", "30", "--warmup", "5", "--batch", "8", "--kv", "16MiB"]
    idle = ["--from-idle", "--first-token", "64", "--first-pairs", "2"]
    flags = ["--prefix-cache"] if prefix_cache else idle
    said = run(
        "sglang_throughput", *small, *flags, "--model", str(path_of(LLAMA)), "--json", str(report)
    )
    result = json.loads(report.read_text())
    assert result["same_tokens"]
    assert result["agreement"]["same_tokens"] == result["agreement"]["tokens"] > 0
    elastic, static = result["kvcached_steps"], result["stock_steps"]
    assert elastic["steps"] == static["steps"] > 0
    if not prefix_cache:
        assert said.count("ratio") == 4
        assert result["kvcached_maps_per_s"] > 0
        assert elastic["growth_steps"] > static["growth_steps"] == 0
        assert len(result["kvcached_first_token_ms"]) == len(result["stock_first_token_ms"]) == 2


@pytest.mark.sglang
def test_kv_memory_follows_the_load(tmp_path: Path) -> None:
    from tests.sglang.models import LLAMA, path_of

    report, phases = tmp_path / "report.json", "1x10,8x40,2x40"
    options = ["--phases", phases, "--model", str(path_of(LLAMA)), "--json", str(report)]
    assert run("sglang_elastic", *options).count("ratio") == 3
    found = json.loads(report.read_text())
    samples = found["samples"]
    assert all(kv >= needed for kv, needed in zip(samples["kv"], samples["needed"], strict=True))
    assert found["peak_bytes"] == max(samples["kv"]) > 8 * found["quantum_bytes"]
    assert found["idle_bytes"] == samples["kv"][-1] == found["floor_bytes"]
    assert found["mean_bytes"] < found["peak_bytes"]
    answers = found["rounds"][0]["tokens"]
    assert [len(tokens) for tokens in answers] == found["wanted_tokens"]


def test_agreement_counts_tokens_before_the_first_other_one() -> None:
    from sglang_throughput import agreement, step_figures

    def round_of(**answers: list[int]) -> dict[str, object]:
        return {"answers": answers}

    pairs = [
        [round_of(r1=[1, 2], r2=[5]), round_of(r1=[1, 2], r2=[6])],
        [round_of(r1=[3], r2=[7]), round_of(r1=[4], r2=[7])],
    ]
    firsts = [[{"answer": [8]}, {"answer": [8]}]]
    assert agreement(pairs, firsts) == {
        "requests": 3,
        "same_requests": 1,
        "same_first": 2,
        "tokens": 6,
        "same_tokens": 3,
    }
    found = step_figures(
        [
            {"decode_s": [0.001, 0.003], "growth_s": [0.005]},
            {"decode_s": [0.002], "growth_s": []},
            {"decode_s": [], "growth_s": []},
        ]
    )
    assert found == {
        "steps": 4,
        "growth_steps": 1,
        "mean_ms": 2.5,
        "p99_ms": 5.0,
        "plain_median_ms": 2.0,
        "growth_p99_ms": 5.0,
    }


def test_the_interval_of_a_median_holds_it_often_enough() -> None:
    """Counts over all outcomes of eight coins: the interval misses 0.5 in at most 5 % of them."""
    from pairs import median_interval

    misses = 0
    for coins in product((0, 1), repeat=8):
        low, high = median_interval([coin + index / 100 for index, coin in enumerate(coins)])
        misses += not low <= 0.5 <= high
    assert 0 < misses / 2**8 <= 0.05
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert median_interval(values) == (1.0, 5.0)
    assert median_interval([1.0] * 20) == (1.0, 1.0) == (median([1.0] * 20),) * 2


@pytest.mark.sglang
def test_the_benchmark_of_activation_runs() -> None:
    """Starts the real stock engine, with a neighbour that really decodes."""
    llama, qwen = str(prepared("tiny-llama")), str(prepared("tiny-qwen3"))
    arguments = ("--model", qwen, "--neighbour", llama, "--pairs", "1", "--seconds", "1")
    said = run("activation", *arguments, "--capacity", "512MiB", "--page", "64KiB")
    assert said.count("ratio") == 4
    assert "read from disk by one activation" in said
    assert all(f"  {stage} " in said for stage in ("reserve", "weights", "warm_up", "total"))
