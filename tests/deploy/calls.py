"""Calls of packages of requirements/deploy.txt, by their Python: reads the name of a function and
its arguments as JSON from stdin, and prints the result as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any


def compose_problem(data: dict[str, Any]) -> str:
    """Returns why a compose file is not valid, or an empty string."""
    from compose_spec import PyCompose

    try:
        PyCompose.from_json(json.dumps(data)).validate()
    except ValueError as error:
        return str(error)
    return ""


def lint(chart: str, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the findings of `helm lint --strict`."""
    import helm_python

    found: dict[str, Any] = helm_python.lint(chart, values=values, strict=True)
    return found


def render(chart: str, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the manifests by their templates, as `helm template`, or the error."""
    import helm_python

    try:
        with helm_python.Chart.load(chart) as loaded:
            loaded.validate_schema(loaded.merge_values(values))
            return {"files": loaded.render(values, name="demo", namespace="prod")}
    except helm_python.HelmError as error:
        return {"error": str(error)}


def kubernetes_problem(objects: list[dict[str, Any]], version: str) -> str:
    """Returns why an object is not valid in a version of Kubernetes, or an empty string."""
    import kubernetes_validate

    try:
        for each in objects:
            kubernetes_validate.validate(each, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    function, arguments = json.load(sys.stdin)
    print(json.dumps(globals()[function](*arguments)))
