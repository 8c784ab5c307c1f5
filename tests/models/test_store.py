"""Models are complete or absent, and made once."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from prism.errors import ModelSourceError
from prism.models.store import RECIPE_FILE, Progress, default_directory, is_prepared, prepare


@dataclass
class Recipe:
    name: str = "toy"
    summary: str = "a file"
    recipe: int = 1
    made: list[Path] = field(default_factory=list)
    barrier: threading.Barrier | None = None
    error: Exception | None = None

    def make(self, directory: Path, progress: Progress) -> None:
        progress("writing")
        (directory / "weights").write_text(f"recipe {self.recipe}")
        self.made.append(directory)
        if self.barrier is not None:
            self.barrier.wait(30)
        if self.error is not None:
            raise self.error


def test_a_model_is_made_once(tmp_path: Path) -> None:
    recipe, said = Recipe(), list[str]()
    assert not is_prepared(recipe, tmp_path)
    first = prepare(recipe, tmp_path, said.append)
    assert first == prepare(recipe, tmp_path, said.append) == tmp_path / "toy"
    assert (first / "weights").read_text() == "recipe 1"
    assert len(recipe.made) == 1
    assert is_prepared(recipe, tmp_path)
    assert said[0] == "writing"


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        prepare(Recipe(error=KeyError("power")), tmp_path, print)
    assert list(tmp_path.iterdir()) == []
    prepare(Recipe(), tmp_path, print)


def test_a_newer_recipe_replaces_the_model(tmp_path: Path) -> None:
    prepare(Recipe(), tmp_path, print)
    newer = Recipe(recipe=2)
    assert not is_prepared(newer, tmp_path)
    path = prepare(newer, tmp_path, print)
    assert (path / "weights").read_text() == "recipe 2"
    assert [p.name for p in tmp_path.iterdir()] == ["toy"]


def test_a_directory_of_somebody_else_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "mine").write_text("precious")
    with pytest.raises(ModelSourceError, match="was not made by prism-models; move it away"):
        prepare(Recipe(), tmp_path, print)
    assert (tmp_path / "toy" / "mine").read_text() == "precious"


def test_a_model_with_a_damaged_mark_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / RECIPE_FILE).write_text("{")
    assert not is_prepared(Recipe(), tmp_path)
    prepare(Recipe(), tmp_path, print)
    assert is_prepared(Recipe(), tmp_path)


def test_two_at_once_agree(tmp_path: Path) -> None:
    recipe = Recipe(barrier=threading.Barrier(2))
    threads = [threading.Thread(target=prepare, args=(recipe, tmp_path, print)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(recipe.made) == 2
    assert is_prepared(recipe, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["toy"]


def test_the_default_directory_follows_prism_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PRISM_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "models"
    monkeypatch.delenv("PRISM_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_directory() == tmp_path / ".cache" / "prism" / "models"
