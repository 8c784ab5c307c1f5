"""Loads of a small torch model whose modules are repacked, on a host device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import kvcached
from kvcached.errors import WeightFileError, WeightMismatchError
from prism.engines import parameters
from prism.engines.weights.loaded_state import BuiltModel, LoadedState, NotDescribedError, whole
from prism.engines.weights.model_weights import ModelWeights, StoreAccess
from prism.engines.weights.tensor_slots import blocks_of
from prism.errors import SelfCheckError

PAGE = 4096
WIDTH = 64


class Kernel:
    """Object of a layer that holds a tensor."""

    workspace: torch.Tensor | None = None


class Layer(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(WIDTH), requires_grad=False)
        self.register_buffer("table", torch.arange(8.0))
        self.kernel = Kernel()
        self.seed = seed
        self.scale: torch.Tensor | None = None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.empty(WIDTH), requires_grad=False)
        self.layers = nn.ModuleList(Layer(seed) for seed in range(4))
        self.gone = Layer(9)


def read(model: nn.Module) -> None:
    """Writes all parameters. Removes a module, after it was used."""
    for index, parameter in enumerate(model.parameters()):
        parameter.data.copy_(torch.arange(parameter.numel()).view(parameter.shape) + index)
    model.first_bias = model.layers[0].bias  # of another module
    model.norm.of_loads = True
    del model.gone


def repack(layer: Any) -> None:
    """Makes other types and shapes, views and values of a layer's weights."""
    half = layer.weight.data.to(torch.float16)
    layer.weight = nn.Parameter(half.t(), requires_grad=False)
    layer.again = layer.weight[:2]  # memory of the weight
    layer.kernel.workspace = torch.zeros(16, dtype=torch.int32)
    layer.kernel.dtype = torch.float16
    layer.nothing = nn.Parameter(torch.empty(0), requires_grad=False)
    layer.seed += 1
    del layer.table


STEPS = parameters.EngineLoader(
    build=Model,
    read=read,
    modules=lambda model: [each for each in model.modules() if isinstance(each, Layer)],
    finish=repack,
    repacks=lambda _: True,
)


@pytest.fixture
def memory(namespace: str) -> Iterator[Any]:
    device = kvcached.Device.open(
        "host:0", capacity_bytes=1 << 20, page_bytes=PAGE, namespace=namespace
    )
    with device.client("e0") as client:
        spec: Any = SimpleNamespace(name="m")
        weights = ModelWeights(client, StoreAccess(), spec)

        def lay_out(*parts: Any, back: bool) -> None:
            weights.lay_out(*parts)
            if back:
                weights.back()

        yield SimpleNamespace(
            weights=weights,
            device=device,
            timeline=SimpleNamespace(enter=lambda _: None),
            lay_out_weights=lay_out,
            replace_weights=weights.pages.replace,
            compare_weights=lambda: None,
        )
        weights.release()
    device.destroy()


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns tensors by name, with those of kernels."""
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    for index, layer in enumerate(model.layers):
        found |= {f"{index}.workspace": layer.kernel.workspace, f"{index}.again": layer.again}
    return found | {"first_bias": model.first_bias}


def expected() -> nn.Module:
    """Returns the loaded model in torch's memory."""
    model = Model()
    read(model)
    for layer in model.layers:
        repack(layer)
    return model


def check(model: nn.Module) -> None:
    found, right = tensors_of(model), tensors_of(expected())
    assert found.keys() == right.keys()
    for name, tensor in right.items():
        assert torch.equal(found[name], tensor), name
        assert (found[name].dtype, found[name].stride()) == (tensor.dtype, tensor.stride()), name
    layer = model.layers[2]
    assert (layer.seed, layer.kernel.dtype) == (3, torch.float16)
    assert not hasattr(model, "gone")
    assert model.first_bias is model.layers[0].bias
    assert layer.again.data_ptr() == layer.weight.data_ptr()
    assert isinstance(layer.weight, nn.Parameter)
    assert model.norm.of_loads is True


