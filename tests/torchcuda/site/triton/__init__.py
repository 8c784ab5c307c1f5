"""A small stand-in for Triton: kernels are run by triton/language.py, one program after another.

It supports what SGLang's kernels need, and its errors name what it does not support. Compilation,
tuning and profiling do not exist: their modules answer imports with empty shells.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, ClassVar

__version__ = "3.6.0"


class Shell(types.ModuleType):
    """A module of which every attribute is a class that cannot be made, or another shell."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            made: Any = type(name, (), {"__module__": self.__name__})
        else:
            made = Shell(f"{self.__name__}.{name}")
            sys.modules.setdefault(made.__name__, made)
        setattr(self, name, made)
        return made

    def __call__(self, *args: Any, **named: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not named:
            return args[0]
        return lambda function: function


class _Shells(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        within = fullname.startswith("triton.") and fullname != "triton.language"
        if not within:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Shell(spec.name)

    def exec_module(self, module: Any) -> None:
        if module.__name__ == "triton.runtime.jit":
            module.JITFunction = JITFunction
        if module.__name__ == "triton.backends":
            driver = types.SimpleNamespace(is_active=lambda: True)
            module.backends = {"nvidia": types.SimpleNamespace(driver=driver)}


class JITFunction:
    """A kernel, or a function that kernels call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function
        self.__name__ = function.__name__
        self.__module__ = function.__module__
        self.__doc__ = function.__doc__
        self.arg_names = list(inspect.signature(function).parameters)

    def __call__(self, *args: Any, **named: Any) -> Any:
        from triton import language

        return language.call(self.fn, args, named)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        from triton import language

        return lambda *args, **named: language.launch(self.fn, grid, args, named)


def jit(function: Any = None, **_options: Any) -> Any:
    return JITFunction if function is None else JITFunction(function)


class Config:
    def __init__(
        self, kwargs: Any = None, num_warps: int = 4, num_stages: int = 3, **options: Any
    ) -> None:
        self.kwargs = kwargs or {}
        self.num_warps, self.num_stages = num_warps, num_stages
        self.options = options


class _Configured:
    """autotune and heuristics: the first configuration, and the values that depend on arguments."""

    def __init__(self, kernel: Any, more: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.fn = kernel
        self._more = more

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fn, name)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **named: self.fn[grid](*args, **named, **self._more(named))


def autotune(configs: Any, key: Any = None, **_options: Any) -> Any:
    return lambda kernel: _Configured(kernel, lambda _named: dict(next(iter(configs)).kwargs))


def heuristics(values: dict[str, Callable[[dict[str, Any]], Any]]) -> Any:
    return lambda kernel: _Configured(
        kernel, lambda named: {name: rule(named) for name, rule in values.items()}
    )


def cdiv(a: int, b: int) -> int:
    return -(a // -b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 0 else 1


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    import importlib

    return importlib.import_module(f"triton.{name}")


sys.meta_path.insert(0, _Shells())
