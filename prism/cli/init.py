"""`prism-serve init`: writes a first YAML."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from prism.errors import ConfigError


def init(
    file: Annotated[Path, typer.Argument(metavar="[YAML]")] = Path("prism.yaml"),
    *,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Folder, GGUF file or hub's name; may be repeated. Default: models in"
            " .cache/models, in ~/.cache/prism/models, and in the hub's cache."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
) -> None:
    """Writes a YAML for this machine: its GPUs, or else half of its free memory, and the models
    that it has. Downloads and starts nothing."""
    from prism.serve.node.new_config import models_here, new_config, shown

    if file.is_dir():
        raise ConfigError(f"{file}: is a folder; give a file, such as {file / 'prism.yaml'}")
    if file.exists() and not force:
        raise ConfigError(f"{file}: exists; choose another name, or replace it with --force")
    if not file.parent.is_dir():
        raise ConfigError(f"{file}: its folder does not exist; create it")
    folder = file.absolute().parent
    named = [shown(Path(each), folder) if Path(each).exists() else each for each in model or []]
    paths = named or models_here(folder)
    text, left = new_config(file, paths, required=bool(model))
    file.write_text(text)
    print(text, end="")
    for each in left:
        print(f"left out: {each.path}: {each.reason}", file=sys.stderr)
    print(f"{file} was written; start it with: prism-serve --config {file}", file=sys.stderr)