def test_pages_hold_what_the_engine_left_and_nothing_else(memory: Any) -> None:
    """Loads layers that shrink to half, and removes one."""
    model = parameters.load(memory, STEPS)
    check(model)
    layer_bytes = 2 * WIDTH * WIDTH + 4 * WIDTH + 16 * 4
    pages = memory.weights.pages
    held = sum(spec.size_bytes for spec in pages.specs.values())
    assert held == 4 * layer_bytes + 4 * WIDTH
    usage = memory.device.usage()
    assert usage.static_bytes == pages.size_bytes == memory.device.resident_bytes()
    assert all(pages.holds(tensor) for tensor in tensors_of(model).values())


def test_a_copy_is_the_loaded_model(memory: Any) -> None:
    loaded = parameters.load(memory, STEPS)
    state, contents = memory.weights._state, memory.weights._contents
    copied = LoadedState.from_bytes(state.to_bytes())
    assert copied == state
    built, _ = parameters._build(STEPS)
    assert {name: tensor.nbytes for name, tensor in copied.memory().items()} == {
        name: len(content) for name, content in contents.items()
    }
    copied.apply(built, {name: content.clone() for name, content in contents.items()})
    check(built)
    assert whole(built).keys() == whole(loaded).keys()
    del loaded, contents


def test_another_model_or_a_damaged_state_is_an_error(memory: Any) -> None:
    parameters.load(memory, STEPS)
    state, contents = memory.weights._state, memory.weights._contents
    other = Model()
    other.layers[0].weight = nn.Parameter(torch.empty(WIDTH, 2 * WIDTH))
    with pytest.raises(WeightMismatchError, match="a model that is built otherwise"):
        state.apply(other, contents)
    with pytest.raises(WeightFileError, match="the stored state of a model is damaged"):
        LoadedState.from_bytes(state.to_bytes()[:-5])


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "object": (lambda m: setattr(m.layers[1], "kernel", Kernel()), "1.kernel is another Kernel"),
    "function": (lambda m: setattr(m.layers[1], "run", print), r"layers.1.run is another builtin"),
    "list": (lambda m: setattr(m, "parts", [object()]), "parts is another list"),
    "mark": (lambda m: setattr(m.norm, "shuffled", Kernel()), "norm has the attribute shuffled"),
    "class": (
        lambda m: setattr(m, "odd", torch.ones(1).as_subclass(type("Odd", (torch.Tensor,), {}))),
        "odd has the class .*:Odd, which cannot be imported",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_cannot_be_described_is_named(name: str) -> None:
    change, says = CHANGES[name]
    model = Model()
    built = BuiltModel(model)
    change(model)
    with pytest.raises(NotDescribedError, match=says):
        LoadedState.of(model, built, blocks_of(built.loaded(whole(model))))


def test_a_tensor_that_loading_leaves_as_it_was_built_is_not_loaded() -> None:
    model = Model()
    built = BuiltModel(model)
    assert built.has_same_tensors(model)
    model.layers[0].table += 1
    [(slot, _)] = [p for p in built.loaded(whole(model)) if not isinstance(p[1], nn.Parameter)]
    assert slot.full_name == "layers.0.table"
    assert not built.has_same_tensors(model)


def test_a_parameter_outside_of_the_pages_is_an_error(memory: Any) -> None:
    model = parameters.load(memory, STEPS)
    model.norm.data = model.norm.data.clone()
    with pytest.raises(SelfCheckError, match=r"256B of parameters are outside .* \(norm\)"):
        parameters.check(model, memory.weights.pages)


def test_a_buffer_that_is_a_view_follows_its_parameter() -> None:
    model = nn.Conv1d(4, 4, 3)
    model.register_buffer("flat", model.weight.view(4, -1), persistent=False)
    views = parameters.detach(model)
    assert model.flat is None
    model.weight.data = torch.ones_like(model.weight)
    parameters.attach(views)
    assert torch.equal(model.flat, torch.ones(4, 12))
    assert model.flat.data_ptr() == model.weight.data_ptr()
