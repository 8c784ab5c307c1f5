"""Replacements of torch.cuda's device queries, which do not initialise CUDA during imports.

SGLang and Triton query a GPU's capability while they are imported, and torch initialises CUDA to
answer; after that the process could not fork engines. Some modules keep references to the
functions, so the replacements delegate: outside of `answering` they call torch's own functions.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from prism.engines.cuda_facts import Facts


@contextlib.contextmanager
def answering(facts: Sequence[Facts], current: int) -> Iterator[None]:
    """Makes torch.cuda answer from `facts` inside the context, with `current` as the current
    device."""
    answers = _Answers(facts, current)
    stand_ins = {name: getattr(answers, name) for name in _QUESTIONS}
    real = {name: getattr(torch.cuda, name) for name in _QUESTIONS}
    state = SimpleNamespace(active=True)
    for name, answer in stand_ins.items():
        setattr(torch.cuda, name, _delegating(real[name], answer, state))
    try:
        yield
    finally:
        state.active = False
        for name, function in real.items():
            setattr(torch.cuda, name, function)


def _delegating(
    real: Callable[..., Any], answer: Callable[..., Any], state: SimpleNamespace
) -> Callable[..., Any]:
    @functools.wraps(real)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return (answer if state.active else real)(*args, **kwargs)

    return stand_in


class _Answers:
    """Answers to device queries. The methods have the names and parameters of torch.cuda's
    functions."""

    def __init__(self, facts: Sequence[Facts], current: int) -> None:
        self._properties = [_properties(device) for device in facts]
        self._current = current

    def is_available(self) -> bool:
        return bool(self._properties)

    def device_count(self) -> int:
        return len(self._properties)

    def current_device(self) -> int:
        return self._current

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        index = self._index(device)
        if not 0 <= index < len(self._properties):
            raise AssertionError("Invalid device id")
        return self._properties[index]

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        found = self.get_device_properties(device)
        return found.major, found.minor

    def get_device_name(self, device: Any = None) -> str:
        return str(self.get_device_properties(device).name)

    def _index(self, device: Any) -> int:
        if isinstance(device, int):
            return device
        index = torch.device(device).index if device is not None else None
        return self._current if index is None else index


_QUESTIONS = (
    "is_available",
    "device_count",
    "current_device",
    "get_device_properties",
    "get_device_capability",
    "get_device_name",
)


def _properties(facts: Facts) -> SimpleNamespace:
    return SimpleNamespace(**facts, gcnArchName="", is_multi_gpu_board=0)
