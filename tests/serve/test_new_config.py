"""`prism-serve init`, and the values that a shell completes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import kvcached
from kvcached import GpuFacts
from kvcached.errors import BackendUnavailableError, NoDriverError, UnknownDeviceError
from prism.cli.exit_codes import run
from prism.cli.serve import app
from prism.config.resolve import load
from tests.frontend.tiny_model import make_whole_model

GIB = 1 << 30


def no_driver(device: str) -> GpuFacts:
    raise NoDriverError("no driver")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a folder with one model that can be served and one that cannot."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    make_whole_model(tmp_path / ".cache" / "models" / "Good One")
    bad = tmp_path / ".cache" / "models" / "bad"
    bad.mkdir()
    (bad / "config.json").write_text('{"architectures": ["Foo"]}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kvcached, "gpu_facts", no_driver)
    return tmp_path


def init(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        run(lambda: app(["init", *arguments]), "error")
    return int(ended.value.code or 0)


def test_a_machine_without_a_gpu(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert init() == 0
    said = capsys.readouterr()
    assert (folder / "prism.yaml").read_text() == said.out
    assert "left out: .cache/models/bad: models[0].path: " in said.err
    config = load(Path("prism.yaml"))
    assert [(model.name, model.pinned_device) for model in config.models] == [("good-one", None)]
    assert [device.name for device in config.devices] == ["host:0"]
    assert not list(folder.glob(".*.draft"))
    assert init() == 2
    assert "prism.yaml: exists; choose another name, or replace it" in capsys.readouterr().err
    assert init("--force") == 0


def test_gpus_are_listed_with_what_is_free(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def facts(device: str) -> GpuFacts:
        number = int(device.removeprefix("cuda:"))
        if number > 2:
            raise UnknownDeviceError(device)
        return GpuFacts("NVIDIA H200", "GPU", "580", number == 1, 140 * GIB, 139 * GIB)

    monkeypatch.setattr(kvcached, "gpu_facts", facts)
    # It needs SGLang's CUDA kernels.
    monkeypatch.setattr("prism.engines.sglang.platform.gpu._NEEDS", ())
    assert init("gpus.yaml") == 0
    text = capsys.readouterr().out
    assert "# NVIDIA H200, 139GiB of 140GiB are free" in text
    names = [device["name"] for device in yaml.safe_load(text)["devices"]]
    assert names == ["cuda:0", "cuda:2"], "a GPU that is split into MIG instances is left out"
    assert load(Path("gpus.yaml")).devices[0].capacity_bytes == pytest.approx(125 * GIB, rel=0.01)


def test_models_of_the_hubs_cache_and_named_ones(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repo = folder / "hub" / "models--org--Own-1B"
    shutil.copytree(folder / ".cache" / "models" / "Good One", repo / "snapshots" / ("0" * 40))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    assert init() == 0
    assert [m.name for m in load(Path("prism.yaml")).models] == ["good-one", "own-1b"]
    assert init("two.yaml", "--model", "org/Own-1B", "--model", ".cache/models/Good One") == 0
    assert [m.name for m in load(Path("two.yaml")).models] == ["own-1b", "good-one"]
    capsys.readouterr()
    assert init("three.yaml", "--model", "org/Other") == 2
    assert "run prism-models pull org/Other" in capsys.readouterr().err
    assert not (folder / "three.yaml").exists()


def test_unlike_gpus_and_a_broken_driver_are_not_taken_for_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(device: str) -> GpuFacts:
        assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        raise BackendUnavailableError("NVML answers with 15")

    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    monkeypatch.setattr(kvcached, "gpu_facts", fail)
    assert init() == 2
    assert "cuda:0: NVML answers with 15" in capsys.readouterr().err


def test_names_and_paths(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = folder / ".cache" / "models" / "Good One"
    (folder / "link").symlink_to(model)
    for name in ("123", "null", "模型"):
        shutil.copytree(model, folder / "sub" / name)
    given = [f"--model={each}" for each in ("link", "sub/123", "sub/null", "sub/模型")]
    assert init("sub/x.yaml", *given) == 0, capsys.readouterr().err
    found = load(Path("sub/x.yaml")).models
    assert [model.name for model in found] == ["link", "123", "null", "model"]
    assert f'path: "{folder}/link"}}' in (folder / "sub" / "x.yaml").read_text()
    assert init("sub", "--force") == 2
    assert "sub: is a folder; give a file, such as sub/prism.yaml" in capsys.readouterr().err


def test_a_machine_without_models(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(folder / ".cache" / "models" / "Good One")
    assert init() == 2
    said = capsys.readouterr().err
    assert "no model was found that can be served here (.cache/models/bad: " in said
    assert "download one with prism-models pull ORG/NAME" in said


@pytest.mark.parametrize(
    ("program", "words", "expected"),
    [
        ("prism-serve", "prism-serve evict go", ["good-one"]),
        ("prism-serve", "prism-serve migrate good-one h", ["host:0"]),
        ("prism-replay", "prism-replay compare --policies prism,stat", ["prism,static"]),
        ("prism-sim", "prism-sim plan --policies mux", ["muxserve", "muxserve++"]),
    ],
)
def test_completion(folder: Path, program: str, words: str, expected: list[str]) -> None:
    devices = [{"name": "host:0", "capacity": "64MiB"}]
    models = [{"name": "good-one", "path": ".cache/models/Good One"}]
    (folder / "prism.yaml").write_text(yaml.safe_dump({"devices": devices, "models": models}))
    variable = f"_{program.upper().replace('-', '_')}_COMPLETE"
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    done = subprocess.run(
        [Path(sys.executable).with_name(program)],
        env={**os.environ, **asked, variable: "complete_bash", "TMPDIR": str(folder)},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == expected, done.stderr
