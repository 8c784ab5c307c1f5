"""Models in GGUF in the YAML: their folders, sizes, and files that engines cannot load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import yaml
from gguf import GGMLQuantizationType as Type

from kvcached import Checkpoint
from prism.config.checks.adapters import check_loadable
from prism.config.resolve import load
from prism.config.schema.cluster_config import ClusterConfig
from prism.engines.sglang.platform import gpu
from prism.engines.sglang.platform.supported_models import refuses
from prism.errors import ConfigError
from prism.frontend.text.tokenizers import load_tokenizers
from prism.models import tiny
from prism.models.files import inspect_model
from prism.models.gguf.gguf_folder import folder_of_gguf
from prism.models.gguf.gguf_weights import kept
from prism.models.store import default_directory, prepare
from tests.sglang.gguf_models import Q4_0, Q4_K, write_gguf

pytestmark = [pytest.mark.sglang, pytest.mark.slow]  # torch and transformers
SIDE_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def source() -> Path:
    return prepare(tiny.LLAMA, default_directory(), lambda _text: None)


@pytest.fixture
def file(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpu, "_NEEDS", ())  # SGLang's kernels are not installed here
    monkeypatch.setenv("PRISM_HOME", str(tmp_path / "home"))
    return write_gguf(source, tmp_path / "m.gguf", Q4_0)


def loaded(folder: Path, path: str, **model: Any) -> ClusterConfig:
    data = {
        "devices": [{"name": "cuda:0", "capacity": "8GiB"}, {"name": "cuda:1", "capacity": "8GiB"}],
        "models": [{"name": "m", "path": path, **model}],
        "engine": {"adapter": "sglang"},
    }
    (folder / "prism.yaml").write_text(yaml.safe_dump(data))
    config = load(folder / "prism.yaml")
    check_loadable(config)
    return config


def refused(folder: Path, path: str, **model: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(folder, path, **model)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{folder}/prism.yaml: ")


def beside(source: Path, folder: Path, **config: Any) -> None:
    """Copies the files of a model next to a GGUF file, with other keys in the config.json."""
    for name in SIDE_FILES:
        shutil.copyfile(source / name, folder / name)
    values = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **config}))


def test_a_file_and_its_folder_are_the_same_model(file: Path, source: Path) -> None:
    [by_file] = loaded(file.parent, "m.gguf").models
    [by_folder] = loaded(file.parent, ".").models
    assert by_file == by_folder
    [again] = loaded(file.parent, by_file.path).models
    assert again == by_file
    tokenizer = load_tokenizers([by_file])["m"]
    assert tokenizer.chat_template is not None
    assert tokenizer.tokenizer.token_to_id("<|im_end|>") in tokenizer.eos_ids
    assert (by_file.dtype, by_file.architecture) == ("bfloat16", "LlamaForCausalLM")
    described, original = (
        json.loads((Path(path) / "config.json").read_text()) for path in (by_file.path, source)
    )
    for key in ("hidden_size", "head_dim", "vocab_size", "num_key_value_heads", "rope_parameters"):
        assert described[key] == original[key]


def test_the_header_of_another_file_makes_another_folder(file: Path, source: Path) -> None:
    first = folder_of_gguf(file, "k")
    write_gguf(source, file, Q4_K)
    second = folder_of_gguf(file, "k")
    beside(source, file.parent, rope_theta=5000.0)
    third = folder_of_gguf(file, "k")
    assert len({first, second, third, folder_of_gguf(file, "k")}) == 3
    assert json.loads((third / "config.json").read_text())["rope_theta"] == 5000.0
    assert (first / "model.gguf").samefile(third / "model.gguf")


def test_a_config_without_architectures_is_not_preferred(file: Path) -> None:
    (file.parent / "config.json").write_text('{"model_type": "llama"}')
    assert "LlamaForCausalLM" in (folder_of_gguf(file, "k") / "config.json").read_text()


@pytest.mark.parametrize("types", [Q4_0, Q4_K])
def test_bytes_are_those_of_fused_rows(file: Path, source: Path, types: dict[str, Type]) -> None:
    """Computes them with gguf's reader: V's rows decide for Q, K and V."""
    write_gguf(source, file, types)
    tensors = {each.name: each for each in gguf.GGUFReader(file).tensors}
    norms = sum(2 * int(each.n_elements) for each in tensors.values() if len(each.shape) == 1)
    alone = ("token_embd", "output", "attn_output", "ffn_down")
    matrices = sum(
        each.n_bytes + 1
        for name, each in tensors.items()
        if name.removesuffix(".weight").split(".")[-1] in alone
    )
    fused = 0
    for layer in range(4):
        for group in (("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up")):
            shapes = [tensors[f"blk.{layer}.{name}.weight"].data.shape for name in group]
            fused += sum(rows for rows, _ in shapes) * max(row for _, row in shapes) + len(group)
    assert sum(each.spec.size_bytes for each in kept(Checkpoint.open(file).tensors)) == (
        norms + matrices + fused
    )
    files = inspect_model(folder_of_gguf(file, "k"), "k")
    assert files.weight_bytes("bfloat16") == norms + matrices + fused


def test_models_that_are_refused(file: Path, source: Path) -> None:
    folder = file.parent
    assert refused(folder, "m.gguf", tp=2) == (
        "models[0].tp: is not supported for weights of gguf; remove it, or give other weights"
    )
    scaled = write_gguf(source, folder / "s.gguf", Q4_0, rope__scaling__type="yarn")
    assert "s.gguf: transformers cannot read its header: it does not read scaled rotary" in (
        refused(folder, "s.gguf")
    )
    assert refused(folder, ".").startswith("models[0].path: ")
    assert "has m.gguf and 1 more *.gguf; give the path of one of them" in refused(folder, ".")
    scaled.unlink()
    content = file.read_bytes()
    file.write_bytes(content[:-500])
    assert f"{file} is damaged or not complete: tensor " in refused(folder, "m.gguf")
    file.write_bytes(content.replace(b"llama", b"gguff"))
    assert "GGUF model with architecture gguff is not supported yet" in refused(folder, "m.gguf")


def test_tensors_that_are_refused(file: Path, source: Path) -> None:
    folder, types = file.parent, {**Q4_0, "ffn_up": Type.F16}
    write_gguf(source, file, types)
    beside(source, folder)
    assert refused(folder, "m.gguf").endswith(
        " has blk.0.ffn_gate.weight in Q4_0 and blk.0.ffn_up.weight in F16, which SGLang cannot"
        " fuse; give a file in another type, such as Q4_K_M"
    )
    write_gguf(source, file, {"": Type.Q8_0, "ffn_down": Type.TQ2_0})
    assert "has blk.0.ffn_down.weight in TQ2_0, for which SGLang does not have a kernel" in (
        refused(folder, "m.gguf")
    )
    write_gguf(source, file, Q4_0)
    file.write_bytes(
        file.read_bytes().replace(b"blk.1.attn_norm.weight", b"blk.1.attn_k_norm.bias")
    )
    assert "has blk.1.attn_k_norm.bias, which SGLang does not load for llama; give" in (
        refused(folder, "m.gguf")
    )
    write_gguf(source, file, Q4_0)
    beside(source, folder, num_hidden_layers=5)
    assert "lacks the tensors of layer 4, but config.json describes 5" in refused(folder, "m.gguf")
    beside(source, folder, intermediate_size=512)
    assert "in layer 0, but config.json describes" in refused(folder, "m.gguf")
    file.write_bytes(file.read_bytes().replace(b"blk.0.ffn_down.weight", b"blk.0.ffn_next.weight"))
    beside(source, folder)
    assert "has blk.0.ffn_next.weight, which Llama and Qwen do not have" in (
        refused(folder, "m.gguf")
    )


def test_other_families_are_named(file: Path, source: Path) -> None:
    beside(source, file.parent, model_type="gemma", architectures=["GemmaForCausalLM"])
    folder = folder_of_gguf(file, "k")
    assert refuses(folder) == (
        f"{folder} is in GGUF, which SGLang reads for llama, qwen2, qwen3, not for gemma; give"
        " *.safetensors"
    )
