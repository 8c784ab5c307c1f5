"""The rules for English text that a machine can check: docstrings, comments, messages, names.

python -m tests.test_prose prism/agent docs/operating.md    prints what breaks a rule there
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Files and folders that follow the rules.
CHECKED = (
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "README.md",
    "SECURITY.md",
    "bench",
    "csrc",
    "deploy",
    "docs/decisions",
    ":(glob)docs/*.md",
    "examples",
    "kvcached",
    "kvcached_plugins",
    "lab",
    "patches",
    "prism",
    "prism_replay",
    "prism_sim",
    "requirements",
    "scripts",
    "tests",
    "traces",
)
# Records of their day, whose words stay.
DATED = ("lab/campaigns", "lab/studies")
SUFFIXES = (".py", ".pyi", ".cpp", ".h", ".lua", ".md", ".sh", ".yaml", ".toml")

# The first word of any docstring.
FIRST_WORD = re.compile(
    r"(What|Who|Whose|How|Which|Where|Whether|Why|When|Until|Of|From|For|As|At|In|On|Between|By|To"
    r"|With|Without|After|Before|During|If|Unless|While|Because|So|But|And|Or|Then|There|Nothing"
    r"|Everything|Nobody|Not|Only|Its|It|They|Their|These|Those|That|This|Them)\b"
)
# The first word of a function's docstring: a verb in the third person.
VERB = re.compile(r"(Is|Has|Does|[A-Z][a-z-]+s)\b")

WORDS = {
    r"\b(nobody|somebody|whoever|anybody|everybody|someone|no one)\b": "name the process",
    r"\bbeside\b": "say 'next to', 'in addition to' or 'with'",
    r"\bbehind\b(?! (a|the|nginx|haproxy)\b.*prox|ly)": "say 'after', 'stored in' or 'below'",
    r"\b(lies|lie|lay) (in|at|on|there|below|above)\b": "say 'is in' or 'is stored in'",
    r"\bstands\b(?! for)": "say 'is'",
    r"\b(goes|go|went|gone|going) on\b": "say 'continues' or 'resumes'",
    r"\bof (its|their|our|his) own\b": "say 'a separate' or 'its own'",
    r"\bfor good\b": "say 'permanently'",
    r"\b(makes?|made|making) way\b": "say 'is evicted' or 'is moved'",
    r"\bno bound\b": "say 'is unlimited'",
    r"\b(ends?|ended|fails?|failed|refused?|rejected?|stops?) by name\b": "say with which code",
    r"\b(is|are|was|were) no (?!longer|more than|less than|such)": "say 'is not a'",
    r"\b(has|have|had) not (a|an|the|any|what)\b": "say 'does not have'",
}
# Of code alone: a document may speak of people.
CODE_WORDS = {r"\bwho\b": "name the process", r"\bwhose\b(?= \w+ed\b)": "name the process"}
NAMES = re.compile(
    r"(^|_)(news|mended|distrust|seat|patiently|patience|told|tells?|hopeless|folk|mend)(_|$)"
)


def files_in(place: str) -> list[Path]:
    """Returns the tracked text files of a file or folder."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "--", place]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = (line for line in listed.splitlines() if not line.startswith(DATED))
    found = (ROOT / line for line in lines if line.endswith(SUFFIXES))
    return sorted(path for path in found if path.exists())


def problems(path: Path) -> Iterator[str]:
    """Yields place and remedy of everything in a file that breaks a rule."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from problems_of_python(text, tests=path.is_relative_to(ROOT / "tests"))
    else:
        rules = WORDS if path.suffix == ".md" else WORDS | CODE_WORDS
        yield from word_problems(enumerate(text.splitlines(), 1), rules)


def problems_of_python(text: str, *, tests: bool) -> Iterator[str]:
    yield from docstring_problems(text)
    yield from name_problems(text)
    yield from word_problems(prose_of_python(text, tests=tests), WORDS | CODE_WORDS)


def word_problems(pieces: Iterable[tuple[int, str]], rules: dict[str, str]) -> Iterator[str]:
    for line, piece in pieces:
        for pattern, remedy in rules.items():
            if found := re.search(pattern, piece, re.IGNORECASE):
                yield f"{line}: '{found.group()}': {remedy}"


def docstring_problems(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        doc = ast.get_docstring(node)
        if not doc:
            continue
        line = node.body[0].lineno
        if FIRST_WORD.match(doc):
            yield f"{line}: a docstring opens with '{doc.split()[0]}'"
        elif is_function(node) and not VERB.match(doc):
            yield f"{line}: a function's docstring opens with '{doc.split()[0]}', not with a verb"


def is_function(node: ast.AST) -> bool:
    """Returns whether a docstring must open with a verb: a property's names its value."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    return not any("property" in ast.unparse(each) for each in node.decorator_list)


def prose_of_python(text: str, *, tests: bool) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of each line of each comment and string. Most strings of tests are data,
    so that of those only the ones in triple quotes are read."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.STRING and tests and '"""' not in token.string:
            continue
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line


def name_problems(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", node.name).lower()
            if NAMES.search(snake):
                yield f"{node.lineno}: the name '{node.name}': use the field's term"


@pytest.mark.parametrize("place", CHECKED)
def test_prose_follows_the_rules(place: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{each}" for path in files_in(place) for each in problems(path)
    ]
    assert not found


def test_a_rule_finds_what_breaks_it() -> None:
    text = "def told(x):\n    '''What it says.'''\n    # nobody waits beside it\n"
    assert len(list(problems_of_python(text, tests=False))) == 4


if __name__ == "__main__":
    for place in sys.argv[1:]:
        for path in files_in(place):
            for problem in problems(path):
                print(f"{path.relative_to(ROOT)}:{problem}")
