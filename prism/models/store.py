"""A directory of prepared models: each is complete or absent, and made only once."""

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
    """How to make a model. `recipe` grows when the result changes, so that old ones are remade."""

    @property
    def name(self) -> str: ...

    @property
    def summary(self) -> str: ...

    @property
    def recipe(self) -> int: ...

    def make(self, directory: Path, progress: Progress) -> None:
        """Write all files of the model. Raises ModelSourceError when its source is missing."""


def default_directory() -> Path:
    """$PRISM_HOME/models; PRISM_HOME is ~/.cache/prism unless set."""
    home = os.environ.get("PRISM_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "prism") / "models"


def is_prepared(recipe: Recipe, directory: Path) -> bool:
    try:
        mark = json.loads((directory / recipe.name / RECIPE_FILE).read_bytes())
    except (FileNotFoundError, ValueError):
        return False
    return bool(mark == _mark(recipe))


def prepare(recipe: Recipe, directory: Path, progress: Progress) -> Path:
    """Make the model unless it is there; returns its directory.

    Made aside and renamed, so that a reader never sees half a model and an interrupted run leaves
    none. Of two processes that make the same model, the second keeps the first's. Raises
    ModelSourceError when something that was not made here has the model's place.
    """
    target = directory / recipe.name
    if is_prepared(recipe, directory):
        progress(f"{recipe.name}: ready in {target}")
        return target
    _refuse_foreign(target)
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{recipe.name}-", dir=directory) as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        recipe.make(made, progress)
        (made / RECIPE_FILE).write_text(json.dumps(_mark(recipe)) + "\n")
        _move_in(made, target, recipe, directory)
    progress(f"{recipe.name}: ready in {target}")
    return target


def _refuse_foreign(target: Path) -> None:
    if not target.exists() or (target / RECIPE_FILE).is_file():
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
        # Another process moved its own in since we looked; ours is not needed.
        if not is_prepared(recipe, directory):
            raise
