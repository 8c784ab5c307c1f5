"""Print what the distributions require, and the named extras and groups of any, one a line.

So that they can be installed under constraints before the projects themselves are built.
"""

import sys
import tomllib
from pathlib import Path

FOLDERS = (".", "prism", "prism_replay", "prism_sim")


def main(names: list[str]) -> None:
    for folder in FOLDERS:
        read = tomllib.loads((Path(folder) / "pyproject.toml").read_text())
        named = read["project"].get("optional-dependencies", {}) | read.get("dependency-groups", {})
        wanted = [
            *read["project"]["dependencies"],
            *(each for n in names for each in named.get(n, ())),
        ]
        for requirement in wanted:
            if not requirement.startswith("prism-"):
                print(requirement)


if __name__ == "__main__":
    main(sys.argv[1:])
