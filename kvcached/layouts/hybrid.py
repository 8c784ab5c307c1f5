"""Models whose layers keep different tokens: full attention and sliding windows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvcached.checks import checked, each, instance_of, not_negative, positive, text
from kvcached.errors import InvalidArgumentError
from kvcached.layouts.base import KVLayout


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose blocks are freed together, in a separate pool."""

    name: str
    layers: tuple[int, ...]
    """Numbers of the layers in the model."""
    layout: KVLayout
    """Layout of these layers alone."""
    window_tokens: int | None = None
    """Tokens before its own that a token attends to (None: all)."""

    def __post_init__(self) -> None:
        if not text("name", self.name):
            raise InvalidArgumentError("the name of a group of layers must not be empty")
        instance_of(KVLayout)("layout", self.layout)
        each(not_negative)("layers", self.layers)
        if len(self.layers) != self.layout.layer_count:
            raise InvalidArgumentError(
                f"group {self.name!r} has {len(self.layers)} layers, but its layout has "
                f"{self.layout.layer_count}; use layout.of_layers(layers)"
            )
        if self.window_tokens is not None:
            positive("window_tokens", self.window_tokens)

    def dead_blocks(self, num_tokens: int) -> int:
        """Returns the leading blocks of `num_tokens` tokens that no later token attends to.

        The next token attends to itself and `window_tokens` before it. Engines that count the token
        itself into the window attend to one less, for which the result is safe too.
        """
        not_negative("num_tokens", num_tokens)
        if self.window_tokens is None:
            return 0
        return max(0, num_tokens - self.window_tokens) // self.layout.block_tokens

    def live_tokens_max(self, num_tokens: int, step_tokens: int = 1) -> int:
        """Returns the most tokens, in whole blocks, that a sequence of up to `num_tokens` keeps.

        It grows by up to `step_tokens` at a time (a chunk of prefill; 1: decode) and frees its dead
        blocks between steps.
        """
        positive("step_tokens", step_tokens)
        block = self.layout.block_tokens
        whole = -(-not_negative("num_tokens", num_tokens) // block) * block
        if self.window_tokens is None:
            return whole
        # A block is freed whole: it stays while one of its tokens is in the window.
        kept = -(-(self.window_tokens + block - 1 + step_tokens) // block) * block
        return min(whole, kept)


@dataclass(frozen=True)
class HybridLayout:
    """Groups of layers, each a pool with separate block ids, within one client's limits.

    Every layer of the model is in exactly one group.
    """

    groups: tuple[LayerGroup, ...]

    def __post_init__(self) -> None:
        known = isinstance(self.groups, tuple) and {type(group) for group in self.groups}
        if known != {LayerGroup}:
            raise InvalidArgumentError("groups must be a tuple of LayerGroup, not empty")
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            raise InvalidArgumentError(f"group names must be unique, not {', '.join(names)}")
        layers = sorted(layer for group in self.groups for layer in group.layers)
        if layers != list(range(len(layers))):
            raise InvalidArgumentError(
                f"the groups hold layers {layers}; each of 0..{len(layers) - 1} must be in one"
            )

    @classmethod
    @checked(layout=instance_of(KVLayout), window_layers=each(not_negative), window_tokens=positive)
    def sliding(
        cls, layout: KVLayout, window_layers: Iterable[int], window_tokens: int
    ) -> HybridLayout:
        """Returns groups "full" and "window" for a model with the layers of `layout`."""
        window = tuple(sorted(set(window_layers)))
        full = tuple(layer for layer in range(layout.layer_count) if layer not in window)
        if not window or not full or not 0 <= window[0] <= window[-1] < layout.layer_count:
            raise InvalidArgumentError(
                f"window_layers must be some of layers 0..{layout.layer_count - 1}, and not all"
            )
        return cls(
            (
                LayerGroup("full", full, layout.of_layers(full)),
                LayerGroup("window", window, layout.of_layers(window), window_tokens),
            )
        )

    @checked(name=text)
    def group(self, name: str) -> LayerGroup:
        """Returns the group of this name."""
        for group in self.groups:
            if group.name == name:
                return group
        raise InvalidArgumentError(
            f"{name!r} is not a group; groups: {', '.join(g.name for g in self.groups)}"
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers while it is in every window."""
        return sum(group.layout.token_bytes for group in self.groups)

    @checked(page_bytes=positive)
    def quantum_bytes(self, page_bytes: int) -> int:
        """Returns the bytes of the largest step: one slab in every group."""
        return sum(group.layout.quantum_bytes(page_bytes) for group in self.groups)

    @checked(num_tokens=not_negative, step_tokens=positive)
    def need_bytes(
        self, num_tokens: int, page_bytes: int, *, step_tokens: int = 1, reserved_blocks: int = 1
    ) -> int:
        """Returns the bytes of the slabs for one sequence of up to `num_tokens`, without dead
        blocks.

        `step_tokens`: see LayerGroup.live_tokens_max.
        """
        return sum(
            group.layout.need_bytes(
                group.live_tokens_max(num_tokens, step_tokens),
                page_bytes,
                reserved_blocks=reserved_blocks,
            )
            for group in self.groups
        )
