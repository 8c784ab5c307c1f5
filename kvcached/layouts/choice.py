"""Choice of an arrangement: the quantum rule.

The per-layer arrangement is supported by every kernel and is the fastest, but one growth takes
pages in every buffer: with 2 MiB pages and 32 layers 128 MiB, even for a single token. Each model
on the device leaves about half a quantum unused, and its padding block takes a whole one. If that
is more than a few percent of the device, an interleaved arrangement is better.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from kvcached.checks import checked, each, instance_of, positive, text
from kvcached.errors import InvalidArgumentError
from kvcached.layouts.base import ARRANGEMENTS, DTYPE_BYTES, Arrangement, KVLayout

QUANTA_SHARE_MAX = 0.03  # of the device, for the quanta of all its models
PADDING_MAX = 0.125  # of a token's size
ALIGNMENT_BYTES = 16  # of a token, for the vector loads of kernels


@dataclass(frozen=True)
class LayoutChoice:
    """A layout, its cost, and the reason for choosing it."""

    layout: KVLayout
    quantum_bytes: int
    quanta_share: float
    """Quantum x co-resident models / device."""
    padding_share: float
    """Part of a token's memory that is padding."""
    reason: str


@checked(
    layout=instance_of(KVLayout),
    page_bytes=positive,
    device_bytes=positive,
    models=positive,
    accepted=each(text),
)
def choose_layout(
    layout: KVLayout,
    *,
    page_bytes: int,
    device_bytes: int,
    models: int = 1,
    accepted: Collection[Arrangement] = ARRANGEMENTS,
) -> LayoutChoice:
    """Returns the best arrangement of `layout` for one of `models` on a device.

    The arrangement of `layout` itself is ignored; `accepted` are those that the engine's kernels
    support. A choice is good if the quanta of all models, assumed to be equal, are at most
    QUANTA_SHARE_MAX of the device. The first good choice is taken in the order per layer, by
    blocks, by tokens; the last two with the smallest padding that suffices (at most PADDING_MAX of
    a token). If none is good, the one with the smallest quantum is taken.
    """
    choices = [
        _judge(candidate, page_bytes, device_bytes, models)
        for arrangement in ARRANGEMENTS
        if arrangement in accepted
        for candidate in _candidates(layout, arrangement)
    ]
    if not choices:
        raise InvalidArgumentError(
            f"accepted does not contain an arrangement; name some of {', '.join(ARRANGEMENTS)}"
        )
    good = [choice for choice in choices if choice.quanta_share <= QUANTA_SHARE_MAX]
    if good:
        return min(good, key=lambda choice: choice.padding_share)
    return min(choices, key=lambda choice: (choice.quantum_bytes, choice.padding_share))


def _candidates(layout: KVLayout, arrangement: Arrangement) -> list[KVLayout]:
    dense = replace(layout, arrangement=arrangement, padded_token_bytes=None)
    if arrangement == "per_layer":
        return [dense]
    paddings = _paddings(dense.token_bytes, DTYPE_BYTES[layout.dtype])
    return [dense, *(replace(dense, padded_token_bytes=padded) for padded in paddings)]


def _paddings(token_bytes: int, element_bytes: int) -> list[int]:
    """Returns the token's size rounded up to multiples of powers of two, while the gap is small."""
    unit = max(ALIGNMENT_BYTES, element_bytes)
    paddings: list[int] = []
    while (padded := -(-token_bytes // unit) * unit) <= token_bytes / (1 - PADDING_MAX):
        if padded > token_bytes and padded not in paddings:
            paddings.append(padded)
        unit *= 2
    return paddings


def _judge(layout: KVLayout, page_bytes: int, device_bytes: int, models: int) -> LayoutChoice:
    quantum = layout.quantum_bytes(page_bytes)
    share = quantum * models / device_bytes
    verdict = "within" if share <= QUANTA_SHARE_MAX else "over"
    return LayoutChoice(
        layout=layout,
        quantum_bytes=quantum,
        quanta_share=share,
        padding_share=1 - layout.token_bytes / sum(layout.buffer_token_bytes),
        reason=(
            f"{layout.arrangement}: a quantum of {quantum} bytes, for {models} models {share:.2%} "
            f"of the device, {verdict} the limit of {QUANTA_SHARE_MAX:.0%}"
        ),
    )
