"""The model that messages are about."""

from __future__ import annotations

from prism.messages import Wire


class LoraAdapter(Wire, frozen=True):
    name: str
    path: str
    rank: int


class LoraSpec(Wire, frozen=True):
    """The LoRA adapters of a model, and what an engine makes ready for them."""

    adapters: tuple[LoraAdapter, ...] = ()
    rank: int = 0  # the largest of theirs
    # The modules that any of them changes, as PEFT calls them: inputs and outputs.
    shapes: dict[str, tuple[int, int]] = {}
    slots: int = 0  # adapters that one step can compute with
    size_bytes: int = 0  # of device memory for all slots and the base model's

    def adapter(self, name: str) -> LoraAdapter | None:
        return next((adapter for adapter in self.adapters if adapter.name == name), None)


class EmbeddingSpec(Wire, frozen=True):
    """Of a model whose answers are vectors, of length 1: of an input's last token."""

    size: int  # values of a vector
    # Fewer values that the model was trained to be cut to: these, or any number of them.
    dimensions: tuple[int, ...] = ()
    any_dimensions: bool = False

    def may_have(self, dimensions: int) -> bool:
        if dimensions == self.size or dimensions in self.dimensions:
            return True
        return self.any_dimensions and not self.dimensions and dimensions < self.size


class ModelSpec(Wire, frozen=True):
    """What every process needs to know of a model; built once from the YAML and its files.

    Sizes are those of the whole model, also if it is spread over several devices.
    """

    name: str
    path: str
    architecture: str
    dtype: str
    kv_dtype: str
    context_length: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    weight_bytes: int  # resident, in `dtype`
    # KV of one token over all layers, K and V, in `kv_dtype`, with the gap that the arrangement
    # leaves.
    token_bytes: int
    slo_ttft_s: float
    slo_tpot_s: float
    slo_least_ttft_s: float = 0.0  # the tightest that a request may ask for
    slo_least_tpot_s: float = 0.0
    never_evict: bool = False
    pinned_device: str | None = None
    static_share: float | None = None
    kv_arrangement: str = "per_layer"  # a name of kvcached's
    tp: int = 1  # devices that it is spread over (tensor parallel)
    # Of its answers: a name of the engine's, "auto" or "none".
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    adapter: str = ""  # of its engines; empty: the cluster's
    block_tokens: int = 16  # of a KV block
    replicas_min: int = 1  # copies that stay up
    replicas_max: int = 1
    aliases: tuple[str, ...] = ()
    lora: LoraSpec = LoraSpec()
    embedding: EmbeddingSpec | None = None  # None: it generates text

    @property
    def own_names(self) -> tuple[str, ...]:
        """Of the model and its adapters, as access lists have them."""
        return (self.name, *(self.named(adapter.name) for adapter in self.lora.adapters))

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may call it and its adapters."""
        return (*self.own_names, *self.aliases)

    def named(self, adapter: str) -> str:
        """The name of its adapter, or its own."""
        return f"{self.name}:{adapter}" if adapter else self.name

    def adapter_in(self, name: str) -> str | None:
        """The adapter that a request for `name` means, "" for none; None: no such model."""
        if name == self.name or name in self.aliases:
            return ""
        base, _, adapter = name.rpartition(":")
        return adapter if base == self.name and self.lora.adapter(adapter) else None
