"""Quantised weights: in pages as SGLang left them, and copied from the store like others."""

from __future__ import annotations

import gc
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kvcached
from prism.engines.core import EngineContext
from prism.messages.engine import ActivateEngine
from prism.messages.model_spec import ModelSpec
from prism.models.files import inspect_model
from tests.engines.harness import request
from tests.sglang.conftest import DEVICE, PAGE_BYTES, STATIC_BYTES, config_of, run
from tests.sglang.models import LLAMA, TIE, gap_of, network, path_of, prompts

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("preloaded")]
METHODS = ("torch_packed", "torch_scaled")
TOKENS = 12


@pytest.fixture
def core(tmp_path: Path) -> Iterator[Any]:
    with tempfile.TemporaryDirectory(prefix="prism-") as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from prism.engines.sglang import create

        config = config_of(Path(directory), 256 << 20)
        engine = msgspec.structs.replace(config.engine, weight_store=str(tmp_path / "store"))
        config = msgspec.structs.replace(config, engine=engine)
        core: Any = create(EngineContext("e0", DEVICE, config))
        yield core
        core.close()
        kvcached.Device.unlink(config.namespace, DEVICE)


@pytest.fixture
def make(
    preloaded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], tuple[ModelSpec, Path]]:
    """Returns a function that quantises the tiny Llama by a method of the tests. It returns the
    model, and the path of one with the same weights in float32."""
    from sglang.srt.layers import linear, quantization

    from tests.sglang.quantized import METHODS, quantized

    sharding = [*linear.WEIGHT_LOADER_V2_SUPPORTED, "Packed", "Scaled"]
    monkeypatch.setattr(linear, "WEIGHT_LOADER_V2_SUPPORTED", sharding)

    def made(method: str) -> tuple[ModelSpec, Path]:
        monkeypatch.setitem(quantization.QUANTIZATION_METHODS, method, METHODS[method])
        monkeypatch.setitem(quantization.CPU_QUANTIZATION_METHODS, method, METHODS[method])
        path, plain = quantized(path_of(LLAMA), tmp_path, method)
        shape = inspect_model(path, method).shape("float32", None)
        spec = ModelSpec(name=method, path=str(path), slo_ttft_s=2, slo_tpot_s=1, **shape)
        return spec, plain

    return made


def left(core: Any) -> dict[str, Any]:
    """Returns the model's tensors that no build makes, by name."""
    from prism.engines.weights.loaded_state import whole
    from prism.engines.weights.tensor_slots import tensors

    model = core._active.scheduler.tp_worker.model_runner.model
    pages = core._active.memory.weights.pages
    found = {slot.full_name: tensor for slot, tensor in tensors(whole(model))}
    return {name: tensor for name, tensor in found.items() if pages.holds(tensor)}


def activate_twice(core: Any, spec: ModelSpec, reference: Any, tie: float = TIE) -> None:
    """Activates from the files, then from the store. The engine's weights are those counted."""
    answers, prompt = [], [(7 * i) % 1000 + 16 for i in range(50)]
    for turn in range(2):
        activated = core.activate(ActivateEngine(spec))
        chunks, failures = run(core, [request(f"r{turn}", spec.name, prompt, TOKENS)])
        assert not failures
        answers.append([token for chunk in chunks[f"r{turn}"] for token in chunk.token_ids])
        assert gap_of(reference, prompt, answers[-1]) < tie
        assert bool(activated.link_bytes) == (turn > 0)
        check_ledger(core, activated)
        kept = core._active.memory.weights.pages.specs.values()
        assert sum(each.size_bytes for each in kept) == spec.weight_bytes
        core.deactivate()
        gc.collect()
        assert (core._device.usage().reserved_bytes, core._device.resident_bytes()) == (0, 0)
    assert len(answers[0]) == TOKENS
    assert answers[0] == answers[1]


