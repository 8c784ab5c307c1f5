"""Models of text and images whose language model is SGLang's and whose vision tower transformers'.

SGLang 0.5.23 lacks their towers (CLIP, SigLIP, InternVL as transformers saves it), or runs them in
a class that makes other pools of the language model's KV (Llama 4).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from sglang.srt.managers.mm_utils import general_mm_embed_routine, pad_mm_tokens
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.models.registry import ModelRegistry
from torch import nn
from transformers import AutoModelForImageTextToText
from transformers.initialization import no_init_weights

from prism.engines.sglang.platform.supported_models import TOWER_CLASS, causal_class
from prism.models.text_part import text_weight

Weights = Iterable[tuple[str, torch.Tensor]]

# Parts of names in files of earlier versions of transformers.
_FORMER = re.compile(r"^model\.|(?<=vision_tower\.)vision_model\.")


def install() -> None:
    """Makes SGLang know the class, before a model is built. Idempotent."""
    ModelRegistry.models[TOWER_CLASS] = TowerModel


class TowerModel(nn.Module):  # type: ignore[misc]
    """A language model of SGLang, and transformers' model without its language model."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        self.config = config
        text = config.text_config
        text.tie_word_embeddings = config.tie_word_embeddings
        language_model, _ = ModelRegistry.resolve_model_cls([causal_class(text.model_type)])
        self.language_model = language_model(text, quant_config=quant_config, prefix=prefix)
        self.tower = _tower(config)

    def pad_input_ids(self, input_ids: Any, images: Any) -> Any:
        return pad_mm_tokens(input_ids, images)

    def get_image_feature(self, items: Iterable[Any]) -> torch.Tensor:
        """Returns the vectors of images, one for each placeholder."""
        return torch.cat([part for item in items for part in self._vectors(item)])

    def _vectors(self, item: Any) -> Iterator[torch.Tensor]:
        parameter = next(self.tower.parameters())
        pixels = item.feature.to(parameter.device, parameter.dtype)
        made = self.tower.get_image_features(pixel_values=pixels, **item.model_specific_data)
        found = getattr(made, "pooler_output", None)
        if found is None:  # Llama 4
            found = self.tower.multi_modal_projector(made.last_hidden_state.flatten(0, 1))
        for part in found if isinstance(found, list | tuple) else [found]:
            yield part.reshape(-1, part.shape[-1])

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any, **more: Any
    ) -> Any:
        return general_mm_embed_routine(
            input_ids=input_ids,
            forward_batch=forward_batch,
            language_model=self.language_model,
            multimodal_model=self,
            positions=positions,
            **more,
        )

    def load_weights(self, weights: Weights) -> None:
        """Loads the weights of both by the names in files of any version."""
        self.language_model.load_weights(self._of_language_model(weights))

    def _of_language_model(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the language model's weights, and loads the others."""
        own = dict(self.tower.named_parameters())
        for name, tensor in weights:
            text = text_weight(name)
            if text is not None:
                yield text, tensor
            elif (parameter := own.get(_FORMER.sub("", name))) is not None:
                default_weight_loader(parameter, tensor)


def _tower(config: Any) -> nn.Module:
    """Returns transformers' model without its language model, with random weights."""
    small = copy.deepcopy(config)
    small.text_config.num_hidden_layers = 0
    small.text_config.vocab_size = 1
    with no_init_weights():
        model = AutoModelForImageTextToText.from_config(small)
    model = getattr(model, "model", model)
    model.language_model = None
    return model
