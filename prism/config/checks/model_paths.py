"""`path` of a model in the YAML: a folder, or a hub's name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from prism.errors import ConfigError, ModelSourceError
from prism.models.gguf.gguf_folder import folder_of_gguf
from prism.models.gguf.gguf_weights import has_gguf
from prism.models.hub.hub_model import check_format, split_name

# Returns the folder of a model by its name in a hub. Raises ConfigError or ModelSourceError.
OfHub = Callable[[str], Path]


def absolute(base_dir: Path, path: str) -> Path:
    return (base_dir / Path(path).expanduser()).resolve()


def hub_name_of(base_dir: Path, path: str) -> str:
    """Returns `path` if it is a hub's name, and empty text if it is a folder. A folder that exists
    is preferred."""
    return "" if split_name(path) is None or absolute(base_dir, path).exists() else path


def folder_of(base_dir: Path, path: str, key: str, of_hub: OfHub) -> tuple[Path, str]:
    """Returns the folder of `path`, and its name in a hub if it is one. That of a GGUF file has its
    configuration, and a link to it. Raises ConfigError and the errors of `hub_folder`."""
    name = hub_name_of(base_dir, path)
    found = hub_folder(name, base_dir, key, of_hub) if name else absolute(base_dir, path)
    return (folder_of_gguf(found, key) if has_gguf(found) else found), name


def check_folder(folder: Path, path: str, key: str) -> None:
    """Raises ConfigError if `folder` is neither a folder nor a GGUF file, or has weights only as
    .bin and the like."""
    if folder.is_dir():
        check_format((each.name for each in folder.iterdir()), f"{key}: {folder}")
        return
    if has_gguf(folder):
        return
    if folder.is_file():
        check_format([folder.name], f"{key}: {folder}")
    raise ConfigError(
        f"{key}: {folder} is not a directory, and {path!r} is not ORG/NAME of a model hub; correct"
        " the path"
    )


def hub_folder(name: str, base_dir: Path, key: str, of_hub: OfHub) -> Path:
    """Returns the folder of a hub's model. Raises ConfigError or ModelSourceError, which names
    `key`."""
    try:
        return of_hub(name)
    except ModelSourceError as error:
        raise ModelSourceError(f"{key}: {error}") from error
    except ConfigError as error:
        folder = absolute(base_dir, name)
        raise ConfigError(f"{key}: {folder} is not a directory, and {error}") from error
