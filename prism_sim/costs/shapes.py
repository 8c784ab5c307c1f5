"""Shapes of public models, from their config.json, and the sizes of weights and KV."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Shape of a dense decoder."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    # True if the output matrix is the embedding.
    tied: bool = False
    # 3 for gated MLPs, 2 for plain ones.
    ffn_matrices: int = 3
    # Number of learned position embeddings.
    positions: int = 0
    # 1 for 8-bit checkpoints, whose KV has 16 bits.
    weight_dtype_bytes: int = 2
    kv_dtype_bytes: int = 2

    @property
    def geometry(self) -> ModelShape:
        """Shape without the name, which determines the costs."""
        return replace(self, name="")

    @property
    def gated(self) -> bool:
        return self.ffn_matrices == 3

    @property
    def layer_parameters(self) -> int:
        """Number of parameters in the matrices of one layer, without norms and biases (under
        0.1 %)."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + self.ffn_matrices * self.hidden * self.ffn

    @property
    def parameters(self) -> int:
        tables = self.vocab * (1 if self.tied else 2) + self.positions
        return self.layers * self.layer_parameters + tables * self.hidden

    def weight_bytes(self, tp: int = 1) -> int:
        """Returns the weights on one of `tp` GPUs, rounded up."""
        return -(-self.parameters * self.weight_dtype_bytes // tp)

    def kv_token_bytes(self, tp: int = 1) -> int:
        """Returns the KV of one token on one of `tp` GPUs. With more than kv_heads GPUs the heads
        are replicated."""
        heads = max(1, -(-self.kv_heads // tp))
        return 2 * self.layers * heads * self.head_dim * self.kv_dtype_bytes


def _llama(name: str, layers: int, hidden: int, heads: int, ffn: int) -> ModelShape:
    return ModelShape(name, layers, hidden, heads, heads, hidden // heads, ffn, 32000)


FP8 = "-fp8"

MODELS: dict[str, ModelShape] = {
    model.name: model
    for model in (
        ModelShape("meta-llama/Llama-3.2-1B", 16, 2048, 32, 8, 64, 8192, 128256, tied=True),
        ModelShape("meta-llama/Llama-3.2-3B", 28, 3072, 24, 8, 128, 8192, 128256, tied=True),
        ModelShape("meta-llama/Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256),
        ModelShape("meta-llama/Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672, 128256),
        ModelShape("meta-llama/Llama-3.3-70B-Instruct", 80, 8192, 64, 8, 128, 28672, 128256),
        ModelShape("meta-llama/Llama-2-70B", 80, 8192, 64, 8, 128, 28672, 32000),
        _llama("meta-llama/Llama-2-7B", 32, 4096, 32, 11008),
        _llama("meta-llama/Llama-2-13B", 40, 5120, 40, 13824),
        _llama("huggyllama/llama-7b", 32, 4096, 32, 11008),
        _llama("huggyllama/llama-13b", 40, 5120, 40, 13824),
        _llama("huggyllama/llama-30b", 60, 6656, 52, 17920),
        _llama("huggyllama/llama-65b", 80, 8192, 64, 22016),
        ModelShape("facebook/opt-6.7b", 32, 4096, 32, 32, 128, 16384, 50272, True, 2, 2050),
        ModelShape("Qwen/Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072, 151936, tied=True),
        ModelShape("Qwen/Qwen3-1.7B", 28, 2048, 16, 8, 128, 6144, 151936, tied=True),
        ModelShape("Qwen/Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 151936, tied=True),
        ModelShape("Qwen/Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 151936),
        ModelShape("Qwen/Qwen3-14B", 40, 5120, 40, 8, 128, 17408, 151936),
        ModelShape("Qwen/Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936),
        ModelShape("Qwen/Qwen2.5-1.5B", 28, 1536, 12, 2, 128, 8960, 151936, tied=True),
        ModelShape("Qwen/Qwen2.5-7B", 28, 3584, 28, 4, 128, 18944, 152064),
        ModelShape("Qwen/Qwen2.5-14B", 48, 5120, 40, 8, 128, 13824, 152064),
        ModelShape("Qwen/Qwen2.5-32B", 64, 5120, 40, 8, 128, 27648, 152064),
        ModelShape("mistralai/Mistral-7B-v0.1", 32, 4096, 32, 8, 128, 14336, 32000),
    )
}


def known_shape(name: str) -> ModelShape | None:
    """Returns the shape of a public model, or None.

    The name is the full one or the part after the slash, case-insensitive, with or without
    "-Instruct". A suffix "-FP8" means 8-bit weights.
    """
    short = short_name(name)
    stem = short.removesuffix(FP8)
    found = next((shape for known, shape in MODELS.items() if short_name(known) == stem), None)
    return in_fp8(found) if found is not None and short.endswith(FP8) else found


def in_fp8(shape: ModelShape) -> ModelShape:
    """Returns the same model with 8-bit weights."""
    return replace(shape, name=shape.name + FP8.upper(), weight_dtype_bytes=1)


def short_name(name: str) -> str:
    """Returns the normalised name that `known_shape` compares."""
    short = name.rpartition("/")[2].lower()
    stem = short.removesuffix(FP8)
    return stem.removesuffix("-instruct").removesuffix("-hf") + short[len(stem) :]
