"""Weights of a torch model in kvcached pages.

The model is built with its parameters on the meta device, so nothing is allocated for them. They
then become views of mapped pages. At the first load the engine's own weight loaders, which fuse and
shard, write into those pages. The engine then processes modules one by one, and what it makes of a
module's weights (repacked, transposed, derived tensors) moves into pages before the next one. The
result is saved in the machine's store, and later loads copy it. Device memory never holds a second
copy of a weight, except of the modules that are being processed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from kvcached.errors import WeightFileError, WeightMismatchError
from prism.config.schema.units import format_size
from prism.engines.model_memory import ModelMemory
from prism.engines.weights.loaded_state import (
    BuiltModel,
    LoadedState,
    NotDescribedError,
    materialise,
    whole,
)
from prism.engines.weights.model_weights import ModelWeights
from prism.engines.weights.tensor_slots import (
    Slot,
    blocks_of,
    extent_of,
    holders,
    tensors,
)
from prism.engines.weights.weight_pages import WeightPages
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
    # Returns the modules to process after that, in order.
    modules: Callable[[nn.Module], Sequence[nn.Module]]
    # Processes one of them.
    finish: Callable[[nn.Module], None]
    # Returns whether this may replace the module's tensors by others (quantised weights).
    repacks: Callable[[nn.Module], bool] = lambda _: False


@dataclass(slots=True)
class _Part:
    """Modules that the engine repacks, and their parameters: memory that is replaced at once."""

    modules: dict[str, nn.Module] = field(default_factory=dict)  # by path
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters.values())

    @property
    def last(self) -> nn.Module:
        return list(self.modules.values())[-1]

    def still_in(self, model: nn.Module) -> dict[str, nn.Module]:
        """Returns the modules that loading did not remove from the model."""
        here = dict(model.named_modules())
        return {path: module for path, module in self.modules.items() if here.get(path) is module}


def load(memory: ModelMemory, steps: EngineLoader) -> nn.Module:
    """Returns the model, loaded from the machine's store if it has a valid copy, otherwise from its
    files.

    The copy has the tensors as the engine left them, and says what else loading changed. A model
    with a change that cannot be described is not stored.
    """
    model = _load_copy(memory, steps) if memory.weights.find_copy() else None
    if model is None:
        model = _load_files(memory, steps)
    check(model, memory.weights.pages)
    memory.weights.release_reserve()
    memory.compare_weights()
    memory.timeline.enter("build")
    return model.eval()


# --- from the store --------------------------------------------------------------------------


def _load_copy(memory: ModelMemory, steps: EngineLoader) -> nn.Module | None:
    """Returns the model with the copy's weights, None if the copy cannot be used."""
    try:
        memory.timeline.enter("layout")
        (model, views), state = _build(steps), memory.weights.stored_state()
        if state is None:
            parameters = dict(model.named_parameters())
            memory.lay_out_weights(parameters, back=False)
            place(parameters, memory.weights.pages, keep_content=False)
        else:
            memory.lay_out_weights(state.memory(), back=False)
            state.apply(model, {name: memory.weights.pages.bytes_of(name) for name in state.blocks})
        memory.timeline.enter("weights")
        memory.load_weights()
        for module in steps.modules(model) if state is None else ():
            steps.finish(module)
        attach(views)
        return model
    except (WeightFileError, WeightMismatchError) as error:
        memory.weights.release()
        memory.weights.discard_copy(str(error))
        return None


# --- from the files --------------------------------------------------------------------------


def _load_files(memory: ModelMemory, steps: EngineLoader) -> nn.Module:
    pages = memory.weights.pages
    memory.timeline.enter("layout")
    model, views = _build(steps)
    parameters = dict(model.named_parameters())
    parts = _parts(model, steps)
    repacked = {name for part in parts for name in part.parameters}
    rest = {name: tensor for name, tensor in parameters.items() if name not in repacked}
    memory.lay_out_weights(rest, *(part.parameters for part in parts), back=True)
    place(parameters, pages, keep_content=True)
    memory.timeline.enter("weights")
    built = BuiltModel(model)
    steps.read(model)
    check_written(parameters, pages)
    loaded = 0 if parts else pages.checksum()
    _finish(model, memory, steps, parts, built)
    moved = _move_rest(model, memory, built)
    if parts or moved or not built.has_same_tensors(model) or pages.checksum() != loaded:
        _describe(model, memory.weights, built)
    else:
        memory.weights.may_store = True
    attach(views)
    return model


