"""Each family of models that the SGLang adapter serves: its answers are those of transformers."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Container
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcached import Heads, Latent
from kvcached.engines.sglang.hybrid.overrides import WINDOW_POOLS
from kvcached.models import shape_of_config
from prism.engines.sglang.platform.supported_models import SERVED, WINDOWS, refuses
from prism.engines.vllm.capabilities import SERVED as SERVED_BY_VLLM
from prism.errors import ConfigError
from prism.messages.engine import Deactivate, Deactivated, Submit
from prism.messages.model_spec import ModelSpec
from prism.models.files import inspect_model
from prism.models.hugging_face import import_transformers
from prism.models.store import default_directory, prepare
from tests.engines.harness import DeviceUnderTest, request
from tests.families import TINY, VOCAB_SIZE, WINDOW
from tests.sglang import models
from tests.sglang.models import TIE, Kept, gap_of, network

# torch deprecates a decorator that GPT-BigCode uses.
pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore:.*torch.jit.script")]

TOKENS = 12
# The last is longer than the tiny models' windows, and takes two chunks of prefill.
PROMPT_TOKENS = (7, 40, 120)


def path_of(kind: str) -> Path:
    """Returns the folder of the tiny model of a family."""
    return models.path_of(f"family-{kind}")


def spec_of(
    kind: str,
    path: Path,
    window_pools: Container[str] = WINDOW_POOLS,
    windows: Container[str] | None = WINDOWS,
) -> ModelSpec:
    shape = inspect_model(path, kind, window_pools, windows).shape("float32", None)
    return ModelSpec(name=kind, path=str(path), slo_ttft_s=2.0, slo_tpot_s=0.2, **shape)


def prompts(spec: ModelSpec) -> dict[str, list[int]]:
    """Returns prompts by request, as long as the model's context allows."""
    rng = random.Random(spec.name)
    lengths = [n for n in PROMPT_TOKENS if n + 2 * TOKENS <= spec.context_length]
    return {f"{n}": rng.choices(range(16, VOCAB_SIZE), k=n) for n in lengths}


@pytest.mark.parametrize("kind", sorted(SERVED))
def test_answers_are_those_of_transformers(device: DeviceUnderTest, kind: str) -> None:
    """Compares answers of prompts that run together, after their own beginnings, and alone after an
    eviction. The engine compares the layout of its KV with the one that config.json gives."""
    path = path_of(kind)
    assert refuses(path) == ""
    spec = spec_of(kind, path)
    asked, reference = prompts(spec), network(path)
    device.activate(spec)
    answers = ask(device, spec, asked, reference)
    longer = {f"{name}+": prompt + answers[name][:-4] for name, prompt in asked.items()}
    ask(device, spec, longer, reference)
    leave(device)
    device.activate(spec)
    ask(device, spec, {"alone": min(asked.values(), key=len)}, reference)
    leave(device)
    assert f"model {kind}: its weights take" not in logs(device)


# What other models of a family have in their config.json: keys that are new or None.
OTHERS: dict[str, dict[str, Any]] = {
    "nemotron_h": {  # as saved before transformers 5
        "hybrid_override_pattern": "M*-E",
        "layers_block_type": None,
        "mtp_layers_block_type": None,
        "num_hidden_layers": 4,
    },
}


@pytest.mark.parametrize("kind", OTHERS)
def test_an_older_config_means_the_same(device: DeviceUnderTest, tmp_path: Path, kind: str) -> None:
    older = shutil.copytree(path_of(kind), tmp_path / kind)
    config = json.loads((older / "config.json").read_text()) | OTHERS[kind]
    config = {key: value for key, value in config.items() if value is not None}
    (older / "config.json").write_text(json.dumps(config))
    assert refuses(older) == ""
    spec = spec_of(f"older-{kind}", older)
    device.activate(spec)
    ask(device, spec, prompts(spec), network(path_of(kind)))
    leave(device)


