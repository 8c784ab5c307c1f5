"""Symbols that SGLang imports and that the stand-in does not implement."""

from __future__ import annotations

from typing import Any, NoReturn


class Missing:
    """Function that can be imported but not called."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{self.__name__} is not part of Prism's stand-in for SGLang's kernels; "
            "install sglang-kernel for models that need it"
        )

    def __repr__(self) -> str:
        return f"<not in the stand-in: sgl_kernel.{self.__name__}>"


def missing(name: str) -> Missing:
    """Returns a placeholder for `sgl_kernel.<name>`."""
    return Missing(name)
