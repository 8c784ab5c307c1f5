"""What SGLang asks of its kernels beside the kernels."""

from __future__ import annotations


def is_arch_support_pdl() -> bool:
    """Whether kernels may start before the one ahead of them has ended. Never with a stand-in:
    that only saves time, and asking the GPU here would initialise CUDA."""
    return False
