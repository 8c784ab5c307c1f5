"""Common clients, unmodified, from a separate environment.

Run by scripts/test --long. The environment (requirements/clients.txt) is made below the
checkout's cache, which needs a package index once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.acceptance.harness import MODELS, ROOT, Cluster, cluster_yaml, model_yaml, serving
from tests.acceptance.reference import load
from tests.serve.conftest import serving as serving_fakes

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

SCRIPTS = Path(__file__).parent / "clients"
MODEL = "tiny-llama"
WORDS = ["over", "the", "hill", "a", "small", "dog", "ran", "and", "then", "it", "slept", "warm"]


def finished(*command: str | Path, folder: Path = ROOT, **environment: str) -> None:
    """Runs the command in this folder; fails with its output unless it exits 0."""
    process = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-8000:]


@pytest.fixture(scope="session")
def python() -> Path:
    """Returns the Python of the clients' environment."""
    requirements, venv = ROOT / "requirements" / "clients.txt", ROOT / ".cache" / "clients"
    made = venv / "requirements.txt"
    if not made.exists() or made.read_text() != requirements.read_text():
        finished(sys.executable, "-m", "venv", "--clear", venv)
        pip = [venv / "bin" / "python", "-m", "pip", "install", "-q"]
        finished(*pip, "-r", requirements)
        made.write_text(requirements.read_text())
    return venv / "bin" / "python"


@pytest.fixture(scope="module")
def cluster(
    tiny_models: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    config = cluster_yaml(
        [model_yaml(MODEL, tool_parser="qwen25")],
        [{"name": "host:0", "capacity": "192MiB", "page": "64KiB", "engines": 1}],
    )
    with serving(config, tmp_path_factory.mktemp("clients")) as made:
        yield made


@pytest.mark.sglang
@pytest.mark.parametrize("name", ["langchain", "litellm", "instructor"])
def test_text_structure_and_tools(python: Path, cluster: Cluster, name: str) -> None:
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
    finished(python, SCRIPTS / f"with_{name}.py", f"{cluster.url}/v1", MODEL, **offline)


@pytest.mark.sglang
def test_lm_eval_gets_the_models_log_likelihoods(
    python: Path, cluster: Cluster, tmp_path: Path
) -> None:
    tasks, out = tmp_path / "tasks", tmp_path / "samples.json"
    write_tasks(tasks)
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    arguments = (f"{cluster.url}/v1", MODEL, tasks, MODELS / MODEL, out)
    finished(python, SCRIPTS / "with_lm_eval.py", *arguments, **offline)
    samples = json.loads(out.read_text())
    assert [len(samples[task]) for task in ("choices", "rolling", "texts")] == [8, 8, 8]
    for sample in samples["choices"]:
        doc = sample["doc"]
        for choice, (value, _) in zip(doc["choices"], sample["resps"], strict=True):
            expected = log_likelihood(doc["question"], f" {choice}")
            assert value == pytest.approx(expected, abs=0.02), choice
    for sample in samples["rolling"]:
        [value] = sample["resps"]
        expected = log_likelihood("", " ".join(sample["doc"]["choices"]))
        assert value == pytest.approx(expected, abs=0.05)
    assert all(isinstance(sample["resps"][0], str) for sample in samples["texts"])


def write_tasks(folder: Path) -> None:
    folder.mkdir()
    docs = [
        {"question": " ".join(WORDS[:n]), "choices": WORDS[n : n + 4], "answer": n % 4}
        for n in range(1, 9)
    ]
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "docs.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    ends = {"until": ["."], "max_gen_toks": 8, "do_sample": False}
    own: dict[str, dict[str, Any]] = {
        "choices": {
            "output_type": "multiple_choice",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc"}],
        },
        "rolling": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{choices | join(' ')}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
        "texts": {
            "output_type": "generate_until",
            "doc_to_target": "{{choices[0]}}",
            "generation_kwargs": ends,
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    for name, fields in own.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **common, **fields}))


