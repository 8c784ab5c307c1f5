"""triton.language on CPU tensors: a program of a kernel is the kernel's Python, run once.

Blocks are torch tensors. A pointer is a flat view of a tensor's memory, as kernels see it, and
offsets into it; a load or store outside what is mapped faults as on a GPU.
"""

from __future__ import annotations

import ctypes
import inspect
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch


class constexpr:
    """An annotation, or a value that is known before a kernel runs."""

    def __new__(cls, value: Any) -> Any:
        return _Known(value) if type(value) is int else value


class _Known(int):
    @property
    def value(self) -> int:
        return int(self)


class _Grid:
    """Position of the running program in its grid."""

    program: tuple[int, ...] = (0, 0, 0)
    sizes: tuple[int, ...] = (1, 1, 1)


_grid = _Grid()

int1, int8, int16, int32, int64 = torch.bool, torch.int8, torch.int16, torch.int32, torch.int64
uint8, uint16, uint32, uint64 = torch.uint8, torch.uint16, torch.uint32, torch.uint64
float16, bfloat16, float32, float64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
float8e4nv, float8e5 = torch.float8_e4m3fn, torch.float8_e5m2


class dtype:
    """Type for annotations."""


class tensor:
    """Type for annotations."""


class Items:
    """The type of a block's items: torch's, with the questions that kernels ask Triton's."""

    def __init__(self, items: torch.dtype) -> None:
        self.torch = items

    def __eq__(self, other: object) -> bool:
        return bool(self.torch == (other.torch if isinstance(other, Items) else other))

    def __hash__(self) -> int:
        return hash(self.torch)

    def is_fp8(self) -> bool:
        return self.torch in (float8e4nv, float8e5)


def _torch_type(items: Any) -> Any:
    return items.torch if isinstance(items, Items) else items


class Block(torch.Tensor):
    """A block of a program. Unsigned numbers are held in 64 bits, since torch computes with few of
    them: additions, products, masks and shifts of what is below 2^63 are those of Triton."""

    @property
    def dtype(self) -> Items:
        return Items(super().dtype)

    def to(self, items: Any, **_options: Any) -> Any:
        items = _torch_type(items)
        if isinstance(items, pointer_type):
            return Pointer(_memory_at(int(self), items.element_ty))
        if items in _SIGNED:
            wide = super().to(torch.int64)
            return wide & _MASKS[items] if items in _MASKS else wide
        return super().to(items)


def _not_in_place(name: str) -> Any:
    """Returns the operator that makes a new block, as `h ^= k` does in Triton."""
    return getattr(torch.Tensor, name)


for _name in ("add", "sub", "mul", "and", "or", "xor", "lshift", "rshift", "floordiv", "truediv"):
    setattr(Block, f"__i{_name}__", _not_in_place(f"__{_name}__"))

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_MASKS = {torch.uint16: 0xFFFF, torch.uint32: 0xFFFFFFFF}


def _block(value: Any) -> Block:
    return torch.as_tensor(value).as_subclass(Block)


class Pointer:
    """`offsets` items into memory of one type."""

    def __init__(self, memory: torch.Tensor, offsets: Any = 0, items: Any = None) -> None:
        self.element_ty = memory.dtype if items is None else items
        self.memory = memory.view(_SIGNED.get(memory.dtype, memory.dtype))
        self.offsets = offsets
        self.dtype = self

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.offsets + _plain(more), self.element_ty)

    __radd__ = __add__

    def __sub__(self, less: Any) -> Pointer:
        return Pointer(self.memory, self.offsets - _plain(less), self.element_ty)

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.memory, self.offsets[index], self.element_ty)

    def to(self, kind: pointer_type, **_options: Any) -> Pointer:
        items = kind.element_ty
        return Pointer(self.memory.view(_SIGNED.get(items, items)), self.offsets, items)


class pointer_type:
    """Type that integers and pointers are cast to."""

    def __init__(self, items: Any, *_options: Any) -> None:
        self.element_ty = items


