"""The files for contributors and for the hosting site: they parse and name what exists."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from tests.test_tidy import ROOT, name

SITE = ROOT / ".github"
WORKFLOWS = sorted((SITE / "workflows").glob("*.yml"))
FORMS = [SITE / "ISSUE_TEMPLATE" / f"{each}.yml" for each in ("bug", "feature")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROGRAMS = {"coverage", "docker", "helm", "mkdocs", "pip", "python", "sudo"}
# Words of commands that are paths in the tree.
PATHS = re.compile(r"(?:\.ci|deploy|scripts|tests|requirements)/[\w./*-]+")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def locked(package: str) -> str:
    """Returns the version of a package in requirements/lock.txt."""
    lock = (ROOT / "requirements" / "lock.txt").read_text()
    found = re.search(rf"^{re.escape(package)}==(\S+)$", lock, re.MULTILINE)
    assert found, f"{package} is not locked"
    return found.group(1)


def steps(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in read(workflow)["jobs"].values() for step in job["steps"]]


def commands(workflow: Path) -> list[list[str]]:
    """Returns the words of each command that a workflow runs, without what follows a pipe."""
    runs = (
        re.sub(r"\$\{\{.*?\}\}", "VALUE", step["run"]) for step in steps(workflow) if "run" in step
    )
    lines = (line for run in runs for line in run.splitlines())
    return [shlex.split(re.split(r" (?:\||2>|>>) ?", line)[0]) for line in lines]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=name)
def test_a_workflow_bounds_its_rights_and_its_time(workflow: Path) -> None:
    text = read(workflow)
    assert text["permissions"] == {"contents": "read"}
    assert True in text, "YAML reads the key `on` as true"
    for job in text["jobs"].values():
        assert 0 < job["timeout-minutes"] <= 360
        assert job["steps"][0]["uses"].startswith("actions/checkout@")
    assert all(("uses" in step) != ("run" in step) for step in steps(workflow))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=name)
def test_paths_in_a_workflow_exist(workflow: Path) -> None:
    named = set(PATHS.findall(workflow.read_text()))
    assert named
    assert not [path for path in named if not list(ROOT.glob(path))]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=name)
def test_commands_of_a_workflow_exist(workflow: Path) -> None:
    for program, *arguments in commands(workflow):
        if program.startswith(("scripts/", ".ci/", "deploy/")):
            script = ROOT / program
            assert script.stat().st_mode & 0o100
            given = arguments[: arguments.index("--")] if "--" in arguments else arguments
            known = set(re.findall(r"--[\w-]+", script.read_text()))
            assert {each for each in given if each.startswith("--")} <= known
        else:
            assert Path(program).name in PROGRAMS


def test_both_kinds_of_run_are_there() -> None:
    ci, nightly = (SITE / "workflows" / f"{each}.yml" for each in ("ci", "nightly"))
    assert [".ci/run"] in commands(ci)
    assert ["scripts/test", "--lint"] in commands(ci)
    assert ["scripts/test", "--long"] in [each[:2] for each in commands(nightly)]


def test_kvcached_is_tested_on_every_python_that_a_release_is() -> None:
    matrix = read(SITE / "workflows" / "ci.yml")["jobs"]["kvcached"]["strategy"]["matrix"]
    default = re.search(r'pythons="([\d. ]+)"', (ROOT / "scripts" / "release-check").read_text())
    assert default
    assert matrix["python"] == default.group(1).split()


@pytest.mark.parametrize("form", FORMS, ids=name)
def test_an_issue_form_has_fields_with_labels(form: Path) -> None:
    text = read(form)
    assert text["name"]
    assert text["description"]
    fields = [each for each in text["body"] if each["type"] != "markdown"]
    assert all(each["attributes"]["label"] for each in fields)
    assert len({each["id"] for each in fields}) == len(fields) > 0


def test_dependabot_looks_at_folders_that_exist() -> None:
    updates = read(SITE / "dependabot.yml")["updates"]
    assert updates
    assert all((ROOT / each["directory"].lstrip("/")).is_dir() for each in updates)


def test_commit_hooks_have_the_locked_versions() -> None:
    revisions = {
        repo["repo"].rpartition("/")[2]: repo["rev"].removeprefix("v")
        for repo in read(ROOT / ".pre-commit-config.yaml")["repos"]
    }
    assert revisions["ruff-pre-commit"] == locked("ruff")
    assert revisions["mirrors-clang-format"] == locked("clang-format")


def test_locked_packages_admit_every_python_3_11() -> None:
    # Debian 12 has 3.11.2, which pymdown-extensions 13 refused.
    refusing = [
        f"{each.name} {each.version}: {each.metadata['Requires-Python']}"
        for each in distributions()
        if not SpecifierSet(each.metadata["Requires-Python"] or "").contains("3.11.0")
    ]
    assert not refusing


def test_the_citation_is_of_this_version() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["version"] == PROJECT["project"]["version"]
    assert citation["license"] == PROJECT["project"]["license"]
    assert {"cff-version", "message", "title", "authors"} <= set(citation)


def test_markers_in_the_guide_are_declared() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    markers = {
        each.partition(":")[0] for each in PROJECT["tool"]["pytest"]["ini_options"]["markers"]
    }
    assert {"slow", "quick", "long"} <= markers & set(re.findall(r"`(\w+)`", guide))


def test_fragments_have_a_product_and_a_type() -> None:
    settings = PROJECT["tool"]["towncrier"]
    products = {each["path"] for each in settings["section"]}
    types = {each["directory"] for each in settings["type"]}
    fragments = [
        path.relative_to(ROOT / "changelog.d") for path in (ROOT / "changelog.d").glob("*/*")
    ]
    assert {path.parts[0] for path in fragments} <= products
    assert {path.name.split(".")[1] for path in fragments} <= types


def test_towncrier_writes_the_heading_that_a_release_needs(tmp_path: Path) -> None:
    for file in ("pyproject.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / file, tmp_path)
    shutil.copytree(ROOT / "changelog.d", tmp_path / "changelog.d")
    fragment = tmp_path / "changelog.d" / "kvcached" / "+test.fixed.md"
    fragment.parent.mkdir(exist_ok=True)
    fragment.write_text("A test's line.\n")
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "99.0.0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert re.search(r"^## 99\.0\.0 \(", done.stdout, re.MULTILINE)
    assert "### Fixed: kvcached\n\n" in done.stdout
    assert "\n- A test's line.\n" in done.stdout
