"""Entry points by which SGLang finds Prism's platforms (`sglang.srt.platforms`).

SGLang imports this in every process of every server on the machine, so it needs the standard
library alone.
"""

from __future__ import annotations

import os


def sglang_cpu() -> str | None:
    """The platform of engines on a CPU."""
    return _chosen("prism_cpu", "kvcached.engines.sglang.platform.NativeCpuPlatform")


def sglang_cuda() -> str | None:
    """The platform of engines on a GPU."""
    return _chosen("prism_cuda", "prism.engines.sglang.platform_cuda.PrismCudaPlatform")


def _chosen(entry_point: str, platform: str) -> str | None:
    """`platform` if SGLANG_PLATFORM asks for it. SGLang activates every plugin that does not
    answer None, and an SGLang beside Prism keeps its own platform."""
    return platform if os.environ.get("SGLANG_PLATFORM") == entry_point else None