@pytest.mark.parametrize("method", METHODS)
def test_each_activation_answers_as_the_weights_in_float32(
    core: Any, make: Any, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Activates from the files, then twice from the store. The packed weights' zeros take more once
    they are repacked, which the engine reports."""
    import torch

    spec, plain = make(method)
    [prompt], reference = prompts(LLAMA, 1, (60, 60)), network(plain)
    first: dict[str, Any] = {}
    for turn in range(3):
        activated = core.activate(ActivateEngine(spec))
        chunks, failures = run(core, [request(f"r{turn}", method, prompt, TOKENS)])
        assert not failures
        tokens = [token for chunk in chunks[f"r{turn}"] for token in chunk.token_ids]
        assert len(tokens) == TOKENS
        assert gap_of(reference, prompt, tokens) < TIE
        tensors = {name: tensor.clone() for name, tensor in left(core).items()}
        first = first or tensors
        assert tensors.keys() == first.keys()
        assert all(torch.equal(bytes_of(tensors[n]), bytes_of(first[n])) for n in first)
        assert bool(activated.link_bytes) == (turn > 0)
        check_ledger(core, activated)
        core.deactivate()
        gc.collect()
        assert (core._device.usage().reserved_bytes, core._device.resident_bytes()) == (0, 0)
    counters = core._access.store.counters()
    assert (counters.made_entries, counters.found_entries) == (1, 2)
    assert ("its weights take" in caplog.text) == (method == "torch_packed")


def bytes_of(tensor: Any) -> Any:
    import torch

    return tensor.contiguous().flatten().view(torch.uint8)


def check_ledger(core: Any, activated: Any) -> None:
    """Compares the leases with the memory of the model's tensors, each byte once."""
    from prism.engines.weights.tensor_slots import extent_of

    pages, usage = core._active.memory.weights.pages, core._device.usage()
    assert usage.static_bytes == activated.static_bytes == pages.size_bytes + STATIC_BYTES
    extents = {extent_of(tensor) for tensor in left(core).values()}
    held = sum(end - start for start, end in extents)
    padding = 256 * len(extents)  # each tensor begins at a multiple of 256 bytes
    assert 0 <= pages.size_bytes - held < padding + (1 + len(pages.arenas)) * PAGE_BYTES


@dataclass
class Peak:
    """Largest memory during a load."""

    ledger_bytes: int = 0
    torch_bytes: list[int] = field(default_factory=list)  # outside of the pages


@pytest.mark.parametrize("method", METHODS)
def test_a_cold_load_needs_a_module_more_than_its_result(
    core: Any, make: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts leases, and loaded tensors in torch's memory, before each move into pages."""
    from prism.engines import parameters
    from prism.engines.weights.weight_pages import WeightPages

    spec, _ = make(method)
    peak, stock_settle, stock_add = Peak(), parameters._settle, WeightPages.add

    def settle(part: Any, model: Any, memory: Any, built: Any, elsewhere: Any) -> None:
        found = built.loaded(parameters.holders(part.modules))
        outside = [(slot, t) for slot, t in found if not memory.weights.pages.holds(t)]
        peak.torch_bytes.append(sum(b.size_bytes for b in parameters.blocks_of(outside)))
        assert peak.torch_bytes[-1] <= part.size_bytes + (64 << 10)
        stock_settle(part, model, memory, built, elsewhere)

    def add(pages: Any, specs: Any) -> None:
        stock_add(pages, specs)
        peak.ledger_bytes = max(peak.ledger_bytes, core._device.usage().static_bytes)

    monkeypatch.setattr(parameters, "_settle", settle)
    monkeypatch.setattr(WeightPages, "add", add)
    activated = core.activate(ActivateEngine(spec))
    largest = max(tensor.nbytes for n, tensor in left(core).items() if "_proj" in n)
    assert len(peak.torch_bytes) > 4
    assert peak.ledger_bytes - activated.static_bytes <= 1.25 * largest
    core.deactivate()


def test_a_copy_of_a_model_that_is_built_otherwise_is_not_used(
    core: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.sglang.quantized import Packed

    spec, _ = make("torch_packed")
    first = core.activate(ActivateEngine(spec)).fingerprint
    core.deactivate()
    stock = Packed.create_weights

    def create(self: Any, layer: Any, *arguments: Any, **named: Any) -> None:
        stock(self, layer, *arguments, **named)
        layer.more = True

    monkeypatch.setattr(Packed, "create_weights", create)
    activated = core.activate(ActivateEngine(spec))
    assert (activated.fingerprint, activated.link_bytes) == (first, {})
    core.deactivate()
    assert core.activate(ActivateEngine(spec)).link_bytes
    core.deactivate()
    assert core._access.store.counters().made_entries == 2


def test_a_load_that_changes_a_kernel_beyond_description_is_not_copied(
    core: Any, make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tests.sglang.quantized import Kernel, Packed

    spec, _ = make("torch_packed")
    stock = Packed.process_weights_after_loading

    def process(self: Any, layer: Any) -> None:
        stock(self, layer)
        layer.kernel.inner = Kernel()

    monkeypatch.setattr(Packed, "process_weights_after_loading", process)
    answers = set()
    for _ in range(2):
        activated = core.activate(ActivateEngine(spec))
        answers.add(activated.fingerprint)
        assert activated.link_bytes == {}
        check_ledger(core, activated)
        core.deactivate()
    assert len(answers) == 1
    assert "qkv_proj.kernel.inner is another Kernel" in caplog.text
