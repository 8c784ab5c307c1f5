"""GPU types, models and step costs from a user's files, next to the YAML that names them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from prism.errors import ConfigError
from prism_replay.outcomes import PointOutcome
from prism_sim.costs.table import TableCost
from prism_sim.scenario.scenario import load
from prism_sim.sweeps import points
from prism_sim.sweeps.points import Point

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "own_hardware"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Copies the example to a folder that is not the working directory."""
    copy = tmp_path / "own"
    shutil.copytree(EXAMPLE, copy)
    return copy


def test_all_of_it_is_used(folder: Path) -> None:
    found = points.simulate(Point(str(folder / "cluster.yaml"), {}))
    assert found.summary is not None
    assert found.summary.total.completed == found.summary.total.requests > 100
    setup = load(folder / "cluster.yaml").setup
    assert setup.devices[0].capacity_bytes == pytest.approx(0.9 * 96e9, rel=1e-4)
    chat, tail = setup.models[:2]
    assert chat.weight_bytes == pytest.approx(2 * 13.9e9, rel=0.01)
    sources = []
    for cost in (chat.parts[1].cost, tail.parts[2].cost):
        assert isinstance(cost, TableCost)
        sources.append(cost.table.source)
    assert sources == ["measured by hand", "roofline"]


MISTAKES = (
    ("gpus.yaml", "96GB", "96", r"gpus\.yaml: types\[0\]\.memory: expected `str`, got `int`"),
    ("gpus.yaml", "96GB", "much", r"gpus\.yaml: types\[0\]\.memory: 'much' is not a size"),
    ("gpus.yaml", "tflops", "flops", r"types\[0\]\.flops: unknown key; did you mean 'tflops'"),
    ("gpus.yaml", "tflops: 700, ", "", r"gpus\.yaml: types\[0\]\.tflops: is missing"),
    ("gpus.yaml", "tflops: 700", "tflops: 0", r"types\[0\]: tflops must be > 0"),
    ("gpus.yaml", "my-gpu", "h100", r"gpus\.yaml: types\[0\]\.name: 'h100' already exists"),
    ("gpus.yaml", "my-gpu", "other", r"gpus\.type: gpu 'my-gpu': known types are .*, other"),
    ("cluster.yaml", "gpus.yaml", "no.yaml", r"no\.yaml: cannot be read: No such file"),
    ("cluster.yaml", "my-model.json", "no.json", r"chat\.shape: .*no\.json does not exist"),
    ("my-model.json", '"hidden_size"', '"hidden"', r"my-model\.json lacks hidden_size"),
    (
        "my-model.json",
        "{",
        '{"num_experts": 8, ',
        r"my-model\.json has num_experts 8, which changes no",
    ),
    ("my-model.json", "{", "", r"cannot read .*my-model\.json"),
    (
        "my-model.json",
        "{",
        '{"quantization_config": {"quant_method": "awq"}, ',
        r"my-model\.json: quantization_config: 'awq' does not have a roofline",
    ),
    ("costs.json", "dense_s", "dense", r"costs\.json: .*`dense`.* `\$\.tables\[0\]`"),
    ("costs.json", "[0.0085, 0.0125", "[0.0125, 0.0085", r"costs\.json: .*dense_s: more tokens"),
)


@pytest.mark.parametrize(("file", "old", "new", "says"), MISTAKES)
def test_a_mistake_names_file_and_key(
    folder: Path, *, file: str, old: str, new: str, says: str
) -> None:
    text = (folder / file).read_text()
    (folder / file).write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=r"cluster\.yaml: .*" + says):
        load(folder / "cluster.yaml")


@pytest.mark.parametrize("file", ["gpus.yaml", "costs.json", "my-model.json"])
def test_a_point_is_simulated_again_when_a_file_changes(folder: Path, file: str) -> None:
    point = Point(str(folder / "cluster.yaml"), {})
    before = points._key(point, PointOutcome)
    (folder / file).write_text((folder / file).read_text() + "\n")
    assert points._key(point, PointOutcome) != before


def test_8_bit_weights_of_a_config(folder: Path) -> None:
    whole = load(folder / "cluster.yaml").setup.models[0]
    text = (folder / "my-model.json").read_text()
    fp8 = text.replace("{", '{"quantization_config": {"quant_method": "fp8"}, ', 1)
    (folder / "fp8.json").write_text(fp8)
    half = load(folder / "cluster.yaml", {"models": [{"name": "chat", "shape": "fp8.json"}]})
    assert half.setup.models[0].weight_bytes == whole.weight_bytes / 2
    assert half.setup.models[0].token_bytes == whole.token_bytes
