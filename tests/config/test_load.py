"""The YAML: the configuration that it gives, and the one-line error of each mistake."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec import structs

from prism.config.resolve import load
from prism.config.resolved import read_resolved, write_resolved
from prism.config.schema.cluster_config import ClusterConfig
from prism.config.schema.replicas import ReplicasYaml
from prism.errors import ConfigError
from prism.policies import registry
from prism.policies.registry import names
from tests.frontend.tiny_model import make_model

MIB = 1 << 20
Edit = Callable[[dict[str, Any]], object]

GOOD: dict[str, Any] = {
    "devices": [
        {"name": "host:0", "capacity": "64MiB", "page": "64KiB"},
        {"name": "host:1", "capacity": "64MiB", "page": "64KiB", "engines": 3},
    ],
    "models": [
        {"name": "a", "path": "a", "slo": {"ttft": "500ms", "tpot": "50ms"}},
        {"name": "b", "path": "models/b", "context_length": 100, "device": "host:1"},
    ],
    "engine": {"adapter": "fake", "static": "1MiB"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model(tmp_path / "a")
    make_model(tmp_path / "models" / "b")
    return tmp_path


def written(folder: Path, data: object) -> Path:
    path = folder / "prism.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return path


def test_a_policy_that_simulates_placements_needs_the_simulator(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {**GOOD, "policy": "seallm", "models": GOOD["models"][:1]}
    assert load(written(folder, data)).policy == "seallm"
    monkeypatch.setattr(registry, "SIMULATORS", "prism.none")
    with pytest.raises(ConfigError, match=r"policy: 'seallm' .* install the package prism-sim"):
        load(written(folder, data))


def test_token_level_switching_needs_two_devices_and_models_that_may_leave(folder: Path) -> None:
    data = {**GOOD, "policy": "aegaeon", "models": GOOD["models"][:1]}
    assert load(written(folder, data)).policy == "aegaeon"
    kept = {**data, "models": [{**data["models"][0], "never_evict": True}]}
    with pytest.raises(ConfigError, match=r"models\[0\]: never_evict and replicas.min cannot"):
        load(written(folder, kept))
    data["devices"] = data["devices"][:1]
    with pytest.raises(ConfigError, match=r"devices: policy 'aegaeon' prefills .* at least two"):
        load(written(folder, data))


def test_bounds_of_copies_follow_the_devices(folder: Path) -> None:
    """Defaults to the number of devices, or to one for a model that has a device for itself."""
    data = copy.deepcopy(GOOD)
    a, b = load(written(folder, data)).models
    assert [(m.replicas_min, m.replicas_max) for m in (a, b)] == [(1, 2), (1, 1)]
    data["models"][0]["replicas"] = {"min": 2, "max": 9}
    kept = load(written(folder, data)).models[0]
    assert (kept.replicas_min, kept.never_evict) == (2, True)
    data["models"][0]["replicas"] = {"max": 0}
    with pytest.raises(ConfigError, match=r"models\[0\].replicas.max: 0 must be at least 1"):
        load(written(folder, data))
    for bounds, most in (({"min": 3}, 2), ({"min": 2, "max": 1}, 1), ({"min": 0}, 2)):
        data["models"][0]["replicas"] = bounds
        with pytest.raises(ConfigError, match=rf"models\[0\].replicas.min: .* 1 to {most}"):
            load(written(folder, data))


def test_a_model_in_another_format_is_refused(folder: Path) -> None:
    data = copy.deepcopy(GOOD)
    weights = (folder / "a" / "model.safetensors").rename(folder / "a" / "pytorch_model.bin")
    for path, named in (("a", weights.parent), (str(weights), weights)):
        data["models"][0]["path"] = path
        with pytest.raises(ConfigError) as caught:
            load(written(folder, data))
        assert str(caught.value) == (
            f"{folder}/prism.yaml: models[0].path: {named} has its weights as PyTorch's .bin,"
            " which is not served; give a model with *.safetensors"
        )


def test_copies_of_a_wide_model_stay_within_nodes() -> None:
    three = ReplicasYaml().bounds("a", ["x", "x", "x", "y", "y"], tp=2)
    assert three == (1, 2)
    assert ReplicasYaml().bounds("a", ["x", "y"], tp=2) == (1, 1)


def test_a_good_file(folder: Path) -> None:
    config = load(written(folder, GOOD))
    assert [(d.name, d.capacity_bytes, d.page_bytes, d.engines) for d in config.devices] == [
        ("host:0", 64 * MIB, 1 << 16, 2),
        ("host:1", 64 * MIB, 1 << 16, 3),
    ]
    a, b = config.models
    assert (a.path, b.path) == (str(folder / "a"), str(folder / "models" / "b"))
    assert (a.slo_ttft_s, a.slo_tpot_s) == (0.5, 0.05)
    assert (a.context_length, b.context_length) == (256, 100)
    assert (b.pinned_device, a.dtype, a.kv_dtype) == ("host:1", "float32", "float32")
    assert config.engine.static_bytes == MIB
    assert (config.policy, config.port, config.redis_url) == ("prism", 8000, "")


def test_the_resolved_file_reads_back_and_is_private(folder: Path) -> None:
    config = load(written(folder, GOOD))
    path = folder / "cluster.json"
    write_resolved(config, path)
    assert read_resolved(path) == config
    assert path.stat().st_mode & 0o777 == 0o600


def put(*keys: str | int, value: object) -> Edit:
    def edit(data: dict[str, Any]) -> None:
        place: Any = data
        for key in keys[:-1]:
            place = place.setdefault(key, {}) if isinstance(place, dict) else place[key]
        place[keys[-1]] = value

    return edit


MISTAKES: list[tuple[Edit, str]] = [
    (
        put("modles", value=[]),
        "modles: unknown key; did you mean 'models'?",
    ),
    (
        put("xyz", value=1),
        "xyz: unknown key; known keys: devices, models, nodes, ray, cluster_key, policy, knobs,"
        " redis, hang_timeout, frontend, access, scheduler, engine, journal",
    ),
    (
        put("models", 0, "slo", "tfft", value="1s"),
        "models[0].slo.tfft: unknown key; did you mean 'ttft'?",
    ),
    (
        put("engine", "adaptor", value="fake"),
        "engine.adaptor: unknown key; did you mean 'adapter'?",
    ),
    (
        lambda data: data.pop("models"),
        "models: is missing; add it",
    ),
    (
        lambda data: data["models"][1].pop("path"),
        "models[1].path: is missing; add it",
    ),
    (
        put("models", value=[]),
        "models: the list is empty; add at least one entry",
    ),
    (
        put("models", 0, "name", value=7),
        "models[0].name: expected `str`, got `int`; correct the value",
    ),
    (
        put("models", 0, "name", value="two words"),
        "models[0].name: 'two words' is not a valid name; write letters, digits and . _ - : / @ +",
    ),
    (
        put("models", 1, "name", value="a"),
        "models[1].name: 'a' is used twice; rename one",
    ),
    (
        put("devices", 1, "name", value="host:0"),
        "devices[1].name: 'host:0' is used twice; rename one",
    ),
    (
        put("devices", 0, "name", value="gpu:0"),
        "devices[0].name: 'gpu:0' is not a valid device; use host:0, host:1, ... or cuda:0, ...",
    ),
    (
        put("devices", 0, "name", value="cuda:0"),
        "devices[0].name: the fake engine cannot serve on cuda:0",
    ),
    (
        put("devices", 0, "sm_percent", value=[50, 50]),
        "devices: sm_percent of host:0 needs MPS; set engine.mps: true",
    ),
    (
        put("devices", 0, "sm_percent", value=[50]),
        "devices[0].sm_percent: 1 numbers for 2 engines; give each one",
    ),
    (
        put("devices", 0, "sm_percent", value=[50, 0]),
        "devices[0].sm_percent: 0 is not a valid percentage; choose 1 to 100",
    ),
    (
        put("models", 0, "tp", value=0),
        "models[0].tp: 0 is too small; give at least 1",
    ),
    (
        put("models", 0, "tp", value=3),
        "models[0].tp: 2 KV heads cannot be shared by 3 devices; choose a divisor",
    ),
    (
        put("models", 1, "tp", value=2),
        "models[1].device: cannot be combined with tp 2; remove the key",
    ),
    (
        put("models", 0, "device", value="host:7"),
        "models[0].device: unknown device 'host:7'; choose one of host:0, host:1",
    ),
    (
        put("models", 0, "path", value="nowhere"),
        "models[0].path: {folder}/nowhere is not a directory, and 'nowhere' is not ORG/NAME of a"
        " model hub; correct the path",
    ),
    (
        put("models", 0, "path", value="models"),
        "models[0].path: {folder}/models does not have config.json; give a directory in Hugging"
        " Face's layout (config.json, tokenizer.json, *.safetensors)",
    ),
    (
        put("models", 0, "dtype", value="int4"),
        "models[0].dtype: unknown value 'int4'; choose one of auto, float32, bfloat16, float16",
    ),
    (
        put("models", 0, "context_length", value=0),
        "models[0].context_length: 0 is too small; give at least 1",
    ),
    (
        put("models", 0, "context_length", value=257),
        "models[0].context_length: 257 is more than the 256 tokens that {folder}/a/config.json has,"
        " by its positions or its sliding window;"
        " lower it, or leave the key out",
    ),
    (
        put("models", 0, "static_share", value=1.5),
        "models[0].static_share: 1.5 is not in (0, 1]; write 0.5",
    ),
    (
        put("models", 0, "expected", value={"rate": -1, "prompt_tokens": 9, "output_tokens": 9}),
        "models[0].expected.rate: -1.0 must be 0 or more requests per second",
    ),
    (
        put("models", 0, "expected", value={"rate": 1, "prompt_tokens": 9, "output_tokens": 0}),
        "models[0].expected.output_tokens: 0.0 must be at least 1",
    ),
    (
        put("models", 0, "slo", "ttft", value="fast"),
        "models[0].slo.ttft: 'fast' is not a time; write a number and one of us, ms, s, m, min, h,"
        " such as 500ms or 2s",
    ),
    (
        put("models", 0, "slo", "ttft", value=500),
        'models[0].slo.ttft: expected `str`, got `int`; write it as "500ms"',
    ),
    (put("policy", value="sttic"), "policy: 'sttic' is not a policy; did you mean 'static'?"),
    (
        put("policy", value="magic"),
        f"policy: 'magic' is not a policy; choose one of {', '.join(names())}",
    ),
    (
        put("redis", value="localhost:6379"),
        "redis: is not a Redis URL; write redis://host:port, or leave the key out"
        " to use the bundled server",
    ),
    (
        put("frontend", "port", value=70000),
        "frontend.port: 70000 is not a valid port; choose 1 to 65535, or 0 for any free one",
    ),
    (
        put("hang_timeout", value="14s"),
        "hang_timeout: 14.0 is too small; give at least 15",
    ),
    (
        put("frontend", "cors_origins", value=["*", "https://x.example/"]),
        "frontend.cors_origins[1]: 'https://x.example/' is not a valid origin; write"
        " https://x.example",
    ),
    (
        put("frontend", "priority", value={"max": -1}),
        "frontend.priority: min -100 and max -1 must have 0 between them, and be within"
        " -1000 and 1000",
    ),
    (
        put("frontend", "max_open_requests", value=0),
        "frontend.max_open_requests: 0 is too small; give at least 1",
    ),
    (
        put("frontend", "images", value={"count_max": 0}),
        "frontend.images.count_max: 0 is too small; give at least 1",
    ),
    (
        put("frontend", "images", value={"pixels_max": -1}),
        "frontend.images.pixels_max: -1 is too small; give at least 1",
    ),
    (
        put("frontend", "images", value={"request_max": "129MiB"}),
        "frontend.images.request_max: 129MiB is too large for a message to an engine; give at most"
        " 128MiB",
    ),
    (
        put("scheduler", "interval", value="0s"),
        "scheduler.interval: '0s' must be more than 0, such as 500ms or 2s",
    ),
    (
        put("scheduler", "migration_threshold", value=-1),
        "scheduler.migration_threshold: -1.0 is too small; give at least 0",
    ),
    (
        put("scheduler", "contended_requests", value=-1),
        "scheduler.contended_requests: -1.0 is too small; give at least 0",
    ),
    (
        put("engine", "adapter", value="vlm"),
        "engine.adapter: unknown value 'vlm'; choose one of fake, sglang, vllm",
    ),
    (
        put("models", 1, "adapter", value="vlm"),
        "models[1].adapter: unknown value 'vlm'; choose one of fake, sglang, vllm",
    ),
    (
        put("engine", "python", value={"vlm": "/bin/python3"}),
        "engine.python: unknown value 'vlm'; choose one of fake, sglang, vllm",
    ),
    (
        put("engine", "python", value={"fake": "none/python"}),
        "engine.python.fake: {folder}/none/python cannot be run ([Errno 2] No such"
        " file or directory: '{folder}/none/python'); give a Python interpreter",
    ),
    (
        put("engine", "python", value={"fake": "/bin/false"}),
        "engine.python.fake: /bin/false cannot run its engines (exit code 1); install"
        " prism-serving there",
    ),
    (
        put("engine", "weight_links", value="all"),
        "engine.weight_links: unknown value 'all'; choose one of node, own",
    ),
    (
        put("engine", "max_running", value=0),
        "engine.max_running: 0 is too small; give at least 1",
    ),
    (
        put("devices", 0, "engines", value=0),
        "devices[0].engines: 0 is out of range; choose 1 to 64",
    ),
    (
        put("devices", 0, "capacity", value="1 Gb/s"),
        "devices[0].capacity: '1 Gb/s' is not a size; write a number and one of B, KiB, MiB, GiB,"
        " TiB, KB, MB, GB, TB, K, M, G, T, such as 512MiB or 2GiB",
    ),
    (
        put("devices", 0, "capacity", value=1073741824),
        'devices[0].capacity: expected `str`, got `int`; write it as "8GiB" or "90%"',
    ),
    (
        put("devices", 0, "capacity", value="32KiB"),
        "devices[0].capacity: 32KiB is below one page (64KiB); raise capacity or lower"
        " devices[0].page",
    ),
    (
        put("devices", 0, "page", value="48KiB"),
        "devices[0].page: 48KiB is not a power of two of at least 4KiB; use 64KiB or 2MiB",
    ),
    (
        put("devices", 0, "capacity", value="1MiB"),
        "devices[0].capacity: 1MiB is too small for any model; a needs 1.312MiB (weights 64KiB,"
        " fixed share 1MiB, KV of one 256-token request 256KiB); raise capacity to 2MiB or lower"
        " models[0].context_length",
    ),
    (
        put("devices", value=[{"name": "host:1", "capacity": "2MiB", "page": "2MiB"}]),
        "devices[0].capacity: 2MiB is too small for any model; a needs 12MiB (weights 2MiB, fixed"
        " share 2MiB, KV of one 256-token request 8MiB); raise capacity to 12MiB or lower"
        " models[0].context_length",
    ),
]


@pytest.mark.parametrize(("edit", "message"), MISTAKES)
def test_a_mistake_gets_one_line_with_the_remedy(folder: Path, edit: Edit, message: str) -> None:
    data = copy.deepcopy(GOOD)
    edit(data)
    path = written(folder, data)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value) == f"{path}: {message.format(folder=folder)}"


def test_a_model_that_fits_on_no_device(folder: Path) -> None:
    make_model(folder / "wide", num_key_value_heads=4, head_dim=512, max_position_embeddings=4096)
    data = copy.deepcopy(GOOD)
    data["models"].append({"name": "wide", "path": "wide"})
    with pytest.raises(ConfigError, match=r"models\[2\]: wide needs 129.6MiB .* and host:0 has"):
        load(written(folder, data))


TEXTS = [
    ("devices: [", "line 1, column 11: expected the node content, but found '<stream end>'"),
    ("a: 1\na: 2\n", "line 2, column 1: the key 'a' is given twice; correct the YAML there"),
    ("a: b: c", "line 1, column 5: mapping values are not allowed here; correct the YAML there"),
    ("- 1", "the file must have keys such as devices: and models:; see the README"),
    ("", "the file must have keys such as devices: and models:; see the README"),
]


@pytest.mark.parametrize(("text", "message"), TEXTS)
def test_text_that_is_not_the_yaml_wanted(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory; correct the path"):
        load(tmp_path / "none.yaml")


def test_a_search_does_not_read_the_device_of_a_model(folder: Path) -> None:
    path = written(folder, {**GOOD, "policy": "muxserve++"})
    with pytest.raises(
        ConfigError, match=r"models\[1\].device: cannot be combined with policy 'mux"
    ):
        load(path)


def test_a_model_over_two_devices_needs_two_of_a_kind(folder: Path) -> None:
    data = copy.deepcopy(GOOD)
    data["models"][0]["tp"] = 2
    [a, b] = load(written(folder, data)).models
    assert (a.tp, b.tp) == (2, 1)
    data["devices"][1]["page"] = "2MiB"
    with pytest.raises(
        ConfigError, match=r"models\[0\]\.tp: a needs .* on each of 2 .*, and only 1 have"
    ):
        load(written(folder, data))


def test_auto_has_each_degree_that_devices_and_heads_allow(folder: Path) -> None:
    """Is not the default on host devices."""
    data = copy.deepcopy(GOOD)
    data["devices"].append({**data["devices"][1], "name": "host:2"})
    assert [model.degrees for model in load(written(folder, data)).models] == [(), ()]
    for row in data["models"]:
        row["tp"] = "auto"
    a, pinned = load(written(folder, data)).models
    assert (a.tp, a.degrees) == (1, (1, 2))  # 2 KV heads, 3 devices
    assert (pinned.tp, pinned.degrees) == (1, (1,))
    data["models"][0]["replicas"] = {"min": 3}
    assert load(written(folder, data)).models[0].degrees == (1,)
    data["models"][0]["tp"] = "most"
    with pytest.raises(ConfigError, match=r"models\[0\]\.tp: "):
        load(written(folder, data))


def test_auto_starts_at_the_least_degree_that_fits(folder: Path) -> None:
    data = copy.deepcopy(GOOD)
    del data["models"][1]
    data["engine"]["static"] = "64KiB"
    data["devices"] = [{"name": f"host:{n}", "page": "4KiB", "capacity": "160KiB"} for n in (0, 1)]
    with pytest.raises(ConfigError, match=r"a needs .* raise capacity"):
        load(written(folder, data))
    data["models"][0]["tp"] = "auto"
    config = load(written(folder, data))
    assert [(m.tp, m.degrees) for m in config.models] == [(2, (2,))]
    assert config == read_back(config, folder)
    data["models"][0]["tp"] = 2
    [two] = load(written(folder, data)).models
    assert config.models == [structs.replace(two, degrees=(2,))]


def read_back(config: ClusterConfig, folder: Path) -> ClusterConfig:
    write_resolved(config, folder / "cluster.json")
    return read_resolved(folder / "cluster.json")
