"""Each family of models that the vLLM adapter serves: its answers are those of transformers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from kvcached import Checkpoint, WeightStore
from prism.config.checks.adapters import with_layout
from prism.engines.vllm import traits
from prism.engines.vllm.capabilities import HEAD_DIMS, LATENT, SERVED, WINDOWS, refuses, weight_key
from prism.messages.model_spec import ModelSpec
from prism.models.files import inspect_model
from prism.models.store import default_directory, prepare
from tests.engines.harness import DeviceUnderTest
from tests.families import TINY
from tests.sglang.conftest import config_of
from tests.sglang.models import family, network, towards_zero
from tests.sglang.test_families import ask, leave, logs, prompts, spec_of, write_config
from tests.vllm.environment import variables, vllm_python

# torch deprecates a decorator that GPT-BigCode uses.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")

HEADS = 6  # of each tiny model
# Settings that follow from their width, that vLLM needs, and windows shorter than prompts.
OTHERS: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"mamba_d_head": 64},
    "lfm2": {"block_dim": 192, "conv_dim": 192},
    "llama4_text": {"attention_chunk_size": 32},
    "minimax_m2": {"use_routing_bias": True},
    "ministral": {"sliding_window": 32},
    "nemotron_h": {"hybrid_override_pattern": "M*-M"},
    "phimoe": {"attention_bias": True},
}


def settings_of(kind: str) -> dict[str, Any]:
    """Returns the settings of a tiny model with heads that vLLM's kernels compute."""
    settings, dim = TINY[kind] | OTHERS.get(kind, {}), min(HEAD_DIMS)
    if "kv_lora_rank" in settings:
        latent = {"kv_lora_rank": LATENT.kv_lora_rank, "qk_rope_head_dim": LATENT.rope_dim}
        return settings | latent
    if "head_dim" in settings:
        return settings | {"head_dim": dim}
    width = "n_embd" if "n_embd" in settings else "hidden_size"
    return settings | {width: dim * HEADS}


def path_of(kind: str) -> Path:
    """Returns the folder of the tiny model of a family."""
    model = family(f"wide-{kind}", kind, settings_of(kind))
    return prepare(model, default_directory(), lambda _text: None)


@pytest.fixture(scope="module")
def device() -> Iterator[DeviceUnderTest]:
    with tempfile.TemporaryDirectory(prefix="prism-") as directory:
        config = config_of(Path(directory), 256 << 20)
        engine = structs.replace(
            config.engine,
            adapter="vllm",
            python={"vllm": str(vllm_python())},
            weight_store=str(Path(directory) / "store"),
        )
        made = DeviceUnderTest("vllm", structs.replace(config, engine=engine), variables())
        yield made
        made.close()


def spec_on(device: DeviceUnderTest, found: ModelSpec) -> ModelSpec:
    """Returns the model as a cluster of this device has it."""
    block_tokens = traits().block_tokens_of(latent=found.latent_rope_dim is not None)
    stock = structs.replace(found, adapter="vllm", block_tokens=block_tokens)
    config = structs.replace(device.config, models=[stock])
    return with_layout(stock, config, config.engine.kv_layout)


def is_stored(device: DeviceUnderTest, spec: ModelSpec) -> bool:
    """Returns whether the store has the model's weights as its engine loaded them."""
    store = WeightStore.open(device.config.engine.weight_store)
    return store.find(weight_key(store.content_of(Checkpoint.open(spec.path)), spec)) is not None


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", SERVED)
def test_answers_are_those_of_transformers(device: DeviceUnderTest, kind: str) -> None:
    """Compares answers of prompts that run together, after their own beginnings, and alone with
    weights from the store. The engine compares the layout of its KV with the one that config.json
    gives."""
    path = path_of(kind)
    assert refuses(path) == ""
    serve(device, spec_of(kind, path, WINDOWS, None), path)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_latents_without_yarn_have_the_same_rotary_positions(device: DeviceUnderTest) -> None:
    settings = settings_of("deepseek_v3") | {"rope_scaling": None}
    model = family("wide-deepseek_v3-rope", "deepseek_v3", settings)
    path = prepare(model, default_directory(), lambda _text: None)
    serve(device, spec_of("deepseek_v3-rope", path, WINDOWS, None), path)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("kind", ["llama", "glm4", "gemma3_text"])
def test_answers_with_fp8_kv_are_those_of_rounded_kv(
    device: DeviceUnderTest, kind: str, dtype: str
) -> None:
    """Compares with KV rounded towards zero, as vLLM's kernel for CPUs does it. The engine compares
    the size of its blocks with the model's specification."""
    path = path_of(kind)
    plain = spec_of(kind, path, WINDOWS, None)
    shape = inspect_model(path, kind, WINDOWS).shape("float32", None, dtype)
    stock = structs.replace(plain, **shape)
    assert 4 * stock.token_bytes == plain.token_bytes
    serve(device, stock, path)


def serve(device: DeviceUnderTest, stock: ModelSpec, path: Path) -> None:
    """Serves a model in a separate engine, again with weights from the store, and checks its
    answers."""
    spec, kind, reference = spec_on(device, stock), stock.name, network(path)
    kept = towards_zero(spec.other_kv_dtype) if spec.other_kv_dtype else None
    asked = {f"{name} {spec.kv_dtype}": prompt for name, prompt in prompts(spec).items()}
    device.fork(kind)
    device.activate(spec, kind)
    answers = ask(device, spec, asked, reference, kind, kept=kept)
    longer = {f"{name}+": prompt + answers[name][:-4] for name, prompt in asked.items()}
    ask(device, spec, longer, reference, kind, kept=kept)
    leave(device, kind)
    assert is_stored(device, spec)
    device.activate(spec, kind)
    alone = {f"alone {spec.kv_dtype}": min(asked.values(), key=len)}
    ask(device, spec, alone, reference, kind, kept=kept)
    device.end(kind)
    assert "discarding the stored copy" not in logs(device)
    assert f"model {kind}: its weights take" not in logs(device)


@pytest.mark.parametrize("kind", sorted(set(TINY) - set(SERVED)))
def test_the_others_are_refused_before_a_cluster_starts(tmp_path: Path, kind: str) -> None:
    write_config(tmp_path, kind)
    assert "vllm engines" in refuses(tmp_path)


FEW_WINDOWS = {"layer_types": ["sliding_attention", *["full_attention"] * 3]}
CONDITIONS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {}, "has heads of dimension 16, but vLLM's CPU kernels compute only 32, 64"),
    ("deepseek_v2", {}, "latents of 32 and 8 numbers, but vLLM's CPU kernel computes only 512"),
    ("gemma3_text", FEW_WINDOWS, "has sliding windows in few layers"),
    (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        "has sliding windows in some layers, which vllm engines do not serve in this family",
    ),
    ("lfm2", {}, "has no block_dim, which vLLM reads without a default"),
    ("nemotron_h", {}, "has experts without a gate, which vLLM computes on GPUs only"),
    (
        "granitemoehybrid",
        {"mamba_d_head": 32, "layer_types": ["mamba", *["attention"] * 3]},
        "has states in few layers",
    ),
]


@pytest.mark.parametrize(("kind", "changed", "says"), CONDITIONS)
def test_what_its_kernels_lack_is_refused(
    tmp_path: Path, kind: str, changed: dict[str, Any], says: str
) -> None:
    write_config(tmp_path, kind, **changed)
    assert says in refuses(tmp_path)