def _parts(model: nn.Module, steps: EngineLoader) -> list[_Part]:
    """Returns the modules that the engine repacks, in its order, in parts as large as the largest
    of them: a part's repacked tensors exist besides the memory that they will replace."""
    parameters = dict(model.named_parameters())
    paths = {id(module): path for path, module in model.named_modules()}
    alone = []
    for module in filter(steps.repacks, steps.modules(model)):
        path = paths[id(module)]
        names = [f"{path}.{name}" for name in module._parameters]
        own = {name: parameters[name] for name in names if name in parameters}
        alone.append(_Part({path: module}, own))
    size_bytes = max((part.size_bytes for part in alone), default=0)
    parts: list[_Part] = []
    for part in alone:
        if not parts or parts[-1].size_bytes + part.size_bytes > size_bytes:
            parts.append(_Part())
        parts[-1].modules |= part.modules
        parts[-1].parameters |= part.parameters
    return parts


def _finish(
    model: nn.Module,
    memory: ModelMemory,
    steps: EngineLoader,
    parts: list[_Part],
    built: BuiltModel,
) -> None:
    """Lets the engine process the modules, and moves each part's tensors into pages as soon as its
    last module is processed."""
    elsewhere = list(tensors(whole(model))) if parts else []
    pending = list(parts)
    for module in steps.modules(model):
        steps.finish(module)
        if pending and module is pending[0].last:
            _settle(pending.pop(0), model, memory, built, elsewhere)
    for part in pending:  # their last modules were removed by the load
        _settle(part, model, memory, built, elsewhere)


def _settle(
    part: _Part,
    model: nn.Module,
    memory: ModelMemory,
    built: BuiltModel,
    elsewhere: Sequence[tuple[Slot, torch.Tensor]],
) -> None:
    """Lays out the memory of a part anew if its tensors are no longer those that were laid out.
    Tensors of other modules that are over this memory (aliases) move too."""
    pages = memory.weights.pages
    before = {extent_of(pages.bytes_of(name)) for name, t in part.parameters.items() if t.numel()}
    found = holders(part.still_in(model))
    aliases = [(s, t) for s, t in elsewhere if s.path not in found and _starts_in(t, before)]
    blocks = blocks_of([*built.loaded(found, pages.device), *aliases])
    if {(block.start, block.end) for block in blocks} == before:
        return
    contents = [
        block.content().clone() if pages.holds(block.first) else block.content() for block in blocks
    ]
    if pages.device.type == "cuda":
        torch.cuda.synchronize()  # nothing may use the pages that are freed
    memory.replace_weights(part.parameters, {block.name: block.shape() for block in blocks})
    for block in reversed(blocks):
        block.move(pages.bytes_of(block.name).copy_(contents.pop()))


def _starts_in(tensor: torch.Tensor, extents: set[tuple[int, int]]) -> bool:
    start, _ = extent_of(tensor)
    return any(first <= start < last for first, last in extents)


def _move_rest(model: nn.Module, memory: ModelMemory, built: BuiltModel) -> bool:
    """Moves loaded tensors that are still outside of the pages into pages, by way of the host: the
    device never holds them twice. Returns whether there were any."""
    pages = memory.weights.pages
    found = built.loaded(whole(model), pages.device)
    blocks = blocks_of([(slot, tensor) for slot, tensor in found if not pages.holds(tensor)])
    if not blocks:
        return False
    contents = [block.content().cpu() for block in blocks]
    shapes = {block.name: block.shape() for block in blocks}
    for block in blocks:
        block.forget()
    torch.cuda.empty_cache()
    memory.weights.release_reserve()
    memory.replace_weights((), shapes)
    for block, content in zip(blocks, contents, strict=True):
        block.move(pages.bytes_of(block.name).copy_(content))
    return True


