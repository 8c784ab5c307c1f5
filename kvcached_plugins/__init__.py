"""Entry points by which engines find kvcached's adapters.

Outside of `kvcached`, since engines import their plugins in every process, wanted or not: this
module needs the standard library alone, and imports an adapter only where the environment asks
for one.
"""

from __future__ import annotations

import os
import sys


def sglang_platform() -> str | None:
    """For `sglang.srt.platforms`: the dotted path of the platform class that puts SGLang's KV on
    the device of KVCACHED_DEVICE. None, SGLang's own platform, where the variable is not set.

    A mistake in the environment ends the process: SGLang logs exceptions of plugins and serves
    without them.
    """
    if not _wanted():
        return None
    kind = "CudaServer" if _is_gpu() else "HostServer"
    return f"kvcached.engines.sglang.server_platform.{kind}"


def sglang_general() -> None:
    """For `sglang.srt.plugins`: on a GPU, memory is leased before SGLang loads its model."""
    if _is_gpu() and "sglang.srt.managers.scheduler" in sys.modules:
        from kvcached.engines.sglang import server_gpu

        server_gpu.install()


def vllm_general() -> None:
    """For `vllm.general_plugins`: puts vLLM's KV on the device of KVCACHED_DEVICE; nothing where
    the variable is not set. A mistake in the environment ends the process.
    """
    if _wanted():
        if _is_gpu():
            raise SystemExit(
                "kvcached: stock vLLM is not served on GPUs by this version: set KVCACHED_DEVICE "
                "to host:0, or serve with SGLang"
            )
        from kvcached.engines.vllm.plugin import install

        install()


def _wanted() -> bool:
    """Whether the environment asks for kvcached. Raises SystemExit if it cannot have it."""
    if not os.environ.get("KVCACHED_DEVICE"):
        return False
    try:
        from kvcached.engines.settings import Settings

        Settings.from_environment(os.environ)
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"kvcached: {error}: the package kvcached here is another project's, and there can be "
            "one of them: run 'pip uninstall kvcached', then reinstall prism-kvcached"
        ) from error
    except (ImportError, ValueError) as error:  # another distribution `kvcached`; a mistake
        raise SystemExit(f"kvcached: {error}") from error
    return True


def _is_gpu() -> bool:
    return os.environ.get("KVCACHED_DEVICE", "").startswith("cuda:")
