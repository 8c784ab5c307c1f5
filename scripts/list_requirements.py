"""Print the requirements of the distributions and of the named extras and groups, one per line.

They are installed with constraints before the projects are built.
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