def _describe(model: nn.Module, weights: ModelWeights, built: BuiltModel) -> None:
    """Makes a copy of the model storable, if its changes can be described."""
    blocks = blocks_of(built.loaded(whole(model)))
    try:
        state = LoadedState.of(model, built, blocks)
        weights.describe(state, {block.name: block.content() for block in blocks})
    except NotDescribedError as error:
        log.warning("the weights are read from files at each activation: %s", str(error))


def _build(steps: EngineLoader) -> tuple[nn.Module, list[ParameterView]]:
    """Builds the model with parameters on the meta device, without attributes that are views of
    them. A model that itself fills tensors of `torch.empty` is built again in real memory; its
    parameters then exist twice while they move into their pages."""
    with EmptyOnMeta():
        model = steps.build()
    views = detach(model)
    lost = sorted(name for name, tensor in other_tensors(model) if tensor.is_meta)
    if lost:
        log.warning("cannot build %s on the meta device", ", ".join(lost))
        model = steps.build()
        views = detach(model)
    return model, views


@dataclass(frozen=True, slots=True)
class ParameterView:
    """Attribute of a module that is a view of a parameter, such as the reshaped weight of a
    convolution."""

    module: nn.Module
    name: str
    parameter: nn.Parameter
    geometry: tuple[torch.Size, tuple[int, ...], int]


def detach(model: nn.Module) -> list[ParameterView]:
    """Sets the attributes and buffers that are views of parameters to None, since no other tensor
    may refer to a parameter that gets other memory. Returns them for `attach`."""
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    views = []
    for module in model.modules():
        for name, value in (*vars(module).items(), *module._buffers.items()):
            if isinstance(value, torch.Tensor) and id(value._base) in parameters:
                geometry = (value.shape, value.stride(), value.storage_offset())
                views.append(ParameterView(module, name, parameters[id(value._base)], geometry))
    for view in views:
        setattr(view.module, view.name, None)
    return views


def attach(views: Iterable[ParameterView]) -> None:
    """Makes the attributes views of their parameters' present memory."""
    for view in views:
        setattr(view.module, view.name, view.parameter.data.as_strided(*view.geometry))


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
    parameters: Mapping[str, nn.Parameter], pages: WeightPages, *, keep_content: bool
) -> None:
    """Moves every parameter to its place in the pages, with its content if `keep_content`."""
    for name, parameter in parameters.items():
        target = pages.bytes_of(name).view(parameter.dtype).view(parameter.shape)
        if parameter.is_meta:
            materialise(parameter, target)
        else:
            parameter.data = target.copy_(parameter.data) if keep_content else target


def check(model: nn.Module, pages: WeightPages) -> None:
    """Raises SelfCheckError unless every tensor of the model is real and every parameter is in
    kvcached pages."""
    found = dict(model.named_parameters())
    strays = {name: tensor for name, tensor in found.items() if not pages.holds(tensor)}
    if strays:
        size_bytes = sum(tensor.nbytes for tensor in strays.values())
        raise SelfCheckError(
            f"{format_size(size_bytes)} of parameters are outside of the ledger's pages after"
            f" loading ({_first_names(strays)})"
        )
    lost = [name for name, tensor in other_tensors(model) if tensor.is_meta]
    if lost:
        raise SelfCheckError(f"tensors without memory after loading ({_first_names(lost)})")


def check_written(parameters: Mapping[str, torch.Tensor], pages: WeightPages) -> None:
    """Raises ActivationError for parameters that loading did not write, or wrote in part only.

    An engine does not notice tensors that a checkpoint lacks, and would serve nonsense. The pages
    were filled with a pattern that is not a valid weight: NaN in the types that have one. For other
    types an unwritten part cannot be distinguished from weights. Values that the model sets before
    loading (ones in norms) count as written.
    """
    empty = [name for name in pages.unwritten() if name in parameters]
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


def _first_names(names: Any) -> str:
    return ", ".join(sorted(names)[:3])
