"""Parameters of a torch model in kvcached pages.

The model is built with its parameters on the meta device, so nothing is allocated for them. They
then become views of mapped pages. At the first load the engine's own weight loaders, which fuse and
shard, write into those pages. The result is saved in the machine's store, and later loads copy it.
Device memory never holds a second copy of a weight.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from kvcached.errors import WeightFileError, WeightMismatchError
from prism.config.schema.units import format_size
from prism.engines.model_memory import ModelMemory
from prism.engines.weights.model_weights import ModelWeights
from prism.errors import ActivationError, SelfCheckError

_PIECE_ELEMENTS = 1 << 24

log = logging.getLogger("prism.engine")


@dataclass(frozen=True, slots=True)
class EngineLoader:
    """Steps in which an engine loads a model."""

    # Builds the model.
    build: Callable[[], nn.Module]
    # Writes the parameters from the model's files.
    read: Callable[[nn.Module], None]
    # Processes the loaded model.
    finish: Callable[[nn.Module], None]


def load(memory: ModelMemory, steps: EngineLoader) -> nn.Module:
    """Returns the model, loaded from the machine's store if it has a valid copy, otherwise from its
    files.

    A copy may be stored only if loading changes nothing but parameters, and if the engine's last
    step does not change them.
    """
    if memory.weights.find_copy():
        try:
            return _load(memory, steps, from_store=True)
        except (WeightFileError, WeightMismatchError) as error:
            memory.weights.discard_copy(str(error))
    return _load(memory, steps, from_store=False)


def _load(memory: ModelMemory, steps: EngineLoader, *, from_store: bool) -> nn.Module:
    memory.timeline.enter("layout")
    model = _build(steps)
    parameters, views = dict(model.named_parameters()), list(parameter_views(model))
    for view in views:
        setattr(view.module, view.name, None)  # no other tensor may refer to the parameter
    memory.lay_out_weights(parameters, back=not from_store)
    place(parameters, memory.weights, keep_content=not from_store)
    for view in views:
        view.attach()
    memory.timeline.enter("weights")
    if from_store:
        memory.load_weights()
        steps.finish(model)
    else:
        _read_files(model, memory.weights, steps)
    check(model, memory.weights)
    memory.timeline.enter("build")
    return model.eval()


def _read_files(model: nn.Module, weights: ModelWeights, steps: EngineLoader) -> None:
    before = {name: tensor.clone() for name, tensor in other_tensors(model)}
    steps.read(model)
    check_written(dict(model.named_parameters()), weights)
    is_plain = _same(before, dict(other_tensors(model)))
    loaded = weights.checksum() if is_plain else 0
    steps.finish(model)
    weights.may_store = is_plain and weights.checksum() == loaded


def _build(steps: EngineLoader) -> nn.Module:
    """Builds the model with parameters on the meta device. A model that itself fills tensors of
    `torch.empty` is built again in real memory; its parameters then exist twice while they move
    into their pages."""
    with EmptyOnMeta():
        model = steps.build()
    views = {id(vars(view.module)[view.name]) for view in parameter_views(model)}
    others = other_tensors(model)
    lost = sorted(name for name, each in others if each.is_meta and id(each) not in views)
    if lost:
        log.warning("cannot build %s on the meta device", ", ".join(lost))
        return steps.build()
    return model


@dataclass(frozen=True, slots=True)
class ParameterView:
    """Attribute of a module that is a view of a parameter."""

    module: nn.Module
    name: str
    parameter: nn.Parameter
    geometry: tuple[torch.Size, tuple[int, ...], int]

    def attach(self) -> None:
        """Makes the attribute a view of the parameter's present memory."""
        setattr(self.module, self.name, self.parameter.data.as_strided(*self.geometry))


def parameter_views(model: nn.Module) -> Iterator[ParameterView]:
    """Yields the plain attributes that are views of parameters, such as reshaped weights of a
    convolution."""
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and id(value._base) in parameters:
                geometry = (value.shape, value.stride(), value.storage_offset())
                yield ParameterView(module, name, parameters[id(value._base)], geometry)


class EmptyOnMeta(TorchFunctionMode):  # type: ignore[misc]
    """Mode in which `torch.empty` creates meta tensors, since its result has no content to lose.
    All other tensors are real: rotary tables, ones of norms, masks."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def place(
    parameters: Mapping[str, nn.Parameter], weights: ModelWeights, *, keep_content: bool
) -> None:
    """Moves every parameter to its place in the pages, with its content if `keep_content`."""
    for name, parameter in parameters.items():
        target = weights[name]
        if parameter.is_meta:
            _materialise(parameter, target)
        else:
            parameter.data = target.copy_(parameter.data) if keep_content else target


def _materialise(parameter: nn.Parameter, target: torch.Tensor) -> None:
    """Gives real memory to a parameter, which stays the same object with its class and its
    attributes (weight loaders)."""
    real = nn.Parameter(target, requires_grad=False)
    real.__class__ = parameter.__class__
    real.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, real)


def check(model: nn.Module, weights: ModelWeights) -> None:
    """Raises SelfCheckError unless every tensor of the model is real and every parameter is at its
    place in kvcached pages."""
    found = dict(model.named_parameters())
    strays = {n: t for n, t in found.items() if not weights.holds(n, t)}
    if strays:
        size_bytes = sum(t.numel() * t.element_size() for t in strays.values())
        raise SelfCheckError(
            f"{format_size(size_bytes)} of parameters are outside of the ledger's pages after"
            f" loading ({_first_names(strays)})"
        )
    lost = [name for name, tensor in other_tensors(model) if tensor.is_meta]
    if lost:
        raise SelfCheckError(f"tensors without memory after loading ({_first_names(lost)})")


def check_written(parameters: Mapping[str, torch.Tensor], weights: ModelWeights) -> None:
    """Raises ActivationError for parameters that loading did not write, or wrote in part only.

    An engine does not notice tensors that a checkpoint lacks, and would serve nonsense. The pages
    were filled with a pattern that is not a valid weight: NaN in the types that have one. For other
    types an unwritten part cannot be distinguished from weights. Values that the model sets before
    loading (ones in norms) count as written.
    """
    empty = [name for name in weights.unwritten() if name in parameters]
    if empty:
        raise ActivationError(
            f"the files do not have values for {_first_names(empty)}; tied embeddings of this"
            " architecture may not be supported: save the checkpoint with every tensor it needs"
        )
    partial = [name for name, tensor in parameters.items() if _has_nan(tensor)]
    if partial:
        raise ActivationError(
            f"the files have values for only a part of {_first_names(partial)}, or NaN values:"
            " save the checkpoint with every tensor it needs"
        )


def _has_nan(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has a NaN. Checks it in pieces: a mask over a large embedding would
    exceed the memory that torch may allocate."""
    if not tensor.is_floating_point():
        return False
    pieces = tensor.detach().flatten().split(_PIECE_ELEMENTS)
    return any(bool(_nans(piece).any()) for piece in pieces)


def _nans(piece: torch.Tensor) -> torch.Tensor:
    """Returns a mask of NaNs, also for one-byte types, which `torch.isnan` does not support."""
    return torch.isnan(piece if piece.element_size() > 1 else piece.to(torch.float32))


def other_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of a model that are not parameters: buffers and plain attributes of
    modules."""
    yield from model.named_buffers()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}", value


def _same(before: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor]) -> bool:
    return before.keys() == now.keys() and all(torch.equal(before[n], now[n]) for n in now)


def _first_names(names: Any) -> str:
    return ", ".join(sorted(names)[:3])
