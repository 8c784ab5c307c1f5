"""Placement of a model's weights: in pages of the ledger, once, freed with the model."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kvcached
from prism.engines.core import EngineContext
from prism.errors import ActivationError, SelfCheckError
from prism.messages.engine import ActivateEngine
from tests.sglang.conftest import DEVICE, PAGE_BYTES, STATIC_BYTES, config_of
from tests.sglang.models import GPT2, LLAMA, MLA, MOE, QWEN3, path_of, spec_of

pytestmark = pytest.mark.sglang
CAPACITY_BYTES = 256 << 20


@pytest.fixture(scope="module")
def core() -> Iterator[Any]:
    """Yields an engine in this process, so that tests can inspect its model."""
    with tempfile.TemporaryDirectory(prefix="prism-") as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's own, of its imports
        from prism.engines.sglang import create, preload

        preload()
        config = config_of(Path(directory), CAPACITY_BYTES)
        core = create(EngineContext("e0", DEVICE, config))
        yield core
        core.close()
        kvcached.Device.unlink(config.namespace, DEVICE)


@pytest.fixture(autouse=True)
def _quiet(core: Any) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
        core.deactivate()
    usage = core._device.usage()
    assert (usage.reserved_bytes, core._device.resident_bytes()) == (0, 0)


def model_of(core: Any) -> Any:
    return core._active.scheduler.tp_worker.model_runner.model


@pytest.mark.parametrize("name", [LLAMA, QWEN3, GPT2, MLA.name])
def test_every_parameter_lies_in_the_ledgers_pages(core: Any, name: str) -> None:
    """Weights include what SGLang derives from them (the up-projections of latents)."""
    activated = core.activate(ActivateEngine(spec_of(name)))
    memory = core._active.memory
    parameters = dict(model_of(core).named_parameters())
    assert parameters
    assert all(memory.weights.pages.holds(p) for p in parameters.values())
    size_bytes = memory.weights.size_bytes
    arenas = len(memory.weights.pages.arenas)
    assert arenas == (2 if name == MLA.name else 1)
    assert 0 <= size_bytes - spec_of(name).weight_bytes < (1 + arenas) * PAGE_BYTES
    usage = core._device.usage()
    assert usage.static_bytes == activated.static_bytes == size_bytes + STATIC_BYTES
    assert core._device.resident_bytes() <= size_bytes + activated.reserve_bytes
    assert list(activated.stages_s) == [
        *("shrink", "reserve", "store", "layout", "weights", "build", "warm_up", "keep"),
        "total",
    ]
    *stages, total = activated.stages_s.values()
    assert 0.75 * total < sum(stages) < total  # whatever else this machine does meanwhile


def test_a_shared_parameter_is_placed_once(core: Any) -> None:
    core.activate(ActivateEngine(spec_of(GPT2)))
    model = model_of(core)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_the_fingerprint_is_the_models_own(core: Any) -> None:
    first = core.activate(ActivateEngine(spec_of(LLAMA))).fingerprint
    core.deactivate()
    assert first
    again = core.activate(ActivateEngine(spec_of(LLAMA), fingerprint=first))
    assert again.fingerprint == first


def test_another_answer_than_expected_fails_the_self_check(core: Any) -> None:
    with pytest.raises(SelfCheckError, match="on a fresh engine"):
        core.activate(ActivateEngine(spec_of(LLAMA), fingerprint=(1, 2)))


def test_a_parameter_outside_of_the_pages_fails_the_self_check(
    core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prism.engines import parameters

    def lose(model: Any, *_: object) -> None:
        weight = model.model.norm.weight
        weight.data = weight.data.clone()

    monkeypatch.setattr(parameters, "_move_rest", lose)
    with pytest.raises(SelfCheckError, match="outside of the ledger's pages"):
        core.activate(ActivateEngine(spec_of(LLAMA)))


def test_weights_larger_than_the_specification_said_need_room_too(core: Any) -> None:
    """Reserves by the specification; the layout follows the model itself."""
    true = spec_of(LLAMA)
    told = msgspec.structs.replace(true, weight_bytes=1)
    lacking = 4 * PAGE_BYTES
    reserve_bytes = core.activate(ActivateEngine(told)).reserve_bytes
    core.deactivate()
    with core._device.client("hog") as hog:
        share_bytes = core._context.config.engine.static_bytes
        needed = -(-true.weight_bytes // PAGE_BYTES) * PAGE_BYTES + share_bytes + reserve_bytes
        hog.reserve_static(CAPACITY_BYTES - needed + lacking, "test")
        with pytest.raises(ActivationError) as refused:
            core.activate(ActivateEngine(told))
        assert refused.value.missing_bytes == lacking
    core.activate(ActivateEngine(told))


def test_a_checkpoint_that_lacks_a_matrix_is_refused(core: Any, tmp_path: Path) -> None:
    """Models of SGLang's Qwen3-MoE ignore tie_word_embeddings and would answer with token 0."""
    from safetensors.torch import load_file, save_file

    path = tmp_path / "model"
    shutil.copytree(path_of(MOE.name), path)
    tensors = load_file(path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ActivationError, match=r"do not have values for lm_head.weight"):
        core.activate(ActivateEngine(msgspec.structs.replace(spec_of(MOE.name), path=str(path))))
