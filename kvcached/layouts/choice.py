"""Which arrangement a model gets: the quantum rule.

Per layer is what every kernel knows and what runs fastest, but one growth is pages in every buffer:
with 2 MiB pages and 32 layers 128 MiB, for a single token as well. Each model on the device leaves
about half a quantum unused, and its padding block takes a whole one. Where that is more than a few
percent of the device, an interleaved arrangement is the better one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from kvcached.checks import checked, each, instance_of, positive, text
from kvcached.errors import InvalidArgumentError
from kvcached.layouts.base import ARRANGEMENTS, DTYPE_BYTES, Arrangement, KVLayout

# Of the device, for the quanta of all its models.
QUANTA_SHARE_MAX = 0.03
# Of a token, for the gap behind it.
PADDING_MAX = 0.125
# Where a token starts: what vector loads of kernels want.
ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class LayoutChoice:
    """A layout, what it costs, and why it was chosen.

    `quanta_share`: quantum x co-resident models / device. `padding_share`: of the memory of a
    token, what is gap.
    """

    layout: KVLayout
    quantum_bytes: int
    quanta_share: float
    padding_share: float
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
    """The arrangement of `layout` (its own is ignored) for one of `models` on a device.

    `accepted` are those that the engine's kernels take. A choice is good while the quanta of all
    models, each taken to be as large, are at most QUANTA_SHARE_MAX of the device. The first good
    one is taken: per layer, by blocks, by tokens, those two with no more padding than it needs (at
    most PADDING_MAX of a token). If none is good, the one with the least quantum.
    """
    choices = [
        _judge(candidate, page_bytes, device_bytes, models)
        for arrangement in ARRANGEMENTS
        if arrangement in accepted
        for candidate in _candidates(layout, arrangement)
    ]
    if not choices:
        raise InvalidArgumentError(
            f"accepted holds no arrangement; name some of {', '.join(ARRANGEMENTS)}"
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
    """The token rounded up to powers of two, and to multiples of them, while the gap is small."""
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
            f"of the device, {verdict} the {QUANTA_SHARE_MAX:.0%} that quanta may take"
        ),
    )
