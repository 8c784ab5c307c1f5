"""Write the references of both YAML files and of the simulator's tables.

The text comes from the classes and from the comments above their fields.

    python scripts/config_reference.py            rewrite outdated pages
    python scripts/config_reference.py --check    print outdated pages; exit code 1 if there are any

A field without a comment is an error, unless it is a section.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec.structs import FieldInfo

from prism.config.schema.cluster_config import ServeYaml
from prism.config.schema.units import format_size
from prism_sim.output.tables import TABLES
from prism_sim.scenario.config import GpuTypeYaml, SimYaml

DOCS = Path(__file__).parent.parent / "docs"
KINDS = {
    "str": "text",
    "int": "whole number",
    "float": "number",
    "bool": "true or false",
    "Seconds": "time",
    "Bytes": "size",
    "Capacity": "size or part",
}
UNITS = """
A size is a number and a unit: `64KiB`, `1.5GiB`, `8GB`; `8G` is `8GiB`. A time is a number and a
unit: `500ms`, `45s`, `10m`. An unknown key or a wrong value is an error that names the key.
"""
SERVE = """# Configuration

One YAML file describes a cluster. `scripts/config_reference.py` writes this page.

```sh
prism-serve check examples/demo.yaml              # checks the file, prints which models fit
prism-serve --config examples/demo.yaml           # checks the file and starts the cluster
```

Only `devices` (with several machines `nodes`) and `models` are required.
[examples/demo.yaml](../examples/demo.yaml) is a complete file.
"""
SIM = """# Configuration of prism-sim

One YAML file describes a simulation. `scripts/config_reference.py` writes this page. `prism-sim
example` prints a complete file. `--set engine.mixed_chunk=true` sets a key on the command line.
[prism-sim.md](prism-sim.md) describes the simulation. Only `models` is required.
"""
RESULTS = """# Results of prism-sim

`prism-sim run --out DIR` writes four tables as `NAME.csv`. With polars (`pip install
'./prism_sim[frames]'`) it also writes `NAME.parquet`. `simulate` of `prism_sim` returns the same
tables as DataFrames ([prism-sim.md](prism-sim.md)). Columns keep their names and meanings. Later
versions may add columns. `scripts/config_reference.py` writes this page.

A missing value is empty in CSV, and null in Parquet and DataFrames. `--no-requests` leaves out the
table of requests. DIR also contains `results.json` (all except the requests), `report.html` and,
with `--timeline`, a Chrome trace.
"""
OVER_SEEDS = """
## Tables over seeds

`sweep`, `plan`, and `run --seeds N` write these as CSV; `compare` of `prism_sim` returns them.

| file | rows |
|---|---|
| `sweep.csv`, `run.csv` | One per point and SLO scale: means over the seeds. |
| `plan.csv` | One per policy. |
| `seeds.csv` | One per point, seed and SLO scale. |
| `differences.csv` | One per point and SLO scale, for all policies but that in `against`. |

Values in `differences.csv` are means over seeds: those of the policy, less those of `against` with
the same seed. The file needs several policies and seeds. Columns with the varied keys, `policy`,
`gpus` and `seed` identify the point, `judged_at` is the SLO scale, and `seeds` the number of seeds.
`NAME_ci95` is the half-width of the 95 % interval of the mean NAME. `problem` says why a point
could not be simulated. With `sweep --requests` and `plan --requests` the column `requests` of
`seeds.csv` has the path of the point's table of requests, with a Parquet file next to it if polars
is installed.

