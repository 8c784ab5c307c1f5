"""Folder of a model in GGUF: config.json and tokenizer in the format of transformers, which are
made once from the file's header, and a link to the file."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcached.errors import WeightFileError
from kvcached.weights.gguf_file import GgufHeader, read_header
from prism.errors import ConfigError, ModelSourceError
from prism.models.gguf.gguf_weights import FREQUENCIES
from prism.models.hugging_face import import_transformers
from prism.models.store import Progress, default_directory, is_made, prepare

# Files next to a GGUF file that are preferred to its header, if the first of a group is there.
_GROUPS = (
    ("config.json",),
    ("generation_config.json",),
    (
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
    ),
)
_SCALED = "rope.scaling.type"
_DTYPE = "bfloat16"  # in which models of these families are trained


@dataclass(frozen=True, slots=True)
class GgufFolder:
    """Recipe of a folder (`prism.models.store`). The name is of the file's path, its header and the
    files next to it. Later weights under the same header are those that the link leads to."""

    file: Path
    header: GgufHeader
    name: str
    summary: str = "model in GGUF"
    recipe: int = 1

    @classmethod
    def of(cls, file: Path) -> GgufFolder:
        """Reads the header. Raises WeightFileError."""
        header = read_header(file)
        digest = hashlib.sha256(str(file).encode())
        with file.open("rb") as stream:
            digest.update(stream.read(header.size_bytes))
        for each in _beside(file):
            digest.update(each.name.encode() + b"\0" + each.read_bytes())
        return cls(file, header, f"gguf-{digest.hexdigest()[:32]}")

    def make(self, directory: Path, progress: Progress) -> None:
        """Writes the folder. Raises ModelSourceError for a header that transformers cannot read."""
        beside = {each.name: each for each in _beside(self.file)}
        try:
            if "config.json" not in beside:
                _write_config(self.file, self.header, directory)
            if "tokenizer.json" not in beside:
                _write_tokenizer(self.file, directory)
        except (ValueError, KeyError, TypeError, OSError, NotImplementedError) as error:
            why = " ".join(str(error).split())[:200]
            raise ModelSourceError(
                f"transformers cannot read its header: {why}; give config.json and tokenizer.json"
                " next to it, or *.safetensors"
            ) from error
        for name, each in beside.items():
            shutil.copyfile(each, directory / name)
        (directory / "model.gguf").symlink_to(self.file)


def folder_of_gguf(path: Path, key: str) -> Path:
    """Returns the folder of a model, which is made if it does not exist. `path` is a GGUF file, or
    a folder with only one. Raises ConfigError, which names `key`."""
    if is_made(path):
        return path
    file = _file_in(path, key) if path.is_dir() else path
    try:
        return prepare(GgufFolder.of(file.absolute()), default_directory(), lambda _line: None)
    except WeightFileError as error:
        raise ConfigError(f"{key}: {error}") from error
    except ModelSourceError as error:
        raise ConfigError(f"{key}: {file}: {error}") from error


def _file_in(folder: Path, key: str) -> Path:
    from kvcached import Checkpoint

    try:
        [file] = Checkpoint.open(folder).files
    except WeightFileError as error:
        raise ConfigError(f"{key}: {error}") from error
    return file


def _beside(file: Path) -> Iterator[Path]:
    """Yields the files next to a GGUF file that are preferred to its header. A config.json without
    architectures, which some repositories have, is not."""
    for group in _GROUPS:
        first = file.parent / group[0]
        if first.is_file() and (first.name != "config.json" or _is_whole(first)):
            yield from (path for name in group if (path := file.parent / name).is_file())


def _is_whole(config: Path) -> bool:
    try:
        return "architectures" in json.loads(config.read_text())
    except ValueError:
        return False


def _write_config(file: Path, header: GgufHeader, directory: Path) -> None:
    architecture = header.metadata.get("general.architecture")
    scaled = header.metadata.get(f"{architecture}.{_SCALED}", "none") != "none"
    if scaled or any(tensor.name == FREQUENCIES for tensor in header.tensors):
        raise ValueError("it does not read scaled rotary embeddings (rope_scaling)")
    config = import_transformers().AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    values |= {"dtype": _DTYPE, "_name_or_path": ""}
    values.pop("quantization_config", None)
    values["eos_token_id"] = header.metadata.get("tokenizer.ggml.eos_token_id")
    (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def _write_tokenizer(file: Path, directory: Path) -> None:
    tokenizer = import_transformers().AutoTokenizer.from_pretrained(
        file.parent, gguf_file=file.name
    )
    tokenizer.save_pretrained(directory)
