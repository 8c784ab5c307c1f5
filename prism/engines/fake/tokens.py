"""Output of the fake model, a pure function of the prompt."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from prism.engines.fake.options import FakeOptions

STRIDE = 2654435761  # Knuth's multiplicative hash: neighbouring positions get different tokens


def seed_of(prompt_ids: Sequence[int]) -> int:
    return zlib.crc32(np.asarray(prompt_ids, dtype="<u4").tobytes())


def token_at(seed: int, position: int, vocabulary: tuple[int, int]) -> int:
    """Returns the token at `position` of the output: the upper half of (seed + position * STRIDE)
    mod 2^32, reduced into the vocabulary."""
    low, high = vocabulary
    return low + (((seed + position * STRIDE) & 0xFFFFFFFF) >> 16) % (high - low)


def expected_tokens(
    prompt_ids: Sequence[int],
    count: int,
    vocabulary: tuple[int, int] = FakeOptions().vocabulary,
) -> list[int]:
    """Returns the first `count` output tokens for a prompt, regardless of stop tokens."""
    seed = seed_of(prompt_ids)
    return [token_at(seed, i, vocabulary) for i in range(count)]


def expected_embedding(prompt_ids: Sequence[int], size: int) -> NDArray[np.float32]:
    """Returns the vector of a prompt: (size,), of length 1, little-endian."""
    drawn = np.random.default_rng(seed_of(prompt_ids)).standard_normal(size)
    return (drawn / np.linalg.norm(drawn)).astype("<f4")
