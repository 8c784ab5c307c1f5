"""Print the requirements of the named extras of pyproject.toml, one a line.

So that they can be installed under constraints before the project itself is built.
"""

import sys
import tomllib
from pathlib import Path


def main(extras: list[str]) -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    for requirement in wanted:
        if not requirement.startswith(project["name"]):
            print(requirement)


if __name__ == "__main__":
    main(sys.argv[1:])
