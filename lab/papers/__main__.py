"""`python -m lab.papers`: runs the papers' evaluations and compares with the published figures."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from lab.papers import catalog, study_report
from lab.papers.catalog import Study
from lab.papers.study.lab import Lab
from lab.papers.study.sources import Sources
from prism.cli.exit_codes import new_app, run
from prism.cli.terminal import new_console
from prism.errors import ConfigError
from prism_sim.cli.console import Bar
from prism_sim.cli.options import make_folder

app = new_app()
ALL = "all"
Name = Annotated[str | None, typer.Argument(metavar="[NAME|all]", help="See --list.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Folder for the results; a study's files are in OUT/NAME."),
]
Traces = Annotated[
    Path | None,
    typer.Option(
        envvar="PRISM_TRACES", help="Folder with arena_chat, servegen, maf or sharegpt files."
    ),
]
Jobs = Annotated[int, typer.Option(help="Processes; 0: one per core. Does not change results.")]


@app.command(
    epilog="Example: python -m lab.papers prism-table1 --out results/studies; "
    "python -m lab.papers --list"
)
def study(
    name: Name = None,
    *,
    out: Out = None,
    list_: Annotated[bool, typer.Option("--list", help="List all studies.")] = False,
    quick: Annotated[
        bool, typer.Option(help="Small size for tests; its figures are meaningless.")
    ] = False,
    traces: Traces = None,
    jobs: Jobs = 0,
    seed: Annotated[int, typer.Option(help="Seed of the traces.")] = 0,
) -> None:
    """Runs an evaluation of the Prism, MuxServe or SeaLLM paper and compares.

    It writes report.html, study.json, comparisons.csv, points.csv and the setups (YAML for
    `prism-sim run`) to OUT/NAME. Points in OUT/points are not simulated again. `all` also writes
    OUT/studies.md.
    """
    if list_:
        for known in catalog.STUDIES.values():
            typer.echo(f"{known.name}: {known.title} ({known.source})")
        return
    if name is None:
        raise ConfigError(f"study: NAME is missing; give one of all, {', '.join(catalog.STUDIES)}")
    chosen = list(catalog.STUDIES.values()) if name == ALL else [catalog.get(name)]
    if out is None:
        raise ConfigError("study: --out is missing; give a folder")
    make_folder(out)
    sources = Sources(traces)
    sources.described()
    run_all(chosen, out, sources, quick=quick, jobs=jobs, seed=seed)


def run_all(
    studies: list[Study], out: Path, sources: Sources, *, quick: bool, jobs: int, seed: int
) -> None:
    """Runs each study in a folder of its name. Raises ConfigError."""
    console, errors = new_console(), new_console(stderr=True)
    results = []
    for chosen in studies:
        since_s = time.perf_counter()
        folder = out / chosen.name
        make_folder(folder)
        lab = Lab(
            folder,
            lambda what, name=chosen.name: Bar(errors, f"{name}: {what}"),  # type: ignore[misc]
            quick=quick,
            jobs=jobs or os.cpu_count() or 1,
            seed=seed,
            sources=Sources(sources.folder),
        )
        ran = chosen.run(lab)
        found = study_report.result(
            chosen,
            ran,
            quick=quick,
            seed=seed,
            traces=sources.described(),
            shortened=list(lab.sources.shortened),
        )
        study_report.write(folder, found)
        console.print(study_report.table(found))
        console.print(f"results: {folder} ({time.perf_counter() - since_s:.0f} s)")
        results.append(found)
    if len(results) > 1:
        (out / "studies.md").write_text(study_report.markdown(results), encoding="utf-8")


def main() -> None:
    run(lambda: app(prog_name="python -m lab.papers"), "papers")


if __name__ == "__main__":
    main()
