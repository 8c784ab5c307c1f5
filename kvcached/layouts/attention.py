"""Parts that attention keeps per token: K and V heads, a latent, or a mixture by layer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvcached.checks import not_negative, positive, up_to
from kvcached.errors import InvalidArgumentError
from kvcached.layouts.base import DTYPE_BYTES, KVLayout, TokenPart

if TYPE_CHECKING:
    from typing import Self


def heads_of_rank(heads: int, ranks: int) -> int:
    """Returns the KV heads on each of `ranks` tensor-parallel ranks: its part of them, or one if
    there are fewer, which several ranks then have. Returns 0 if the ranks would have different
    numbers."""
    return max(1, heads // ranks) if not heads % ranks or not ranks % heads else 0


@dataclass(frozen=True, slots=True)
class Heads:
    """K and V of MHA, GQA (fewer KV heads than query heads) or MQA (one)."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None

    def __post_init__(self) -> None:
        positive("num_kv_heads", self.num_kv_heads)
        positive("head_dim", self.head_dim)
        if self.v_head_dim is not None:
            positive("v_head_dim", self.v_head_dim)

    def parts(self, layer: int) -> tuple[TokenPart, ...]:
        """Returns K, then V."""
        return (
            TokenPart(layer, "k", self.num_kv_heads, self.head_dim),
            TokenPart(layer, "v", self.num_kv_heads, self.v_head_dim or self.head_dim),
        )

    def of_rank(self, ranks: int) -> Heads:
        """Returns the heads on each of `ranks` tensor-parallel ranks. Raises
        InvalidArgumentError if they cannot share them."""
        heads = heads_of_rank(self.num_kv_heads, ranks)
        if not heads:
            raise InvalidArgumentError(
                f"{self.num_kv_heads} KV heads cannot be shared by {ranks} ranks; choose a divisor"
            )
        return replace(self, num_kv_heads=heads)


@dataclass(frozen=True, slots=True)
class Latent:
    """Compressed K and V of MLA (DeepSeek-V2, §2.1), followed by the rotary part of K.

    With sparse attention (DeepSeek-V3.2, §2.1) there is a key for an index, in `index_dim` numbers.
    """

    kv_lora_rank: int
    rope_dim: int
    index_dim: int = 0

    def __post_init__(self) -> None:
        positive("kv_lora_rank", self.kv_lora_rank)
        positive("rope_dim", self.rope_dim)
        not_negative("index_dim", self.index_dim)

    def parts(self, layer: int) -> tuple[TokenPart, ...]:
        """Returns one row for all heads: kv_lora_rank numbers, then rope_dim. Then a key for an
        index, if there is one."""
        latent = TokenPart(layer, "latent", 1, self.kv_lora_rank + self.rope_dim)
        index = TokenPart(layer, "index", 1, self.index_dim)
        return (latent, index) if self.index_dim else (latent,)

    def of_rank(self, ranks: int) -> Latent:
        """Returns the whole latent, which the query heads of every rank read."""
        return self


@dataclass(frozen=True)
class _UniformLayout(KVLayout):
    """Layout whose layers all keep the same parts."""

    num_layers: int

    def __post_init__(self) -> None:
        up_to(2**16 - 1)("num_layers", self.num_layers)
        super().__post_init__()
        self._layer()

    @property
    def parts(self) -> tuple[TokenPart, ...]:
        """Parts of layer 0, then of layer 1, ..."""
        return _parts([self._layer()] * self.num_layers)

    def _of_layers(self, layers: Sequence[int]) -> Self:
        return replace(self, num_layers=len(layers), padded_token_bytes=None)

    @abstractmethod
    def _layer(self) -> Heads | Latent: ...


@dataclass(frozen=True)
class Layout(_UniformLayout):
    """MHA, GQA and MQA with the same K and V heads in every layer: parts "k" and "v".

    `num_kv_heads` 1 is MQA. V may have a different `v_head_dim` (None: the same).
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None

    @property
    def k_token_bytes(self) -> int:
        """Bytes of one token's K in one layer."""
        return self._widths()[0]

    @property
    def v_token_bytes(self) -> int:
        """Bytes of one token's V in one layer."""
        return self._widths()[1]

    def _layer(self) -> Heads:
        return Heads(self.num_kv_heads, self.head_dim, self.v_head_dim)


@dataclass(frozen=True)
class MLALayout(_UniformLayout):
    """Multi-head latent attention: part "latent", (1, kv_lora_rank + rope_dim) per layer and token.

    V is not a separate part: kernels read it from the first kv_lora_rank numbers. With sparse
    attention, part "index" has `index_bytes` per layer and token, whatever their type: as many
    numbers of `dtype`, whose size must divide them.
    """

    kv_lora_rank: int
    rope_dim: int
    index_bytes: int = 0

    def _layer(self) -> Latent:
        size_bytes = not_negative("index_bytes", self.index_bytes)
        index_dim, rest = divmod(size_bytes, DTYPE_BYTES[self.dtype])
        if rest:
            raise InvalidArgumentError(
                f"index_bytes is {self.index_bytes}; it must be a multiple of the element size"
            )
        return Latent(self.kv_lora_rank, self.rope_dim, index_dim)


@dataclass(frozen=True)
class MixedLayout(KVLayout):
    """Layers that differ in heads, dimensions or kind. All layers keep every token.

    Per layer, a slab holds the smallest number of tokens that fills whole pages in *every* buffer.
    Unusual mixtures of widths make it large; interleaving avoids that.
    """

    layers: tuple[Heads | Latent, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.layers, tuple) or not self.layers:
            raise InvalidArgumentError("layers must be a tuple of Heads and Latent, not empty")
        if not all(isinstance(layer, Heads | Latent) for layer in self.layers):
            raise InvalidArgumentError("layers must contain only Heads and Latent")
        super().__post_init__()

    @property
    def parts(self) -> tuple[TokenPart, ...]:
        """Parts of layer 0, then of layer 1, ..."""
        return _parts(self.layers)

    def _of_layers(self, layers: Sequence[int]) -> Self:
        chosen = tuple(self.layers[layer] for layer in layers)
        return replace(self, layers=chosen, padded_token_bytes=None)


def _parts(layers: Iterable[Heads | Latent]) -> tuple[TokenPart, ...]:
    return tuple(part for number, layer in enumerate(layers) for part in layer.parts(number))
