"""Description of a model, used in other messages."""

from __future__ import annotations

from prism.messages import Wire


class LoraAdapter(Wire, frozen=True):
    """A LoRA adapter of a model."""

    name: str
    path: str
    rank: int
    hub_name: str = ""  # name in a hub, if `path` is a snapshot of it


class LoraSpec(Wire, frozen=True):
    """LoRA adapters of a model, and the resources that an engine prepares for them."""

    adapters: tuple[LoraAdapter, ...] = ()
    rank: int = 0  # largest rank
    # Modules that any adapter changes, by PEFT's name: number of inputs and outputs.
    shapes: dict[str, tuple[int, int]] = {}
    slots: int = 0  # maximum number of adapters in one step
    size_bytes: int = 0  # device memory of all slots, and one for the base model

    def adapter(self, name: str) -> LoraAdapter | None:
        """Returns the adapter called `name`, or None."""
        return next((adapter for adapter in self.adapters if adapter.name == name), None)


class EmbeddingSpec(Wire, frozen=True):
    """Output of an embedding model: the last token's vector, normalized to length 1."""

    size: int  # number of values in a vector
    # Smaller sizes that the model was trained for: these, or any.
    dimensions: tuple[int, ...] = ()
    any_dimensions: bool = False

    def may_have(self, dimensions: int) -> bool:
        """Returns True if a request may ask for vectors of this many values."""
        if dimensions == self.size or dimensions in self.dimensions:
            return True
        return self.any_dimensions and not self.dimensions and dimensions < self.size


class ImageSpec(Wire, frozen=True):
    """Images in a model's prompts."""

    token_id: int  # placeholder, once for each vector of an image
    size_bytes: int = 0  # device memory of an engine for the vision tower's largest step
    prompt_token_id: int | None = None  # in a rendered prompt, once for each image; None: the same


class ExpectedLoad(Wire, frozen=True):
    """Traffic that is expected of a model."""

    rate_rps: float
    prompt_tokens: float  # mean
    output_tokens: float  # mean


class ModelSpec(Wire, frozen=True):
    """Description of a model for every process, built once from the YAML and the model's files.

    Sizes are those of the whole model, also if it is spread over several devices.
    """

    name: str
    path: str
    architecture: str
    dtype: str
    kv_dtype: str
    context_length: int
    num_layers: int
    num_kv_heads: int  # 1 with latent attention
    head_dim: int  # with latent attention, the numbers of a latent
    weight_bytes: int  # resident, as an engine keeps them
    # KV of one token in `kv_dtype`, with the arrangement's padding: K and V of all layers in the
    # main pool, on all devices.
    token_bytes: int
    slo_ttft_s: float
    slo_tpot_s: float
    slo_least_ttft_s: float = 0.0  # tightest SLO that a request may ask for
    slo_least_tpot_s: float = 0.0
    never_evict: bool = False
    pinned_device: str | None = None
    static_share: float | None = None  # fraction of the KV memory, static policy
    expected: ExpectedLoad | None = None
    kv_arrangement: str = "per_layer"  # a `kvcached.layouts.Arrangement`
    # Numbers of a latent that are K's rotary part. None: the model has K and V heads.
    latent_rope_dim: int | None = None
    kv_layers: int = 0  # layers in the main pool; 0: all
    window_layers: int = 0  # with a sliding window, whose KV has a separate pool
    window_tokens: int = 0  # that a token attends to there, with itself
    window_kv_heads: int = 0
    window_head_dim: int = 0
    # Groups of these layers, each as large as `kv_layers`, where all share the blocks of the main
    # pool. 0: they have a separate pool.
    window_groups: int = 0
    state_bytes: int = 0  # of a sequence, whatever its length (Mamba, linear attention)
    whole_state_bytes: int = 0  # part of them that each device of several has
    state_layers: int = 0  # with a state, each of the same size
    # Groups of these layers, as of those with a window. 0: states have a separate pool.
    state_groups: int = 0
    # Numbers that `tp` must divide, in addition to KV heads: what they count, and the number.
    divided: dict[str, int] = {}
    # Part of `weight_bytes`: tensors that engines derive from others, at first in their own memory.
    derived_bytes: int = 0
    # Parts of `weight_bytes`: what each device of several has, such as norms and routers, and the
    # projections of one KV head.
    whole_weight_bytes: int = 0
    kv_head_weight_bytes: int = 0
    tp: int = 1  # number of devices (tensor parallel)
    # Numbers that a policy may choose, ascending; `tp` is the least. Empty: `tp` is fixed.
    degrees: tuple[int, ...] = ()
    # Parsers of answers: a name of the engine, "auto" or "none".
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    adapter: str = ""  # engine adapter; empty: the cluster's default
    block_tokens: int = 16  # tokens of a KV block
    replicas_min: int = 1  # copies that are never evicted
    replicas_max: int = 1
    aliases: tuple[str, ...] = ()
    lora: LoraSpec = LoraSpec()
    embedding: EmbeddingSpec | None = None  # None: the model generates text
    hub_name: str = ""  # name in a hub, if `path` is a snapshot of it
    images: ImageSpec | None = None  # None: the model takes text alone

    @property
    def besides_weights_bytes(self) -> int:
        """Memory of an engine that only this model needs, in addition to weights and KV."""
        return self.lora.size_bytes + (self.images.size_bytes if self.images else 0)

    @property
    def other_kv_dtype(self) -> str:
        """Dtype of the KV cache, "" if it is the model's."""
        return "" if self.kv_dtype == self.dtype else self.kv_dtype

    @property
    def possible_degrees(self) -> tuple[int, ...]:
        """Numbers of devices that a copy may be spread over."""
        return self.degrees or (self.tp,)

    @property
    def fixed_tp(self) -> int | None:
        """Number of devices by the YAML, None if policies may choose it."""
        return None if self.degrees else self.tp

    @property
    def is_plain(self) -> bool:
        """True if all layers keep K and V heads or a latent of all tokens."""
        return not (self.window_layers or self.state_bytes)

    @property
    def own_names(self) -> tuple[str, ...]:
        """Names of the model and its adapters, as access lists have them."""
        return (self.name, *(self.named(adapter.name) for adapter in self.lora.adapters))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model and its adapters that requests may use."""
        return (*self.own_names, *self.aliases)

    @property
    def hub_paths(self) -> dict[str, str]:
        """Folders of the model and its adapters by their names in a hub."""
        folders = {each.hub_name: each.path for each in self.lora.adapters}
        folders[self.hub_name] = self.path
        return {name: path for name, path in folders.items() if name}

    def named(self, adapter: str) -> str:
        """Returns the name of `adapter`, or of the model if it is empty."""
        return f"{self.name}:{adapter}" if adapter else self.name

    def adapter_in(self, name: str) -> str | None:
        """Returns the adapter that `name` refers to, "" for the model itself, or None if it is not
        a name of this model."""
        if name == self.name or name in self.aliases:
            return ""
        base, _, adapter = name.rpartition(":")
        return adapter if base == self.name and self.lora.adapter(adapter) else None
