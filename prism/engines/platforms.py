"""Entry points by which SGLang finds Prism's platforms (`sglang.srt.platforms`).

SGLang imports this module in every process of every server on the machine, so it imports only the
standard library.
"""

from __future__ import annotations

import os


def sglang_cpu() -> str | None:
    """Returns the platform of engines on a CPU."""
    return _if_selected("prism_cpu", "kvcached.engines.sglang.platform.NativeCpuPlatform")


def sglang_cuda() -> str | None:
    """Returns the platform of engines on a GPU."""
    return _if_selected("prism_cuda", "prism.engines.sglang.platform_cuda.PrismCudaPlatform")


def _if_selected(entry_point: str, platform: str) -> str | None:
    """Returns `platform` if SGLANG_PLATFORM selects it, otherwise None. SGLang activates every
    plugin that does not return None, and servers other than Prism's must keep their platform."""
    return platform if os.environ.get("SGLANG_PLATFORM") == entry_point else None
