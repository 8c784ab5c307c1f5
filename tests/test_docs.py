"""The documents' links lead somewhere, their examples run, and the index has every decision."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml

from prism.config.reader import convert
from prism.config.schema.cluster_config import ServeYaml
from prism_sim.scenario.config import SimYaml
from tests.test_tidy import PRODUCTS, modules_of, name, tracked

ROOT = Path(__file__).parent.parent
DECISIONS = ROOT / "docs" / "decisions"
STATUS = re.compile(r"accepted|moved|(amended|superseded) by \[?\d{3}")


def dated(path: Path) -> bool:
    """Returns whether the document is a dated record, which keeps the links of that day."""
    return path.name == "CHANGELOG.md" or path.parent.name in ("campaigns", "studies")


def documents() -> list[Path]:
    return [path for path in tracked(".md") if not dated(path)]


def anchors(document: Path) -> set[str]:
    """Returns the anchors of its headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def links(document: Path) -> list[str]:
    """Targets inside the repository."""
    text = re.sub(r"```.*?```|`[^`]*`", "", document.read_text(), flags=re.DOTALL)
    found = re.findall(r"\]\(([^)\s]+)\)", text)
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def leads_somewhere(document: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    there = (document.parent / path) if path else document
    if not there.exists():
        return False
    return not anchor or there.suffix != ".md" or anchor in anchors(there)


@pytest.mark.parametrize("document", documents(), ids=name)
def test_no_link_is_dead(document: Path) -> None:
    assert not [link for link in links(document) if not leads_somewhere(document, link)]


@pytest.mark.parametrize("document", documents(), ids=name)
def test_files_that_a_document_names_exist(document: Path) -> None:
    folders = "bench|csrc|examples|kvcached|lab|prism|prism_replay|prism_sim|scripts|tests|traces"
    named = re.findall(rf"`((?:{folders})/[\w./-]+\.\w+)", document.read_text())
    assert not [path for path in named if not (ROOT / path).exists()]


def docstrings(path: Path) -> Iterator[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, kinds):
            yield ast.get_docstring(node) or ""


def test_modules_that_a_docstring_names_exist() -> None:
    """Accepts paths from the module's folder or from a folder above it."""
    gone = [
        f"{name(path)}: {named}"
        for product in PRODUCTS
        for path in modules_of(product)
        for text in docstrings(path)
        for named in re.findall(r"(?<![\w/.{-])([\w/]+\.py)\b", text)
        if not any((folder / named).exists() for folder in path.parents)
    ]
    assert not gone


def test_the_index_has_every_decision_once() -> None:
    files = {path.name for path in DECISIONS.glob("*.md")} - {"README.md"}
    index = (DECISIONS / "README.md").read_text()
    rows = re.findall(r"^\| \[(\d{3})\]\(([^)]+)\) \|.*\| (.*) \|$", index, re.MULTILINE)
    assert sorted(file for _, file, _ in rows) == sorted(files)
    assert [number for number, file, _ in rows] == [file[:3] for _, file, _ in rows]
    assert not [number for number, _, status in rows if not STATUS.match(status)]


def test_cited_decisions_exist() -> None:
    known = {path.name[:3] for path in DECISIONS.glob("*.md")}
    cited = [
        f"{name(path)}: {number}"
        for path in tracked(".md", ".py", ".h", ".cpp", ".yaml", ".lua")
        if not dated(path)
        for number in re.findall(r"\b[Dd]ecisions? (\d{3})\b", path.read_text())
        if number not in known
    ]
    assert not cited


def test_every_configuration_is_read() -> None:
    texts = [(ROOT / file).read_text() for file in ("README.md", "docs/quick-start.md")]
    texts.append((ROOT / "docs" / "prism-sim.md").read_text())
    blocks = [b for text in texts for b in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    for data in map(yaml.safe_load, blocks):
        convert(data, SimYaml if "gpus" in data else ServeYaml)
    assert len(blocks) >= 3


def ran(document: str, having: str, **replaced: str) -> dict[str, Any]:
    """Runs the document's program that contains `having`; returns the names that it defines."""
    programs = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    (code,) = [program for program in programs if having in program]
    for old, new in replaced.items():
        code = code.replace(old, new)
    names: dict[str, Any] = {}
    exec(compile(code, document, "exec"), names)
    return names


def test_the_program_on_step_costs_runs() -> None:
    cost = ran("docs/costs.md", "cost_model")["cost"]
    assert 0 < cost.prefill_s(1024) < 1


def test_the_program_on_simulations_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    results = ran("docs/prism-sim.md", "simulate", **{"results/notebook": str(tmp_path)})["results"]
    assert len(results.requests) > 100
    assert (tmp_path / "models.parquet").exists()


def test_the_readmes_program_on_kvcached_runs() -> None:
    namespace = f'namespace="t{uuid4().hex[:10]}", capacity_bytes'
    assert len(ran("README.md", "import kvcached", capacity_bytes=namespace)["blocks"]) == 64