_SWITCH = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
# Settings of other models of a family.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"{kind}-windows": (kind, _SWITCH)
        for kind in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3")
    },
    "mixtral-windows": ("mixtral", {"sliding_window": WINDOW}),
    "phimoe-windows": ("phimoe", {"sliding_window": WINDOW}),
    "dots1-windows": (
        "dots1",
        {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "gemma4-keys": (
        "gemma4_text",
        {
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "gemma4-experts": (
        "gemma4_text",
        {
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 64,
        },
    ),
    "nemotron_h-latent": ("nemotron_h", {"moe_latent_size": 64}),
    "exaone4-full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_answer_as_in_transformers(device: DeviceUnderTest, name: str) -> None:
    kind, settings = VARIANTS[name]
    made = models.family(name, kind, TINY[kind] | settings)
    path = prepare(made, default_directory(), lambda _text: None)
    assert refuses(path) == ""
    spec = spec_of(name, path)
    device.activate(spec)
    ask(device, spec, prompts(spec), network(path))
    leave(device)
    assert f"model {name}: its weights take" not in logs(device)


def ask(
    device: DeviceUnderTest,
    spec: ModelSpec,
    asked: dict[str, list[int]],
    reference: Any,
    engine_id: str = "e0",
    *,
    kept: Kept | None = None,
) -> dict[str, list[int]]:
    """Returns the answers of prompts by request, which are those of transformers. `kept`: see
    `gap_of`."""
    names = {name: f"{spec.name}/{name}" for name in asked}
    requests = [request(names[name], spec.name, asked[name], TOKENS) for name in asked]
    device.send(Submit(requests), engine_id)
    answers = {}
    for name, stream in zip(asked, device.finish(*names.values()), strict=True):
        answers[name] = stream.token_ids
        assert len(stream.token_ids) == TOKENS
        assert gap_of(reference, asked[name], stream.token_ids, kept) < TIE, name
    return answers


def leave(device: DeviceUnderTest, engine_id: str = "e0") -> None:
    device.send(Deactivate(), engine_id)
    device.wait_for(Deactivated, engine_id)


def test_weights_of_another_size_are_a_warning(device: DeviceUnderTest) -> None:
    spec = spec_of("llama", path_of("llama"))
    wrong = msgspec.structs.replace(spec, name="w", weight_bytes=int(spec.weight_bytes * 1.02))
    device.activate(wrong)
    leave(device)
    assert "model w: its weights take" in logs(device)


def logs(device: DeviceUnderTest) -> str:
    """Returns what the engines and their fork server have logged."""
    paths = [device.fork_server.log_path, *Path(device.config.run_dir).glob("logs/*")]
    return "\n".join(path.read_text() for path in paths if path.exists())


@pytest.mark.parametrize("kind", sorted(set(TINY) - SERVED))
def test_the_others_are_refused_before_a_cluster_starts(tmp_path: Path, kind: str) -> None:
    """Looks for the reason in the line of each family that is known."""
    write_config(tmp_path, kind)
    says = reason(tmp_path)
    assert "(SGLang does not have a class" in says or "index of keys" in says


CONDITIONS: list[tuple[str, dict[str, Any], str]] = [
    ("exaone4", {"head_dim": 32}, "has head_dim other than hidden_size / heads"),
    (
        "exaone4",
        {"layer_types": ["full_attention", "sliding_attention"] * 2},
        "full attention in irregular layers",
    ),
    (
        "gemma3n_text",
        {"layer_types": ["full_attention", "sliding_attention"] * 2},
        "shared layers after other than a sliding and a full one",
    ),
    ("olmo", {"num_key_value_heads": 3}, "fewer K and V heads than query heads"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "experts in some layers only"),
    ("qwen2_moe", {"mlp_only_layers": [1]}, "experts in some layers only"),
    ("stablelm", {"qk_layernorm": True}, "has qk_layernorm, which SGLang ignores"),
    ("stablelm", {"use_parallel_residual": True}, "has use_parallel_residual, which SGLang"),
    ("olmoe", {"clip_qkv": 8.0}, "has clip_qkv, which SGLang ignores"),
    ("phi", {"qk_layernorm": True}, "has qk_layernorm, which SGLang ignores"),
]


@pytest.mark.parametrize(("kind", "changed", "says"), CONDITIONS)
def test_what_sglang_does_not_compute_is_refused(
    tmp_path: Path, kind: str, changed: dict[str, Any], says: str
) -> None:
    write_config(tmp_path, kind, **changed)
    assert says in reason(tmp_path)


def write_config(folder: Path, kind: str, **changed: Any) -> None:
    """Writes the config.json of a family's tiny model, with some keys changed."""
    transformers = import_transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = transformers.AutoConfig.for_model(kind, **TINY[kind] | changed).to_dict()
    config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").touch()


def reason(folder: Path) -> str:
    """Returns why a model without weights is refused, "" if only they are missing."""
    try:
        inspect_model(folder, "path")
    except ConfigError as error:
        if "does not have *.safetensors" not in str(error):
            return str(error)
    return refuses(folder)


PAGE = Path(__file__).parents[2] / "docs" / "supported-models.md"


def row(folder: Path, kind: str) -> str:
    """Returns a family's row of the page of supported models."""
    write_config(folder, kind)
    shape = shape_of_config(json.loads((folder / "config.json").read_text()))
    kept = {layer.kv for layer in shape.layers}
    names = []
    if any(isinstance(kv, Heads) for kv in kept):
        names.append("K and V heads")
    if any(isinstance(kv, Latent) for kv in kept):
        names.append("a latent (MLA)")
    if any(layer.index_bytes for layer in shape.layers):
        names.append("an index of keys")
    if any(layer.window_tokens for layer in shape.layers):
        every = all(layer.window_tokens for layer in shape.layers)
        names.append(f"windows in {'all' if every else 'some'} layers")
    if any(layer.state for layer in shape.layers):
        names.append("a state per sequence")
    elif None in kept:
        names.append("KV shared by layers")
    experts = "experts" if any(layer.mlp.experts for layer in shape.layers) else ""
    served = [
        "equal to transformers" if kind in families else "refused"
        for families in (SERVED, SERVED_BY_VLLM)
    ]
    return f"| `{kind}` | {', '.join(names)} | {experts} | {' | '.join(served)} |"


def test_the_page_of_supported_models_is_true(tmp_path: Path) -> None:
    expected = [row(tmp_path, kind) for kind in sorted(TINY)]
    found = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert found == expected, "\n".join(expected)