def log_likelihood(context: str, rest: str) -> float:
    """Returns transformers' value for `rest` after `context`, or after the token that ends
    texts."""
    import torch
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODELS / MODEL / "tokenizer.json"))
    network = load(MODEL)

    def ids_of(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    before = ids_of(context) if context else [network.config.eos_token_id]
    ids = ids_of(context + rest) if context else [*before, *ids_of(rest)]
    with torch.inference_mode():
        logits = network(torch.tensor([ids])).logits[0, :-1]
    values = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return float(values[len(before) - 1 :].sum())


CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "allow_header_conformance",
)


def test_schemathesis_finds_no_fault(python: Path, tmp_path: Path) -> None:
    """Sends requests that the OpenAPI document allows, and some that it forbids, to fake engines.

    No answer is a server error, and each is as the document says.
    """
    with (
        tempfile.TemporaryDirectory(prefix="prism-") as temporary,
        serving_fakes(tmp_path, Path(temporary)) as cluster,
    ):
        document = httpx.get(f"{cluster.url}/openapi.json").json()
        # Most bodies would name no model that is served.
        for schema in document["components"]["schemas"].values():
            if "model" in schema.get("properties", {}):
                schema["properties"]["model"] = {"enum": ["a", "b"]}
        path = tmp_path / "openapi.json"
        path.write_text(json.dumps(document))
        # Its coverage phase crashes on Python 3.11 (a SystemError of `ast.parse`).
        phases = ("--phases", "fuzzing,stateful")
        asked = ("--checks", ",".join(CHECKS), "--max-examples", "50", "--seed", "1")
        command = (python.parent / "schemathesis", "run", path, "--url", cluster.url)
        finished(*command, *phases, *asked, "--workers", "2", folder=tmp_path)
        assert cluster.post().status_code == 200


@pytest.mark.sglang
@pytest.mark.parametrize("backend", ["sglang-oai", "sglang-oai-chat", "vllm"])
def test_sglangs_load_generator_measures_each_request(
    python: Path, tmp_path: Path, backend: str
) -> None:
    [site] = (python.parent.parent / "lib").glob("python*/site-packages")
    out = tmp_path / "out.jsonl"
    with (
        tempfile.TemporaryDirectory(prefix="prism-") as temporary,
        serving_fakes(tmp_path, Path(temporary)) as cluster,
    ):
        server = ("--backend", backend, "--base-url", cluster.url, "--model", "a")
        prompts = ("--dataset-name", "random-ids", "--tokenizer", tmp_path / "a")
        sizes = ("--random-input-len", "20", "--random-output-len", "8", "--num-prompts", "20")
        script = SCRIPTS / "with_bench_serving.py"
        asked = (*server, *prompts, *sizes, "--max-concurrency", "4", "--output-file", out)
        finished(sys.executable, script, site, *asked, HF_HUB_OFFLINE="1")
    [line] = out.read_text().splitlines()
    measured = json.loads(line)
    assert measured["completed"] == 20
    assert measured["total_output_tokens"] >= 20
    assert measured["median_ttft_ms"] > 0


def test_aiperf_measures_each_request(python: Path, tmp_path: Path) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="prism-") as temporary,
        serving_fakes(tmp_path, Path(temporary)) as cluster,
    ):
        server = ("--url", cluster.url, "--model", "a", "--endpoint-type", "chat", "--streaming")
        sizes = ("--tokenizer", tmp_path / "a", "--isl", "20", "--osl", "8")
        asked = ("--request-count", "20", "--concurrency", "4", "--random-seed", "1")
        out = ("--ui", "none", "--artifact-dir", tmp_path / "out")
        command = (python.parent / "aiperf", "profile", *server, *sizes, *asked, *out)
        # Offline, as other tests may have set here, aiperf seeks a folder's tokenizer in a cache.
        finished(*command, HOME=str(tmp_path), HF_HUB_OFFLINE="", TRANSFORMERS_OFFLINE="")
    measured = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert measured["request_count"]["avg"] == 20
    assert measured["output_sequence_length"]["avg"] >= 8
    assert measured["time_to_first_token"]["min"] > 0
    assert not measured["error_summary"]
