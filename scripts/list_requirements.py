"""Print what both distributions require, and the named extras and groups of either, one a line.

So that they can be installed under constraints before the projects themselves are built.
"""

import sys
import tomllib
from pathlib import Path

FILES = ("pyproject.toml", "prism/pyproject.toml")


def main(names: list[str]) -> None:
    for file in FILES:
        read = tomllib.loads(Path(file).read_text())
        named = read["project"]["optional-dependencies"] | read.get("dependency-groups", {})
        wanted = [
            *read["project"]["dependencies"],
            *(each for n in names for each in named.get(n, ())),
        ]
        for requirement in wanted:
            if not requirement.startswith("prism-"):
                print(requirement)


if __name__ == "__main__":
    main(sys.argv[1:])
