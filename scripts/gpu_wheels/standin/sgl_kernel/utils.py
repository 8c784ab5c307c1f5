"""Utilities that SGLang imports from its package of kernels."""

from __future__ import annotations


def is_arch_support_pdl() -> bool:
    """Returns False: kernels never start before the previous one has ended.

    Early starts only save time, and querying the GPU here would initialise CUDA.
    """
    return False
