"""Write docs/api from the docstrings of kvcached's public names.

    python scripts/api_reference.py            rewrite outdated pages
    python scripts/api_reference.py --check    print outdated pages; exit code 1 if there are any

One page for each subject, and an index. A public name without a docstring is an error.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kvcached
import kvcached.prometheus
import kvcached.snapshot
import kvcached.testing

FOLDER = Path(__file__).parent.parent / "docs" / "api"
LINE_CHARS = 88

# page -> title, modules whose public names it holds
PAGES = {
    "device": ("Devices and their usage", ["device", "usage", "driver_memory"]),
    "client": ("Clients", ["client"]),
    "kvcache": ("KV caches", ["kvcache", "group", "ranks"]),
    "handover": ("Blocks of one process in another's", ["handover"]),
    "balloon": ("Giving memory back", ["balloon", "memory_requests"]),
    "layouts": ("Layouts", ["layouts"]),
    "weights": ("Weights", ["weights"]),
    "tensor": ("Tensors", ["tensor", "_core"]),
    "segments": ("Segments in shared memory", ["segments"]),
    "testing": ("Testing", ["testing"]),
    "monitoring": ("Monitoring", ["snapshot", "prometheus"]),
    "errors": ("Exceptions", ["errors"]),
}


class Plain(str):
    """Annotation with its source text as repr, without the quotes that inspect would print."""

    __slots__ = ()
    __repr__ = str.__str__


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(arguments).check
    missing = set(public_names()).difference(*(names_of(page) for page in PAGES))
    if missing:
        raise SystemExit(f"missing in PAGES: {', '.join(sorted(missing))}; add their module")
    pages = {f"{page}.md": page_text(page) for page in PAGES} | {"README.md": index_text()}
    FOLDER.mkdir(exist_ok=True)
    odd = sorted({path.name for path in FOLDER.glob("*.md")} - set(pages))
    stale = [name for name, text in pages.items() if text_of(FOLDER / name) != text]
    if not check:
        for name in stale:
            (FOLDER / name).write_text(pages[name])
        for name in odd:
            (FOLDER / name).unlink()
        return 0
    for name in [*stale, *odd]:
        print(f"docs/api/{name} is out of date: run python scripts/api_reference.py")
    return 1 if stale or odd else 0


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


# --- what is public -------------------------------------------------------------------------


def public_names() -> dict[str, Any]:
    """Returns the public names of the package and of its modules that are not imported by it.

    Type aliases, which cannot have docstrings, are left out.
    """
    found = {
        name: value
        for name in kvcached.__all__
        if inspect.isclass(value := getattr(kvcached, name)) or inspect.isfunction(value)
    }
    modules = (kvcached.errors, kvcached.snapshot, kvcached.prometheus, kvcached.testing)
    for module in modules:
        own = {
            name: value
            for name, value in vars(module).items()
            if getattr(value, "__module__", None) == module.__name__ and name[0] != "_"
        }
        found |= {name: value for name, value in own.items() if name != "from_status"}
    return found


def names_of(page: str) -> list[str]:
    modules = PAGES[page][1]
    return [
        name
        for module in modules
        for name, value in public_names().items()
        if (value.__module__ + ".").startswith(f"kvcached.{module}.")
    ]


def members(owner: type) -> Iterator[tuple[str, Any]]:
    """Yields the public methods and properties of the class and its bases in this package."""
    for base in owner.__mro__:
        if not base.__module__.startswith("kvcached"):
            continue
        for name, value in vars(base).items():
            shown = callable(value) or isinstance(value, property | classmethod | staticmethod)
            field = inspect.ismemberdescriptor(value)
            if name[0] != "_" and shown and not field:
                yield name, value


# --- how it is shown ------------------------------------------------------------------------


def index_text() -> str:
    lines = [
        "# API of kvcached\n",
        "Made from the docstrings by `scripts/api_reference.py`; a test checks that it is",
        "current. How to use it is in [kvcached.md](../kvcached.md).",
    ]
    for page, (title, _) in PAGES.items():
        lines += [f"\n## [{title}]({page}.md)\n", "| name | |", "|---|---|"]
        for name in names_of(page):
            first = documented(public_names()[name]).split("\n\n")[0].replace("\n", " ")
            lines.append(f"| [`{name}`]({page}.md#{name.lower()}) | {cell(first)} |")
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    """Returns the first sentence of a text, for a table."""
    return re.split(r"(?<=[^.A-Z][.]) (?=[A-Z`])", text)[0].replace("|", "\\|")


def page_text(page: str) -> str:
    parts = [f"# {PAGES[page][0]}\n"]
    if page == "errors":
        parts.append(f"```text\n{documented(kvcached.errors)}\n```\n")
    parts += [name_text(name, public_names()[name]) for name in names_of(page)]
    return "\n".join(parts)


def name_text(name: str, item: Any) -> str:
    head = f"## {name}\n\n"
    if not isinstance(item, type):
        return f"{head}{code(signature(name, item))}{documented(item)}\n"
    text = f"{head}{fields(item)}{documented(item)}\n"
    if issubclass(item, kvcached.KvcachedError):
        return text
    return text + "".join(member_text(item, *member) for member in members(item))


def member_text(owner: type, name: str, value: Any) -> str:
    head = f"\n### {owner.__name__}.{name}\n\n"
    if isinstance(value, property):
        kind = value.fget and getattr(value.fget, "__annotations__", {}).get("return")
        return f"{head}{code(f'{name}: {kind}') if kind else ''}{documented(value, name)}\n"
    return f"{head}{code(signature(name, getattr(owner, name)))}{documented(value, name)}\n"


def documented(item: Any, name: str = "") -> str:
    text = inspect.getdoc(item)
    if not text:
        raise SystemExit(f"{name or getattr(item, '__name__', item)} does not have a docstring")
    return text


def code(text: str) -> str:
    return f"```python\n{text}\n```\n\n"


def fields(owner: type) -> str:
    """Returns the fields of a dataclass, with their types and defaults, or "" for other classes."""
    if not dataclasses.is_dataclass(owner):
        return ""
    shown = []
    for field in dataclasses.fields(owner):
        default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
        shown.append(f"{field.name}: {field.type}{default}")
    return code("\n".join(shown))


def signature(name: str, function: Any) -> str:
    """Returns `name(parameters) -> result`, with one parameter a line if it is too long."""
    found = inspect.signature(function)
    listed = [
        parameter.replace(
            annotation=plain(parameter.annotation),
            default=Plain(getattr(parameter.default, "__name__", repr(parameter.default)))
            if parameter.default is not parameter.empty
            else parameter.empty,
        )
        for parameter in found.parameters.values()
        if parameter.name not in {"self", "cls"}
    ]
    shown = found.replace(parameters=listed, return_annotation=plain(found.return_annotation))
    line = f"{name}{shown}"
    if len(line) <= LINE_CHARS:
        return line
    _, _, result = line.rpartition(")")
    return f"{name}(\n" + "".join(f"    {part},\n" for part in starred(listed)) + f"){result}"


def starred(parameters: list[inspect.Parameter]) -> Iterator[str]:
    """Yields each parameter, with a star before the first keyword-only one."""
    keyword_only = False
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            yield "*"
        yield str(parameter)


def plain(annotation: Any) -> Any:
    return Plain(annotation) if isinstance(annotation, str) else annotation


if __name__ == "__main__":
    sys.exit(main())
