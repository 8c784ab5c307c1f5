"""Parameters of a torch model that live in kvcached pages.

The model is built with its parameters on the meta device, so nothing is allocated for them; then
they become views of mapped pages. The first time the engine's own weight loaders (which fuse and
shard) write into those; from then on the machine's store has the result, and loading is a copy.
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
from prism.config.units import format_size
from prism.engines.model_memory import ModelMemory
from prism.engines.model_weights import ModelWeights
from prism.errors import ActivationError, SelfCheckError

_PIECE_ELEMENTS = 1 << 24

log = logging.getLogger("prism.engine")


@dataclass(frozen=True, slots=True)
class EngineLoader:
    """The engine's own steps: to build a model, to write its parameters from files, and what it
    does with a loaded one."""

    build: Callable[[], nn.Module]
    read: Callable[[nn.Module], None]
    finish: Callable[[nn.Module], None]


def load(memory: ModelMemory, steps: EngineLoader) -> nn.Module:
    """The model: out of the machine's store if it has a good copy, else out of its files.

    Only a model whose parameters alone tell what was loaded, and whose last step leaves them as
    they are, may be copied instead of loaded from then on.
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
    parameters = dict(model.named_parameters())
    memory.lay_out_weights(parameters, back=not from_store)
    place(parameters, memory.weights, keep_content=not from_store)
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
    before = {name: tensor.clone() for name, tensor in others(model)}
    steps.read(model)
    check_written(dict(model.named_parameters()), weights)
    is_plain = _same(before, dict(others(model)))
    loaded = weights.checksum() if is_plain else 0
    steps.finish(model)
    weights.may_store = is_plain and weights.checksum() == loaded


def _build(steps: EngineLoader) -> nn.Module:
    """On the meta device. A model that fills what `torch.empty` gave it is built again for real:
    its parameters then exist twice while they move into their pages."""
    with EmptyOnMeta():
        model = steps.build()
    lost = sorted(name for name, tensor in others(model) if tensor.is_meta)
    if lost:
        log.warning("%s is not built on the meta device", ", ".join(lost))
        return steps.build()
    return model


class EmptyOnMeta(TorchFunctionMode):  # type: ignore[misc]
    """`torch.empty` makes meta tensors: what it returns has no content that could be lost. All
    else is made for real: tables (rotary), ones of norms, masks."""

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
    """Make every parameter its place in the pages; `keep_content`: with the content it has."""
    for name, parameter in parameters.items():
        room = weights[name]
        if parameter.is_meta:
            _materialise(parameter, room)
        else:
            parameter.data = room.copy_(parameter.data) if keep_content else room


def _materialise(parameter: nn.Parameter, room: torch.Tensor) -> None:
    """The same object, with its class and attributes (weight loaders), gets real memory."""
    real = nn.Parameter(room, requires_grad=False)
    real.__class__ = parameter.__class__
    real.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, real)


def check(model: nn.Module, weights: ModelWeights) -> None:
    """Raises SelfCheckError unless every tensor of the model is real and every parameter lies in
    its place in kvcached pages."""
    found = dict(model.named_parameters())
    strays = {n: t for n, t in found.items() if not weights.holds(n, t)}
    if strays:
        size_bytes = sum(t.numel() * t.element_size() for t in strays.values())
        raise SelfCheckError(
            f"{format_size(size_bytes)} of parameters lie outside of the ledger's pages after"
            f" loading ({_some(strays)})"
        )
    lost = [name for name, tensor in others(model) if tensor.is_meta]
    if lost:
        raise SelfCheckError(f"tensors without memory after loading ({_some(lost)})")


def check_written(parameters: Mapping[str, torch.Tensor], weights: ModelWeights) -> None:
    """Raises ActivationError for parameters that loading left as they were, or a part of them.

    An engine itself does not miss what a checkpoint lacks, and would serve nonsense. The pages were
    filled with a pattern that is no weight: NaN in the types that have one. Of other types a part
    that was not written cannot be told from weights. What a model itself sets before it loads
    (ones in norms) counts as written.
    """
    empty = [name for name in weights.unwritten() if name in parameters]
    if empty:
        raise ActivationError(
            f"the files give no values for {_some(empty)}; tied embeddings of this architecture"
            " may not be supported: save the checkpoint with every tensor it needs"
        )
    partial = [name for name, tensor in parameters.items() if _has_nan(tensor)]
    if partial:
        raise ActivationError(
            f"the files give values for a part of {_some(partial)} only, or values that are no"
            " numbers: save the checkpoint with every tensor it needs"
        )


def _has_nan(tensor: torch.Tensor) -> bool:
    """Piece by piece: a mask over a large embedding would not fit into what torch may allocate."""
    if not tensor.is_floating_point():
        return False
    pieces = tensor.detach().flatten().split(_PIECE_ELEMENTS)
    return any(bool(_nans(piece).any()) for piece in pieces)


def _nans(piece: torch.Tensor) -> torch.Tensor:
    """`torch.isnan` lacks the types of one byte."""
    return torch.isnan(piece if piece.element_size() > 1 else piece.to(torch.float32))


def others(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of the model that are no parameters: buffers, and plain attributes of modules."""
    yield from model.named_buffers()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}", value


def _same(before: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor]) -> bool:
    return before.keys() == now.keys() and all(torch.equal(before[n], now[n]) for n in now)


def _some(names: Any) -> str:
    return ", ".join(sorted(names)[:3])
