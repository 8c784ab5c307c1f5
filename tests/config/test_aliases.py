"""Aliases in YAML: values may be repeated, but a few lines cannot stand for a billion values."""

from __future__ import annotations

from pathlib import Path

import pytest

from prism.config.api_keys import add_key
from prism.config.reader import parse
from prism.config.schema.access import ApiKey
from prism.errors import ConfigError


def bomb(first: str, level: str) -> str:
    """Returns 40 levels of aliases, each with ten of the level before."""
    levels = (f"a{n}: &a{n} {level % ', '.join([f'*a{n - 1}'] * 10)}\n" for n in range(1, 41))
    return f"a0: &a0 {first}\n" + "".join(levels)


BOMBS = {
    "lists": bomb("[x]", "[%s]"),
    "merged": bomb("{x: 1}", "{<<: [%s]}"),
    "itself": "a: &a [*a]\n",
    "itself within": "a: &a {b: [x, *a]}\n",
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_is_refused_with_its_place(kind: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^line \d+, column \d+: aliases expand it to more than 1000000"
    ):
        parse(BOMBS[kind])


def test_a_bomb_among_keys_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(BOMBS["lists"])
    file.chmod(0o600)
    with pytest.raises(
        ConfigError, match=r"^access\.keys: .*keys\.yaml: line 7, .* aliases expand it to"
    ):
        add_key(file, ApiKey("a", ""))


def test_values_may_be_repeated() -> None:
    text = "a: &a {x: [1, 2]}\nb: [*a, *a]\nc: {<<: *a, y: 3}\n"
    one = {"x": [1, 2]}
    assert parse(text) == {"a": one, "b": [one, one], "c": {"x": [1, 2], "y": 3}}
    many = "a: &a [" + "x, " * 1000 + "]\nb: [" + "*a, " * 900 + "]\n"
    assert len(parse(many)["b"]) == 900
