"""The style rules that matter, as tests: small functions, small files, no leftovers."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parent.parent
FUNCTION_LINES_MAX = 60
FUNCTION_LINES_MEDIAN_MAX = 10
CLASS_LINES_MAX = 250
FILE_LINES_MAX = 600
LINE_CHARS_MAX = 100
FOLDER_MODULES_MAX = 15
PRODUCTS = ("kvcached", "lab", "prism", "prism_replay", "prism_sim")
PROCESS_MODULES = {"__init__", "__main__", "main"}
IN_EACH_ADAPTER = {
    "adapter", "contract", "core", "corrections", "host", "loader", "memory", "request_conversion",
    "scheduler", "states",
}  # fmt: skip

# path -> why it may be longer than FILE_LINES_MAX
LONG_FILES: dict[str, str] = {}

# "path name" -> why the class may be longer than CLASS_LINES_MAX
LONG_CLASSES = {
    "kvcached/client.py Client": "public API; most methods are a call of the core",
    "kvcached/device.py Device": "public API; most methods are a call of the core",
    "kvcached/kvcache.py KVCache": "public API; most methods are a call of the core",
    "prism/queueing/request_queue.py RequestQueue": "one method for each operation in Redis",
}

FORBIDDEN = {
    r"/work/|/tmp/inst|/root/": "a path of somebody's machine",
    r"pypi\.org|pythonhosted|download\.pytorch\.org|registry\.npmjs": "a package registry's host",
    r"except\s*:\s*$": "a bare except",
    r"\bpickle\.(loads?|dumps?)\b": "pickling; nothing pickled crosses a socket",
}


def tracked(*suffixes: str) -> list[Path]:
    """Files that git tracks, or would track, with one of these suffixes."""
    out = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    paths = (ROOT / line for line in out.splitlines() if line.endswith(suffixes))
    return sorted(path for path in paths if path.exists())


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Yields (qualified name, lines) of each function, docstring not counted."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{name(path)}:{node.lineno} {node.name}", body_lines(node)


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def classes(path: Path) -> Iterator[tuple[str, int]]:
    """Yields the path and the name of each class, and its lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            yield f"{name(path)} {node.name}", (node.end_lineno or node.lineno) - node.lineno + 1


def code_files() -> list[Path]:
    return tracked(".py", ".cpp", ".h", ".lua")


def test_functions_are_short() -> None:
    sized = [item for path in tracked(".py") for item in functions(path)]
    too_long = [where for where, lines in sized if lines > FUNCTION_LINES_MAX]
    assert not too_long
    product = [lines for where, lines in sized if not where.startswith("tests/")]
    assert median(product) < FUNCTION_LINES_MEDIAN_MAX


def test_classes_are_short() -> None:
    sized = dict(item for path in tracked(".py") for item in classes(path))
    too_long = {where for where, lines in sized.items() if lines > CLASS_LINES_MAX}
    assert too_long == set(LONG_CLASSES)


def cpp_blocks(text: str) -> Iterator[tuple[int, int]]:
    """Yields (first line, lines) of every outermost function body in formatted C++."""
    start = 0
    for number, line in enumerate(text.splitlines(), 1):
        opens = re.match(r"^(  )?\S.*\)( const| noexcept| override| final)*.* \{$", line)
        control = re.match(r"^\s*(if|for|while|switch|else|do|namespace|class|struct)\b", line)
        if opens and not control and not start:
            start, indent = number, len(opens.group(1) or "")
        elif start and line == " " * indent + "}":
            yield start, number - start + 1
            start = 0


def test_cpp_functions_are_short() -> None:
    too_long = [
        f"{name(path)}:{line}"
        for path in tracked(".cpp", ".h")
        for line, lines in cpp_blocks(path.read_text())
        if lines > FUNCTION_LINES_MAX
    ]
    assert not too_long


def test_files_are_short() -> None:
    lengths = {name(path): len(path.read_text().splitlines()) for path in code_files()}
    too_long = {path for path, lines in lengths.items() if lines > FILE_LINES_MAX}
    assert too_long == set(LONG_FILES)


def test_folders_are_small() -> None:
    modules = [path for product in PRODUCTS for path in modules_of(product)]
    sizes = Counter(name(path.parent) for path in modules if path.name != "__init__.py")
    large = {folder for folder, size in sizes.items() if size > FOLDER_MODULES_MAX}
    assert not large


def test_base_names_are_unique_in_a_product() -> None:
    """Allows the names in IN_EACH_ADAPTER once in each adapter of an engine and once elsewhere."""
    for product in PRODUCTS:
        owners = [(path.stem, owner(path)) for path in modules_of(product)]
        twice = {each for each, count in Counter(owners).items() if count > 1}
        assert not {stem for stem, _ in twice} - PROCESS_MODULES, product
        names = Counter(stem for stem, _ in set(owners))
        shared = {stem for stem, count in names.items() if count > 1}
        assert shared <= IN_EACH_ADAPTER | PROCESS_MODULES, product


def owner(module: Path) -> str:
    """Returns the folder of the engine's adapter that has the module, "" for all other modules."""
    found = re.match(r"(kvcached|prism)/engines/(fake|sglang|transformers|vllm)/", name(module))
    return found.group() if found else ""


def modules_of(product: str) -> list[Path]:
    return [path for path in tracked(".py") if name(path).startswith(f"{product}/")]


def test_lines_are_short() -> None:
    too_long = [
        f"{name(path)}:{number}"
        for path in code_files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > LINE_CHARS_MAX
    ]
    assert not too_long


@pytest.mark.parametrize("pattern", FORBIDDEN)
def test_nothing_forbidden(pattern: str) -> None:
    files = tracked(".py", ".cpp", ".h", ".md", ".toml", ".yaml", ".sh", ".txt", ".lua", "scripts/")
    found = [
        f"{name(path)}: {FORBIDDEN[pattern]}"
        for path in files
        if path != Path(__file__) and re.search(pattern, path.read_text(), re.MULTILINE)
    ]
    assert not found


def test_every_test_file_would_be_collected() -> None:
    helpers = {"conftest.py", "__init__.py"}
    odd = [
        name(path)
        for path in (ROOT / "tests").rglob("*.py")
        if path.name not in helpers
        and not path.name.startswith("test_")
        and "def test_" in path.read_text()
    ]
    assert not odd


def test_distribution_is_not_called_kvcached() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] != "kvcached"


def test_base_requirements_name_no_engine() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [r for r in project["dependencies"] if re.match("torch|sglang|vllm|cuda", r)]


def test_decisions_state_context_choice_and_cost() -> None:
    incomplete = [
        f"{name(path)} lacks {word}"
        for path in tracked(".md")
        if path.parent.name == "decisions" and re.match(r"\d{3}-", path.name)
        for word in ("Context", "Choice", "Cost")
        if not re.search(rf"^## {word}$", path.read_text(), re.MULTILINE)
    ]
    assert not incomplete
