"""The adapters that the conformance suite runs on, each with two models of unlike shape."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import structs

import kvcached
from prism.config.checks.adapters import with_layout
from prism.config.schema.cluster_config import ClusterConfig, DeviceConfig, EngineConfig
from prism.engines.fake import expected_tokens
from prism.engines.vllm import traits
from prism.messages.engine import Submit
from prism.messages.model_spec import ModelSpec
from prism.messages.requests import Request
from tests.engines.harness import DEVICE, DeviceUnderTest, request

QUIET = 4  # concurrent requests that do not compete for memory
MODELS = Path(__file__).parent.parent.parent / ".cache" / "models"


@dataclass(frozen=True, slots=True)
class Shape:
    """Fields of a ModelSpec that describe the model's memory."""

    architecture: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    weight_bytes: int
    path: str = ""


def model_spec(name: str, shape: Shape, context_length: int) -> ModelSpec:
    layout = kvcached.Layout(shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype="float32")
    return ModelSpec(
        name=name,
        path=shape.path,
        architecture=shape.architecture,
        dtype="float32",
        kv_dtype="float32",
        context_length=context_length,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        weight_bytes=shape.weight_bytes,
        token_bytes=layout.token_bytes,
        slo_ttft_s=10.0,
        slo_tpot_s=1.0,
    )


@dataclass(slots=True)
class Subject:
    """An adapter under test. `slow_environment` makes its requests last long enough to be met
    while they run."""

    adapter: str
    models: tuple[ModelSpec, ModelSpec]
    capacity_bytes: int
    page_bytes: int = 64 << 10
    environment: dict[str, str] = field(default_factory=dict)
    python: dict[str, str] = field(default_factory=dict)
    moves_kv: bool = True
    known: dict[tuple[str, tuple[int, ...]], list[int]] = field(default_factory=dict)

    def config(self, run_dir: Path, namespace: str) -> ClusterConfig:
        return ClusterConfig(
            namespace=namespace,
            run_dir=str(run_dir),
            redis_url="",
            policy="prism",
            devices=[DeviceConfig(DEVICE, self.capacity_bytes, self.page_bytes, 2)],
            models=list(self.models),
            engine=EngineConfig(
                adapter=self.adapter,
                python=self.python,
                static_bytes=1 << 20,
                max_running=8,
            ),
            kv_offer_s=60.0,  # a move that has to succeed does so on a busy machine
            kv_fetch_s=60.0,
        )

    def prompts(self, count: int, seed: int, length: tuple[int, int] = (3, 60)) -> list[list[int]]:
        rng = random.Random(seed)
        return [
            [rng.randrange(10, 1000) for _ in range(rng.randint(*length))] for _ in range(count)
        ]

    def learn(self, device: DeviceUnderTest, engine_id: str, requests: Sequence[Request]) -> None:
        """Computes the outputs of these requests, for `expected`.

        The fake's outputs are known. An engine with a model computes them on a quiet device, a few
        at a time: they have far more room than they need.
        """
        unknown = [item for item in requests if self.adapter != "fake" and not self.knows(item)]
        for start in range(0, len(unknown), QUIET):
            few = unknown[start : start + QUIET]
            probes = [
                request(f"quiet/{i.id}", i.model, i.prompt_ids, i.sampling.max_tokens) for i in few
            ]
            device.send(Submit(probes), engine_id)
            for item, stream in zip(few, device.finish(*(p.id for p in probes)), strict=True):
                self.known[item.model, tuple(item.prompt_ids)] = stream.token_ids

    def knows(self, item: Request) -> bool:
        known = self.known.get((item.model, tuple(item.prompt_ids)), [])
        return len(known) >= item.sampling.max_tokens

    def expected(self, item: Request) -> list[int]:
        """Returns the whole output of a request that nothing stops early."""
        count = item.sampling.max_tokens
        if self.adapter == "fake":
            return expected_tokens(item.prompt_ids, count)
        return self.known[item.model, tuple(item.prompt_ids)][:count]


def fake_subject() -> Subject:
    """Returns the fake: a step takes 2 ms; the device holds weights and about 1,700 tokens of
    `a`."""
    return Subject(
        adapter="fake",
        models=(
            model_spec("a", Shape("Plain", 2, 2, 32, 1 << 20), context_length=512),
            model_spec("b", Shape("Wide", 3, 1, 64, 2 << 20), context_length=256),
        ),
        capacity_bytes=8 << 20,
        environment={"PRISM_FAKE": '{"decode_step_ms": 2, "prefill_tokens_per_s": 50000}'},
    )


def prepared(name: str) -> Path:
    """Makes a tiny model once in the checkout's cache, in a separate process; returns its
    directory."""
    command = [sys.executable, "-m", "prism.cli.models", "prepare", name, "--dir", str(MODELS)]
    subprocess.run(command, check=True, timeout=300)
    return MODELS / name


def sglang_subject() -> Subject:
    llama, qwen = prepared("tiny-llama"), prepared("tiny-qwen3")
    sizes = {path: (path / "model.safetensors").stat().st_size for path in (llama, qwen)}
    return Subject(
        adapter="sglang",
        models=(
            model_spec(
                "tiny-llama",
                Shape("LlamaForCausalLM", 4, 4, 32, sizes[llama], str(llama)),
                context_length=512,
            ),
            model_spec(
                "tiny-qwen3",
                Shape("Qwen3ForCausalLM", 6, 2, 64, sizes[qwen], str(qwen)),
                context_length=256,
            ),
        ),
        capacity_bytes=66 << 20,
    )


def vllm_subject() -> Subject:
    """Returns the same models, with KV laid out as the configuration does for vLLM."""
    from tests.vllm.environment import variables, vllm_python

    stock = sglang_subject()
    subject = Subject(
        adapter="vllm",
        models=stock.models,
        capacity_bytes=stock.capacity_bytes,
        environment=variables(),
        python={"vllm": str(vllm_python())},
        moves_kv=False,
    )
    config = subject.config(Path("/"), "unused")
    specs = [
        structs.replace(spec, adapter="vllm", block_tokens=traits().block_tokens)
        for spec in stock.models
    ]
    config = structs.replace(config, models=specs)
    first, second = (with_layout(spec, config, config.engine.kv_layout) for spec in specs)
    subject.models = (first, second)
    return subject
