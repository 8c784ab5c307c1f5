"""Parameters of the parts of a layer, and what they keep."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Literal

from kvcached.errors import InvalidArgumentError
from kvcached.layouts.attention import Heads, Latent
from kvcached.models.config_keys import ConfigKeys
from kvcached.models.shape import Mlp, State


def linear(inputs: int, outputs: int, bias: bool = False) -> int:
    """Returns the parameters of a matrix, with a bias or without."""
    return inputs * outputs + (outputs if bias else 0)


def mlp(hidden: int, ffn: int, *, gated: bool = True, bias: bool = False) -> Mlp:
    """Returns an MLP of three matrices (gated) or two."""
    up = linear(hidden, ffn, bias) * (2 if gated else 1)
    return Mlp(up + linear(ffn, hidden, bias), columns=ffn)


def experts(
    hidden: int, number: int, used: int, each: Mlp, *, shared: int = 0, router: int | None = None
) -> Mlp:
    """Returns a mixture of experts.

    Args:
        hidden: Numbers of a token that the router reads.
        number: Experts of the layer.
        used: Experts that one token is routed to.
        each: One expert.
        shared: Parameters that every token uses besides them.
        router: Parameters of the router (None: one matrix).
    """
    if used > number:
        raise InvalidArgumentError(
            f"config.json routes a token to {used} of {number} experts; correct one of them"
        )
    common = shared + (linear(hidden, number) if router is None else router)
    total = common + number * each.parameters
    return Mlp(total, number, used, each.parameters, each.columns)


def heads_of(keys: ConfigKeys) -> tuple[int, Heads]:
    """Returns the number of query heads, and the K and V heads."""
    heads = keys.integer("num_attention_heads")
    kv_heads = keys.integer(
        "num_key_value_heads", default=keys.if_null("num_key_value_heads", heads)
    )
    if heads % kv_heads:
        raise InvalidArgumentError(
            f"config.json has {heads} query heads for {kv_heads} K and V heads, which does not"
            " divide them; correct one of them"
        )
    dim = keys.optional("head_dim") or split(keys.integer("hidden_size"), heads)
    return heads, Heads(kv_heads, dim)


def split(hidden: int, heads: int) -> int:
    """Returns the dimension of one of `heads` heads, or raises InvalidArgumentError."""
    if hidden % heads:
        raise InvalidArgumentError(
            f"config.json has hidden_size {hidden} for {heads} heads, which does not divide it;"
            " correct one of them"
        )
    return hidden // heads


def attention(
    hidden: int,
    heads: int,
    kv: Heads,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: Literal["", "head", "all"] = "",
    output_gate: bool = False,
) -> int:
    """Returns the parameters of MHA, GQA or MQA. `qk_norm`: norms over a head, or all heads."""
    q, k, v = heads * kv.head_dim, kv.num_kv_heads * kv.head_dim, kv.num_kv_heads * _v_dim(kv)
    gate = q if output_gate else 0
    norms = {"": 0, "head": 2 * kv.head_dim, "all": q + k}[qk_norm]
    out = linear(heads * _v_dim(kv), hidden, out_bias)
    return linear(hidden, q + gate + k + v, qkv_bias) + out + norms


def pair_flops(heads: int, kv: Heads) -> int:
    """Returns the operations of attention for a query and a key: with K, and with V."""
    return 2 * heads * (kv.head_dim + _v_dim(kv))


def _v_dim(kv: Heads) -> int:
    return kv.v_head_dim or kv.head_dim


def absorbed_numbers(keys: ConfigKeys) -> int:
    """Returns the numbers of the up-projections of K and V in latent attention."""
    heads, nope = keys.integer("num_attention_heads"), keys.integer("qk_nope_head_dim")
    of_null = keys.if_null("v_head_dim", keys.integer("hidden_size") // heads)
    v_dim = keys.integer("v_head_dim", default=of_null)
    return linear(keys.integer("kv_lora_rank"), heads * (nope + v_dim))


def latent_attention(keys: ConfigKeys) -> tuple[int, Latent, int]:
    """Returns multi-head latent attention (DeepSeek-V2, §2.1): its parameters, what it keeps, and
    the operations for a query and a key in a prefill, which computes with whole heads."""
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    bias, rank = keys.flag("attention_bias"), keys.integer("kv_lora_rank")
    nope, rope = keys.integer("qk_nope_head_dim"), keys.integer("qk_rope_head_dim")
    of_null = keys.if_null("v_head_dim", hidden // heads)
    v_dim, q_rank = keys.integer("v_head_dim", default=of_null), keys.optional("q_lora_rank")
    q = heads * (nope + rope)
    if q_rank is None:
        queries = linear(hidden, q)
    else:
        queries = linear(hidden, q_rank, bias) + q_rank + linear(q_rank, q)
    down = linear(hidden, rank + rope, bias) + rank
    total = queries + down + absorbed_numbers(keys) + linear(heads * v_dim, hidden, bias)
    return total, Latent(rank, rope), 2 * heads * (nope + rope + v_dim)


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Sizes of a Mamba-2 mixer (Dao and Gu, 2024, §8)."""

    inner: int
    heads: int
    groups: int
    state_size: int
    kernel: int
    conv_bias: bool
    in_bias: bool
    out_bias: bool
    norm: bool = True

    @property
    def _channels(self) -> int:
        return self.inner + 2 * self.groups * self.state_size

    def parameters(self, hidden: int) -> int:
        """Returns the parameters for tokens of `hidden` numbers."""
        inputs = linear(hidden, self.inner + self._channels + self.heads, self.in_bias)
        conv = self._channels * (self.kernel + (1 if self.conv_bias else 0))
        norm = self.inner if self.norm else 0
        return inputs + conv + 3 * self.heads + norm + linear(self.inner, hidden, self.out_bias)

    @property
    def state(self) -> State:
        """Numbers that a sequence keeps."""
        taps, is_grouped = self.kernel - 1, self.groups > 1
        return State(
            self._channels * taps,
            self.inner * self.state_size,
            heads=gcd(self.heads, self.groups) if is_grouped else self.heads,
            taps=taps,
            whole_channels=0 if is_grouped else 2 * self.state_size,
        )


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Sizes of a gated delta net (Yang et al., 2025), as Qwen3-Next has it."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    kernel: int

    @classmethod
    def read(cls, keys: ConfigKeys) -> DeltaNet:
        """Returns the sizes in a config.json."""
        return cls(
            keys.integer("linear_num_key_heads"),
            keys.integer("linear_num_value_heads"),
            keys.integer("linear_key_head_dim"),
            keys.integer("linear_value_head_dim"),
            keys.integer("linear_conv_kernel_dim"),
        )

    @property
    def _channels(self) -> int:
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim

    def parameters(self, hidden: int) -> int:
        """Returns the parameters for tokens of `hidden` numbers."""
        values = self.v_heads * self.v_dim
        inputs = linear(hidden, self._channels + values + 2 * self.v_heads)
        small = self._channels * self.kernel + 2 * self.v_heads + self.v_dim
        return inputs + small + linear(values, hidden)

    @property
    def state(self) -> State:
        """Numbers that a sequence keeps."""
        return State(
            self._channels * (self.kernel - 1),
            self.v_heads * self.k_dim * self.v_dim,
            heads=gcd(self.k_heads, self.v_heads),
        )
