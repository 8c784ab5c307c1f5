"""LoRA adapters and aliases in the YAML, and the one-line error of each mistake."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from prism.config.checks.memory_needs import memory_need
from prism.config.resolve import load
from prism.config.schema.access import ApiKey, KeysFile, hashed
from prism.errors import ConfigError, NotDownloadedError
from prism.models.lora_files import CONFIG, WEIGHTS
from tests.config.test_load import written
from tests.frontend.tiny_model import make_model, make_whole_model

HIDDEN, HEADS, KV, INNER, LAYERS = 32, 32, 16, 48, 2  # of the model that `folder` makes
GOOD: dict[str, Any] = {
    "devices": [{"name": "host:0", "capacity": "64MiB", "page": "4KiB"}],
    "models": [
        {"name": "a", "path": "a", "aliases": ["prod"], "lora": [{"name": "x", "path": "x"}]},
        {"name": "b", "path": "a"},
    ],
    "engine": {"static": "1MiB"},
}
OUTPUTS = {"q_proj": HEADS, "v_proj": KV, "up_proj": INNER}
Edit = Callable[[dict[str, Any], Path], object]


def make_adapter(folder: Path, rank: int, *modules: str) -> Path:
    """Writes an adapter of zeros."""
    folder.mkdir()
    tensors = {}
    for module in modules:
        for layer in range(LAYERS):
            name = f"base_model.model.model.layers.{layer}.some.{module}.lora"
            tensors[f"{name}_A.weight"] = np.zeros((rank, HIDDEN), np.float32)
            tensors[f"{name}_B.weight"] = np.zeros((OUTPUTS[module], rank), np.float32)
    save_file(tensors, folder / WEIGHTS)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 1, "target_modules": modules}
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_whole_model(tmp_path / "a", intermediate_size=INNER)
    make_adapter(tmp_path / "x", 4, "q_proj", "up_proj")
    return tmp_path


def test_a_model_is_planned_with_its_adapters(folder: Path) -> None:
    make_adapter(folder / "y", 8, "v_proj")
    data = copy.deepcopy(GOOD)
    data["models"][0]["lora"].append({"name": "y", "path": str(folder / "y")})
    data["engine"]["lora"] = {"slots": 1}
    config = load(written(folder, data))
    a, b = config.models
    assert [(x.name, x.path, x.rank) for x in a.lora.adapters] == [
        ("x", str(folder / "x"), 4),
        ("y", str(folder / "y"), 8),
    ]
    assert [*a.lora.shapes] == ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
    widths = 5 * HIDDEN + HEADS + 2 * KV + 2 * INNER
    assert a.lora.size_bytes == 2 * LAYERS * 8 * widths * 4
    needs = [memory_need(m, config.devices[0], config.engine).static_bytes for m in (a, b)]
    assert 0 <= needs[0] - needs[1] - a.lora.size_bytes < 4096
    assert a.names == ("a", "a:x", "a:y", "prod")
    assert [a.adapter_in(n) for n in ("a", "prod", "a:y", "prod:x", "a:z", "b", "")] == [
        "",
        "",
        "y",
        None,
        None,
        None,
        None,
    ]


def test_an_adapter_may_be_in_a_hub(folder: Path) -> None:
    """Names the entry of an adapter that is not there. An existing folder has precedence."""
    data = copy.deepcopy(GOOD)
    data["models"][0]["lora"][0]["path"] = "org/x@v2"
    asked: list[str] = []

    def of_hub(name: str) -> Path:
        asked.append(name)
        return folder / "x"

    config = load(written(folder, data), of_hub=of_hub)
    (adapter,) = config.models[0].lora.adapters
    assert (adapter.path, adapter.hub_name, asked) == (str(folder / "x"), "org/x@v2", ["org/x@v2"])
    assert config.models[0].hub_paths == {"org/x@v2": str(folder / "x")}

    def fails(name: str) -> Path:
        raise NotDownloadedError(f"{name} is not in the cache; run prism-models pull {name}")

    where = r"models\[0\]\.lora\[0\]\.path: .*org/x@v2"
    with pytest.raises(ConfigError, match=f"{where} is not a directory, and org/x@v2 is not in"):
        load(written(folder, data), of_hub=fails)
    data["models"][0]["lora"][0]["path"] = "org/y"
    (folder / "org").mkdir()
    make_adapter(folder / "org" / "y", 4, "q_proj")
    assert load(written(folder, data), of_hub=fails).models[0].hub_paths == {}


def test_a_model_of_several_devices_has_adapters(folder: Path) -> None:
    data = copy.deepcopy(GOOD)
    data["devices"].append({**data["devices"][0], "name": "host:1"})
    data["models"][0]["tp"] = 2
    model, _ = load(written(folder, data)).models
    assert (model.tp, [adapter.name for adapter in model.lora.adapters]) == (2, ["x"])


def test_keys_may_name_adapters(folder: Path) -> None:
    data = {**GOOD, "access": {"keys": "keys.yaml"}}
    for models, why in ((["a:x", "b"], ""), (["a:y"], "unknown model 'a:y'")):
        key = ApiKey("k", hashed("k"), models=models)
        (folder / "keys.yaml").write_bytes(_yaml(key))
        if why:
            with pytest.raises(ConfigError, match=why):
                load(written(folder, data))
        else:
            assert load(written(folder, data)).keys == [key]


def _yaml(key: ApiKey) -> bytes:
    import msgspec

    return msgspec.yaml.encode(KeysFile([key]))


def _config(**changes: Any) -> Edit:
    def edit(_data: dict[str, Any], folder: Path) -> None:
        file = folder / "x" / CONFIG
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return edit


def _tensors(change: Callable[[str, Any], tuple[str, Any]]) -> Edit:
    def edit(_data: dict[str, Any], folder: Path) -> None:
        file = folder / "x" / WEIGHTS
        save_file(dict(change(n, t) for n, t in load_file(file).items()), file)

    return edit


EXPERTS = {
    "model_type": "qwen3_moe",
    "intermediate_size": INNER,
    "moe_intermediate_size": INNER,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
PATH = r"models\[0\].lora\[0\].path: "
WRONG: dict[str, tuple[Edit, str]] = {
    "no folder": (lambda d, _f: d["models"][0]["lora"][0].update(path="z"), PATH + "cannot read"),
    "no weights": (lambda _d, f: (f / "x" / WEIGHTS).unlink(), PATH + "cannot read .*safetensors"),
    "no tensors": (lambda _d, f: save_file({}, f / "x" / WEIGHTS), PATH + ".*is empty"),
    "no JSON": (lambda _d, f: (f / "x" / CONFIG).write_text("{"), PATH + ".*it is not JSON"),
    "prompt tuning": (_config(peft_type="PROMPT_TUNING"), PATH + ".*only LoRA adapters"),
    "DoRA": (_config(use_dora=True), PATH + ".*use_dora true, which engines do not compute"),
    "rank-stabilised": (_config(use_rslora=True), PATH + ".*use_rslora true"),
    "ranks of their own": (_config(rank_pattern={"q_proj": 8}), PATH + ".*rank_pattern"),
    "a bias": (_config(bias="all"), PATH + '.*bias "all"'),
    "whole modules": (_config(modules_to_save=["lm_head"]), PATH + ".*modules_to_save"),
    "no rank": (_config(r=None), PATH + ".*lacks r or lora_alpha"),
    "no alpha": (_config(lora_alpha=None), PATH + ".*lacks r or lora_alpha"),
    "another rank": (_config(r=2), PATH + "it was made for another model: .*needs"),
    "a rank above the bound": (
        lambda d, _f: d["engine"].update(lora={"rank_max": 3}),
        PATH + "its rank of 4 is above engine.lora.rank_max; raise that",
    ),
    "embeddings": (
        _tensors(lambda n, t: (n.replace("up_proj", "embed_tokens"), t)),
        PATH + "it changes .*embed_tokens.*; merge it into its model",
    ),
    "a wider base": (
        _tensors(lambda n, t: (n, np.tile(t, (1, 2)) if "lora_A" in n else t)),
        PATH + r"it was made for another model: .* has shape \[4, 64\], .* needs \[4, 32\]",
    ),
    "a deeper base": (
        _tensors(lambda n, t: (n.replace("layers.1.", "layers.7."), t)),
        PATH + "it was made for another model: .*this model of 2 layers",
    ),
    "experts": (
        lambda _d, f: make_model(f / "a", **EXPERTS),
        PATH + "it changes .*up_proj.*of a dense MLP alone",
    ),
    "a fake engine": (
        lambda d, _f: d["engine"].update(adapter="fake"),
        r"models\[0\].lora: fake engines do not support LoRA; remove the key",
    ),
    "an embedding model": (
        lambda d, _f: d["models"][0].update(embeddings=True),
        r"models\[0\].lora: cannot be combined with an embedding model; remove the adapters",
    ),
    "no slots": (
        lambda d, _f: d["engine"].update(lora={"slots": 0}),
        "engine.lora.slots: 0 is too small",
    ),
    "a name with a colon": (
        lambda d, _f: d["models"][0]["lora"][0].update(name="x:y"),
        r"models\[0\].lora\[0\].name: 'x:y' is not a valid name",
    ),
    "two of one name": (
        lambda d, _f: d["models"][0]["lora"].append({"name": "x", "path": "x"}),
        r"models\[0\]: 'a:x' is used twice; rename one",
    ),
    "an alias of two": (
        lambda d, _f: d["models"][1].update(aliases=["prod"]),
        r"models\[1\]: 'prod' is used twice; rename one",
    ),
    "an alias that is a model": (
        lambda d, _f: d["models"][0].update(aliases=["b"]),
        r"models\[0\]: 'b' is used twice; rename one",
    ),
    "an alias that is an adapter": (
        lambda d, _f: d["models"][1].update(aliases=["a:x"]),
        r"models\[1\]: 'a:x' is used twice; rename one",
    ),
    "an alias with a space": (
        lambda d, _f: d["models"][0].update(aliases=["p q"]),
        r"models\[0\].aliases\[0\]: 'p q' is not a valid name",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_mistakes_are_named(folder: Path, what: str) -> None:
    edit, message = WRONG[what]
    data = copy.deepcopy(GOOD)
    edit(data, folder)
    with pytest.raises(ConfigError, match=message) as caught:
        load(written(folder, data))
    assert "\n" not in str(caught.value)
