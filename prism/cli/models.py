"""`prism-models`: downloads models from a hub, and makes those of the demo and the tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from prism.cli.exit_codes import new_app
from prism.errors import ConfigError, PrismError
from prism.models.smollm2 import SmolLM2
from prism.models.store import Recipe, default_directory, is_prepared, prepare
from prism.models.tiny import TINY_MODELS

RECIPES: dict[str, Recipe] = {r.name: r for r in (SmolLM2(), *TINY_MODELS)}

app = new_app(__doc__)
Names = Annotated[list[str] | None, typer.Argument(help="models to prepare; default: all")]
HubNames = Annotated[list[str], typer.Argument(metavar="NAME[@REVISION]...", help="ORG/NAME")]
Directory = Annotated[Path | None, typer.Option("--dir", help="directory of the models")]


def find_recipes(names: list[str] | None) -> list[Recipe]:
    """Returns the recipes of these models. Raises ConfigError that lists the known models."""
    unknown = [name for name in names or [] if name not in RECIPES]
    if unknown:
        raise ConfigError(f"unknown model {', '.join(unknown)}: choose from {', '.join(RECIPES)}")
    return [RECIPES[name] for name in names or RECIPES]


def say(text: str) -> None:
    typer.echo(text, err=True)


@app.command("prepare", epilog="Example: prism-models prepare tiny-llama --dir .cache/models")
def prepare_command(names: Names = None, directory: Directory = None) -> None:
    """Makes missing models, and prints the directory of each."""
    for recipe in find_recipes(names):
        typer.echo(prepare(recipe, directory or default_directory(), say))


@app.command("list", epilog="Example: prism-models list --dir .cache/models")
def list_command(directory: Directory = None) -> None:
    """Lists the models, and which of them are prepared."""
    place = directory or default_directory()
    for recipe in RECIPES.values():
        state = "ready" if is_prepared(recipe, place) else "-"
        typer.echo(f"{recipe.name:14} {state:6} {recipe.summary}")


@app.command(
    "pull",
    epilog="Examples: prism-models pull Qwen/Qwen3-0.6B   |   prism-models pull"
    " meta-llama/Llama-3.1-8B@main   |   HF_HOME=/data/hf prism-models pull Qwen/Qwen3-8B",
)
def pull_command(names: HubNames) -> None:
    """Downloads models or LoRA adapters from their hub for `path: NAME` of prism-serve, and prints
    the folder of each. A model that is there is brought to the revision's newest commit. After an
    interruption, files that were complete are not downloaded again. docs/model-hubs.md names the
    variables, such as HF_HOME and HF_TOKEN."""
    from prism.models.hub.hub_model import pulled

    for name in names:
        typer.echo(pulled(name, say))


def main() -> None:
    """Runs the command. Exits with code 2 and one line for an unknown name, a missing source,
    package or folder, or a failed download."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        app()
    except PrismError as error:
        say(f"prism-models: {error}")
        sys.exit(2)
    except ModuleNotFoundError as error:
        say(f"prism-models: making models needs the package {error.name}; run scripts/install")
        sys.exit(2)
    except OSError as error:
        say(f"prism-models: {error.filename}: {error.strerror}; choose a folder with --dir")
        sys.exit(2)


if __name__ == "__main__":
    main()
