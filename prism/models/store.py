"""Directory of prepared models, each of which is complete or absent and is made only once."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from prism.errors import ModelSourceError

Progress = Callable[[str], None]
RECIPE_FILE = "prism-recipe.json"


class Recipe(Protocol):
    """Recipe of a model."""

    @property
    def name(self) -> str: ...

    @property
    def summary(self) -> str: ...

    @property
    def recipe(self) -> int:
        """Version of the recipe. Models of older versions are made again."""

    def make(self, directory: Path, progress: Progress) -> None:
        """Writes all files of the model. Raises ModelSourceError if its source is missing."""


def default_directory() -> Path:
    """Returns $PRISM_HOME/models; PRISM_HOME is ~/.cache/prism by default."""
    home = os.environ.get("PRISM_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "prism") / "models"


def is_prepared(recipe: Recipe, directory: Path) -> bool:
    try:
        mark = json.loads((directory / recipe.name / RECIPE_FILE).read_bytes())
    except (FileNotFoundError, ValueError):
        return False
    return bool(mark == _mark(recipe))


def is_made(folder: Path) -> bool:
    """Returns whether `prepare` made the folder."""
    return (folder / RECIPE_FILE).is_file()


def prepare(recipe: Recipe, directory: Path, progress: Progress) -> Path:
    """Makes the model unless it exists. Returns its directory.

    The model is made in a temporary directory and renamed, so that readers never see an incomplete
    model and an interrupted run leaves none. If two processes make the same model, that of the
    first is used. Raises ModelSourceError if the model's path exists and was not made here.
    """
    target = directory / recipe.name
    if is_prepared(recipe, directory):
        progress(f"{recipe.name}: ready in {target}")
        return target
    _reject_foreign(target)
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{recipe.name}-", dir=directory) as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        recipe.make(made, progress)
        (made / RECIPE_FILE).write_text(json.dumps(_mark(recipe)) + "\n")
        _move_in(made, target, recipe, directory)
    progress(f"{recipe.name}: ready in {target}")
    return target


def _reject_foreign(target: Path) -> None:
    if not target.exists() or is_made(target):
        return
    if not target.is_dir() or any(target.iterdir()):
        raise ModelSourceError(
            f"{target} was not made by prism-models; move it away, or choose another folder"
        )


def _mark(recipe: Recipe) -> dict[str, object]:
    return {"name": recipe.name, "recipe": recipe.recipe}


def _move_in(made: Path, target: Path, recipe: Recipe, directory: Path) -> None:
    if is_prepared(recipe, directory):
        return
    if target.exists():
        shutil.move(target, made.parent / "old")
    try:
        made.rename(target)
    except OSError:
        # Another process has installed the model meanwhile, so this one is not needed.
        if not is_prepared(recipe, directory):
            raise