def _memory_at(address: int, items: torch.dtype) -> torch.Tensor:
    """Returns the memory at a device address that a kernel got as a number. Its end is unknown."""
    import torchcuda_front

    view = (address + torchcuda_front.kernel_distance()) & (2**64 - 1)
    raw = (ctypes.c_uint8 * _ANY_BYTES).from_address(view)
    return torch.frombuffer(raw, dtype=items, count=_ANY_BYTES // items.itemsize)


_ANY_BYTES = 1 << 30


def _plain(value: Any) -> Any:
    return value.as_subclass(torch.Tensor).long() if isinstance(value, torch.Tensor) else value


# --- running -----------------------------------------------------------------------------------


def launch(function: Callable[..., Any], grid: Any, args: Any, named: dict[str, Any]) -> None:
    """Runs every program of the grid now, after the earlier work of its stream."""
    for option in ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl", "stream"):
        named.pop(option, None)
    bound = inspect.signature(function).bind(*args, **named)
    bound.apply_defaults()
    values = dict(bound.arguments)
    if callable(grid):
        grid = grid(values)
    sizes = tuple(int(size) for size in (grid if isinstance(grid, tuple | list) else (grid,)))
    tensors = list(_tensors(values.values()))

    # Addresses alone: a captured kernel keeps no tensor.
    own = {name: _argument(value) for name, value in values.items()}

    def run() -> None:
        _grid.sizes = (*sizes, *(1,) * (3 - len(sizes)))
        for indices in itertools.product(*(range(size) for size in _grid.sizes)):
            _grid.program = indices
            function(**own)

    _kernel(function.__name__, tensors, run)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def _kernel(name: str, tensors: list[torch.Tensor], run: Callable[[], None]) -> None:
    import torchcuda_front

    for value in tensors:
        if not value.is_cuda:
            raise ValueError(
                f"Pointer argument cannot be accessed from Triton (cpu tensor?) in {name}"
            )
    torchcuda_front.kernel(tensors, run)


def _argument(value: Any) -> Any:
    import torchcuda_front

    if isinstance(value, tuple):
        return tuple(_argument(item) for item in value)
    return Pointer(torchcuda_front.flat_view(value)) if isinstance(value, torch.Tensor) else value


def call(function: Callable[..., Any], args: Any, named: dict[str, Any]) -> Any:
    """Calls a function for a kernel."""
    return function(*args, **named)


def program_id(axis: int) -> torch.Tensor:
    return _number(_grid.program[axis])


def num_programs(axis: int) -> torch.Tensor:
    return _number(_grid.sizes[axis])


def _number(value: int) -> Block:
    return _block(torch.tensor(value, dtype=torch.int32))


# --- memory ------------------------------------------------------------------------------------


def load(pointer: Pointer, mask: Any = None, other: Any = 0, **_options: Any) -> torch.Tensor:
    offsets, chosen = _chosen(pointer, mask)
    values = torch.full(offsets.shape, other or 0, dtype=pointer.memory.dtype)
    values[chosen] = pointer.memory[offsets[chosen]]
    block = _block(values)
    return block.to(pointer.element_ty) if pointer.element_ty in _SIGNED else block


def store(pointer: Pointer, value: Any, mask: Any = None, **_options: Any) -> None:
    offsets, chosen = _chosen(pointer, mask)
    block = _plain_block(value).expand(offsets.shape)
    pointer.memory[offsets[chosen]] = block[chosen].to(pointer.memory.dtype)


def _atomic(name: str) -> Callable[..., None]:
    """Returns an operation on items of memory, of which one may occur several times in a block."""

    def operate(pointer: Pointer, value: Any, mask: Any = None, **_options: Any) -> None:
        offsets, chosen = _chosen(pointer, mask)
        values = _plain_block(value).expand(offsets.shape)[chosen]
        for offset, item in zip(offsets[chosen].tolist(), values.tolist(), strict=True):
            pointer.memory[offset] = getattr(operator, name)(pointer.memory[offset].item(), item)

    return operate


atomic_add, atomic_or = _atomic("add"), _atomic("or_")


def _chosen(pointer: Pointer, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
    offsets = _plain_block(pointer.offsets).long()
    if mask is None:
        return offsets, torch.ones(offsets.shape, dtype=torch.bool)
    mask = _plain_block(mask)
    shape = torch.broadcast_shapes(offsets.shape, mask.shape)
    return offsets.expand(shape), mask.to(torch.bool).expand(shape)


def _plain_block(value: Any) -> torch.Tensor:
    return torch.as_tensor(value).as_subclass(torch.Tensor)


# --- blocks ------------------------------------------------------------------------------------


def arange(start: int, end: int) -> torch.Tensor:
    return _block(torch.arange(start, end, dtype=torch.int32))


def zeros(shape: Any, dtype: Any) -> torch.Tensor:
    return full(shape, 0, dtype)


def full(shape: Any, value: Any, dtype: Any) -> torch.Tensor:
    items = _torch_type(dtype)
    return _block(torch.full(tuple(shape), value, dtype=torch.int64 if items in _SIGNED else items))


def _as_tensor(value: Any) -> torch.Tensor:
    return torch.as_tensor(value)


def cdiv(a: Any, b: Any) -> Any:
    return (a + b - 1) // b


def where(condition: Any, a: Any, b: Any) -> torch.Tensor:
    return torch.where(_as_tensor(condition), _as_tensor(a), _as_tensor(b))


def maximum(a: Any, b: Any, **_options: Any) -> torch.Tensor:
    return torch.maximum(*torch.broadcast_tensors(_as_tensor(a), _as_tensor(b)))


def minimum(a: Any, b: Any, **_options: Any) -> torch.Tensor:
    return torch.minimum(*torch.broadcast_tensors(_as_tensor(a), _as_tensor(b)))


def sum(block: torch.Tensor, axis: int | None = None, **_options: Any) -> torch.Tensor:
    kept = torch.int32 if block.dtype == torch.bool else _torch_type(block.dtype)
    return block.sum(dtype=kept) if axis is None else block.sum(dim=axis, dtype=kept)


def max(
    block: torch.Tensor, axis: int | None = None, return_indices: bool = False, **_options: Any
) -> Any:
    values = block.max() if axis is None else block.max(dim=axis).values
    return (values, argmax(block, axis or 0)) if return_indices else values


def argmax(block: torch.Tensor, axis: int, **_options: Any) -> torch.Tensor:
    """Returns the first of equal values, as Triton does by default."""
    return block.argmax(dim=axis).to(torch.int32)


def min(block: torch.Tensor, axis: int | None = None, **_options: Any) -> torch.Tensor:
    return block.min() if axis is None else block.min(dim=axis).values


def cumsum(block: torch.Tensor, axis: int = 0, **_options: Any) -> torch.Tensor:
    return block.cumsum(dim=axis)


def dot(a: torch.Tensor, b: torch.Tensor, acc: Any = None, **_options: Any) -> torch.Tensor:
    product = a.float() @ b.float()
    return product if acc is None else acc + product


def trans(block: torch.Tensor, *_axes: int) -> torch.Tensor:
    return block.t()


def _pointwise(name: str) -> Callable[[Any], torch.Tensor]:
    return lambda block: getattr(torch, name)(_as_tensor(block))


exp, exp2, log, log2 = (_pointwise(name) for name in ("exp", "exp2", "log", "log2"))
sqrt, rsqrt, sigmoid = (_pointwise(name) for name in ("sqrt", "rsqrt", "sigmoid"))
abs, floor, ceil = (_pointwise(name) for name in ("abs", "floor", "ceil"))
sin, cos, erf = (_pointwise(name) for name in ("sin", "cos", "erf"))


def fdiv(a: Any, b: Any, **_options: Any) -> Any:
    return a / b


def broadcast_to(block: Any, shape: Any) -> torch.Tensor:
    return _as_tensor(block).expand(tuple(shape))


def reshape(block: torch.Tensor, *shape: Any, **_options: Any) -> torch.Tensor:
    return block.reshape(tuple(shape[0]) if isinstance(shape[0], tuple | list) else shape)


def expand_dims(block: torch.Tensor, axis: int) -> torch.Tensor:
    return block.unsqueeze(axis)


def cast(block: Any, to: Any, **_options: Any) -> torch.Tensor:
    return _as_tensor(block).to(_torch_type(to))


def multiple_of(block: Any, _values: Any) -> Any:
    return block


def max_contiguous(block: Any, _values: Any) -> Any:
    return block


def static_assert(condition: Any, message: str = "") -> None:
    assert condition, message


def device_assert(condition: Any, message: str = "") -> None:
    assert bool(_as_tensor(condition).all()), message


def debug_barrier() -> None:
    """Does nothing: programs run one after the other."""


def static_range(*bounds: Any) -> range:
    return range(*(int(bound) for bound in bounds))


class math:
    exp, exp2, log, log2 = (staticmethod(function) for function in (exp, exp2, log, log2))
    sqrt, rsqrt = (staticmethod(function) for function in (sqrt, rsqrt))


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name == "range":  # not a name of this module, which uses Python's own
        return lambda *bounds, **_options: map(_number, range(*(int(bound) for bound in bounds)))
    if name in ("core", "extra"):
        import importlib

        return importlib.import_module(f"triton.language.{name}")

    def unknown(*_args: Any, **_named: Any) -> None:
        raise NotImplementedError(f"the stand-in for Triton has no tl.{name}")

    return unknown
