"""Shape of a model: what each layer keeps per token and per sequence, and its parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

from kvcached.errors import InvalidArgumentError
from kvcached.layouts.attention import Heads, Latent


@dataclass(frozen=True, slots=True)
class State:
    """Numbers that a layer keeps per sequence, whatever the sequence's length."""

    conv: int
    """Last inputs of a short convolution (channels x (kernel - 1)), in the model's dtype."""
    recurrent: int = 0
    """State of a linear recurrence, in float32."""
    heads: int = 1
    """Heads, groups or channels of which each tensor-parallel rank has the same number."""
    taps: int = 0
    """Inputs of a channel in `conv` (0: not known)."""
    whole_channels: int = 0
    """Channels of `conv` that each rank has: B and C of Mamba 2 with one group."""

    @property
    def whole_conv(self) -> int:
        """Part of `conv` that each tensor-parallel rank has."""
        return self.whole_channels * self.taps

    def of_rank(self, ranks: int) -> State:
        """Returns the state on each of `ranks` tensor-parallel ranks. Raises InvalidArgumentError
        if they cannot share it."""
        if self.heads % ranks:
            raise InvalidArgumentError(
                f"{self.heads} heads of states cannot be shared by {ranks} ranks; choose a divisor"
            )
        conv = self.whole_conv + (self.conv - self.whole_conv) // ranks
        return replace(self, conv=conv, recurrent=self.recurrent // ranks)


@dataclass(frozen=True, slots=True)
class Mlp:
    """An MLP, or a mixture of experts."""

    parameters: int
    experts: int = 0
    experts_used: int = 0
    """Experts that one token is routed to."""
    expert_parameters: int = 0
    """Parameters of one expert."""
    columns: int = 0
    """Numbers between its matrices, of each expert (0: not known)."""

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: without the experts that it is not routed to."""
        return self.parameters - (self.experts - self.experts_used) * self.expert_parameters


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of one layer."""

    mixer_parameters: int
    """Parameters of attention or a recurrence, and of norms."""
    mlp: Mlp = Mlp(0)
    heads: int = 0
    """Number of query heads."""
    pair_flops: int = 0
    """Floating-point operations of attention for one query and one key in a prefill."""
    kv: Heads | Latent | None = None
    """Numbers that the layer keeps of each token (None: nothing)."""
    window_tokens: int | None = None
    """Tokens that a token attends to, with itself (None: all)."""
    state: State | None = None
    index_bytes: int = 0
    """Bytes per token of an index of keys, whatever the dtype of the KV cache."""
    absorbed: int = 0
    """Numbers that engines keep in addition: a second copy of the up-projections, with which they
    attend to latents, or projections of K and V that repeat others or are not used."""

    @property
    def parameters(self) -> int:
        """Number of parameters in memory."""
        return self.mixer_parameters + self.mlp.parameters

    @property
    def active_parameters(self) -> int:
        """Number of parameters that one token uses."""
        return self.mixer_parameters + self.mlp.active_parameters


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Shape of a decoder. A vision or audio encoder is not part of it."""

    model_type: str
    hidden_size: int
    vocab_size: int
    context_tokens: int
    dtype: str
    """Dtype of the weights in the config.json, or bfloat16."""
    layers: tuple[LayerShape, ...]
    table_parameters: int
    """Tables that a step only looks up: embeddings of tokens and positions."""
    head_parameters: int
    """The output matrix: the embedding's own, if `tied`."""
    other_parameters: int
    """Norms and projections outside the layers."""
    tied: bool

    @property
    def parameters(self) -> int:
        """Number of parameters in memory."""
        return self._total(sum(layer.parameters for layer in self.layers))

    @property
    def active_parameters(self) -> int:
        """Number of parameters that one token uses, with the tables."""
        return self._total(sum(layer.active_parameters for layer in self.layers))

    def _total(self, in_layers: int) -> int:
        head = 0 if self.tied else self.head_parameters
        return in_layers + self.table_parameters + head + self.other_parameters

    def kv_token_bytes(self, dtype_bytes: int) -> int:
        """Returns the bytes of one token's KV over all layers while it is in every window.
        `dtype_bytes`: of a number of the KV cache's dtype."""
        parts = (part for layer in self.layers if layer.kv for part in layer.kv.parts(0))
        index = sum(layer.index_bytes for layer in self.layers)
        return sum(part.heads * part.dim for part in parts) * dtype_bytes + index

    def state_bytes(self, dtype_bytes: int) -> int:
        """Returns the bytes of one sequence's state over all layers. `dtype_bytes`: of a number of
        the model's dtype."""
        return sum(state.conv * dtype_bytes + state.recurrent * 4 for state in self._states)

    def whole_state_bytes(self, dtype_bytes: int) -> int:
        """Returns the part of `state_bytes` that each tensor-parallel rank has; the rest is
        divided."""
        return sum(state.whole_conv for state in self._states) * dtype_bytes

    @property
    def whole_channel_parameters(self) -> int:
        """Parameters of projections and convolutions for the channels of states that each
        tensor-parallel rank has."""
        return sum(s.whole_channels * (self.hidden_size + s.taps + 1) for s in self._states)

    @property
    def kv_head_parameters(self) -> int:
        """Parameters of the projections for one KV head, of K and V in all layers."""
        kept = [layer.kv for layer in self.layers if isinstance(layer.kv, Heads)]
        return self.hidden_size * sum(part.dim for kv in kept for part in kv.parts(0))

    @property
    def divided(self) -> dict[str, int]:
        """Numbers by name of which each tensor-parallel rank has the same part. KV heads are not
        among them, since ranks may have the same one."""
        numbers = {
            "query heads": gcd(*(layer.heads for layer in self.layers)),
            "columns of MLPs": gcd(*(layer.mlp.columns for layer in self.layers)),
            "heads of states": gcd(*(state.heads for state in self._states)),
        }
        return {name: number for name, number in numbers.items() if number}

    def kept_by_rank(self, ranks: int) -> ModelShape:
        """Returns the shape with the KV and states of each of `ranks` tensor-parallel ranks. Raises
        InvalidArgumentError if they cannot share them."""
        layers = tuple(
            replace(
                layer,
                kv=layer.kv and layer.kv.of_rank(ranks),
                state=layer.state and layer.state.of_rank(ranks),
            )
            for layer in self.layers
        )
        return replace(self, layers=layers)

    @property
    def _states(self) -> list[State]:
        return [layer.state for layer in self.layers if layer.state]
