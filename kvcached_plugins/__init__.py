"""Entry points through which engines find kvcached's adapters.

A package outside of `kvcached`, since engines import their plugins in every process. This module
needs only the standard library, and imports an adapter only if the environment asks for one.
"""

from __future__ import annotations

import os
import sys


def sglang_platform() -> str | None:
    """Returns the platform class for SGLang's KV on KVCACHED_DEVICE, for `sglang.srt.platforms`.

    The class is given by its dotted path. None, SGLang's own platform, if the variable is not set.
    A mistake in the environment ends the process, since SGLang logs exceptions of plugins and
    serves without them.
    """
    if not _wanted():
        return None
    kind = "CudaServer" if _is_gpu() else "HostServer"
    return f"kvcached.engines.sglang.server_platform.{kind}"


def sglang_general() -> None:
    """Corrects SGLang's models before it reads their configs and loads them, and leases their
    memory on a GPU, for `sglang.srt.plugins`. Does nothing if KVCACHED_DEVICE is not set."""
    if not os.environ.get("KVCACHED_DEVICE"):
        return
    from kvcached.engines.sglang.hybrid import configs

    configs.install()
    if "sglang.srt.managers.scheduler" in sys.modules:  # others import no models
        from kvcached.engines.sglang.hybrid import corrections

        corrections.install()
        if _is_gpu():
            from kvcached.engines.sglang import server_gpu

            server_gpu.install()


def vllm_general() -> None:
    """Puts vLLM's KV on KVCACHED_DEVICE, for `vllm.general_plugins`.

    Does nothing if the variable is not set. A mistake in the environment ends the process.
    """
    if _wanted():
        from kvcached.engines.vllm.plugin import install

        install()


def _wanted() -> bool:
    """Returns whether the environment asks for kvcached.

    Raises SystemExit if kvcached cannot be used.
    """
    if not os.environ.get("KVCACHED_DEVICE"):
        return False
    try:
        from kvcached.engines.settings import Settings

        Settings.from_environment(os.environ)
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"kvcached: {error}: the installed package kvcached is another project's, and only one "
            "can be installed: run 'pip uninstall kvcached', then reinstall prism-kvcached"
        ) from error
    except (ImportError, ValueError) as error:  # conflicting distribution, or a wrong setting
        raise SystemExit(f"kvcached: {error}") from error
    return True


def _is_gpu() -> bool:
    return os.environ.get("KVCACHED_DEVICE", "").startswith("cuda:")