| column | what it is |
|---|---|
| `attainment_ttft`, `attainment_tpot` | Part of the requests within that SLO, 0 to 1. |
| `attainment_e2e`, `attainment_all` | Likewise, the end-to-end SLO, and all three. |
| `ttft_p99_ms`, `tpot_p99_ms`, `e2e_p99_ms` | P99 over completed requests. |
| `normalized_latency` to `output_tokens_per_active_s` | As in `models`, over all requests. |
| `busy` | The part of the time in which an engine computed, mean over the GPUs. |
| `activations`, `migrations`, `retractions` | Numbers of these. |
| `unserved`, `context_length_exceeded`, `kv_memory_exceeded` | Requests that ended with the code. |
"""
PAGES = {"configuration.md": (SERVE, ServeYaml), "prism-sim-configuration.md": (SIM, SimYaml)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(arguments).check
    pages = {
        DOCS / name: head + UNITS + "".join(section(struct, ""))
        for name, (head, struct) in PAGES.items()
    }
    pages[DOCS / "prism-sim-configuration.md"] += "".join(section(GpuTypeYaml, "types[]"))
    pages[DOCS / "prism-sim-results.md"] = RESULTS + "".join(map(table, TABLES)) + OVER_SEEDS
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if check:
            print(f"docs/{path.name} is out of date: run python scripts/config_reference.py")
        else:
            path.write_text(pages[path])
    return 1 if check and stale else 0


def table(name: str) -> str:
    """Returns the section of a table of results."""
    found = TABLES[name]
    head = f"\n## {name}\n\n{found.note}\n\n| column | type | what it is |\n|---|---|---|\n"
    return head + "".join(f"| `{c.name}` | {c.kind} | {c.note} |\n" for c in found.columns)


def section(struct: type[msgspec.Struct], path: str) -> Iterator[str]:
    """Yields the struct's table, then those of the structs in it."""
    yield f"\n## `{path}`\n\n{inspect.getdoc(struct)}\n\n" if path else "\n## The whole file\n\n"
    yield "| key | type | default | what it does |\n|---|---|---|---|\n"
    fields, known = msgspec.structs.fields(struct), notes(struct)
    yield from (row(field, known, path) for field in fields)
    for field in fields:
        if inner := struct_in(field.type):
            yield from section(inner, place(path, field))


def row(field: FieldInfo, known: dict[str, str], path: str) -> str:
    inner, note = struct_in(field.type), known.get(field.name, "")
    if inner:
        where = place(path, field)
        link = f"See [`{where}`](#{re.sub(r'[^a-z_-]', '', where.lower())})."
        note = f"{note} {link}".strip()
    if not note:
        raise SystemExit(f"{place(path, field)} does not have a comment above its field")
    cells = (f"`{field.encode_name}`", kind(field.type), default(field), note.replace("|", "\\|"))
    return f"| {' | '.join(cells)} |\n"


def place(path: str, field: FieldInfo) -> str:
    listed = "[]" if struct_in(field.type) and get_origin(field.type) is list else ""
    return f"{path}.{field.encode_name}{listed}".lstrip(".")


def struct_in(annotation: Any) -> type[msgspec.Struct] | None:
    """Returns the struct that an annotation is, or is a list of, or None."""
    inner = get_args(annotation)[0] if get_args(annotation) else annotation
    return inner if isinstance(inner, type) and issubclass(inner, msgspec.Struct) else None


def kind(annotation: Any) -> str:
    if get_origin(annotation) in (list, tuple):
        return f"list of {kind(get_args(annotation)[0])}s"
    if get_origin(annotation) is dict:
        return "mapping"
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) in (types.UnionType, Union):
        return " or ".join(kind(part) for part in get_args(annotation) if part is not type(None))
    return "section" if struct_in(annotation) else KINDS[annotation.__name__]


def default(field: FieldInfo) -> str:
    if field.required:
        return "required"
    if field.default in (None, (), msgspec.NODEFAULT) or struct_in(field.type):
        return ""
    match type(field.default).__name__:
        case "Bytes":
            return f"`{format_size(field.default)}`"
        case "Seconds":
            return f"`{field.default.text}`"
        case "bool":
            return f"`{str(field.default).lower()}`"
    return f"`{field.default}`"


def notes(struct: type) -> dict[str, str]:
    """Returns the comment above each field of the struct and of its bases."""
    found = notes(struct.__base__) if struct.__base__ not in (None, msgspec.Struct) else {}
    lines = inspect.getsource(struct).splitlines()
    (tree,) = ast.parse("\n".join(lines)).body
    assert isinstance(tree, ast.ClassDef)
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = " ".join(comments_above(lines, node.lineno - 1))
    return found


def comments_above(lines: list[str], index: int) -> list[str]:
    first = index
    while lines[first - 1].strip().startswith("#"):
        first -= 1
    return [line.strip().lstrip("# ") for line in lines[first:index]]


if __name__ == "__main__":
    sys.exit(main())
