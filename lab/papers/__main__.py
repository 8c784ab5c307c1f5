"""`python -m lab.papers`: runs the papers' evaluations and compares with the published figures."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from lab.papers import catalog, study_report
from lab.papers.catalog import Study
from lab.papers.study.lab import Bars, Lab
from lab.papers.study.seeds import spaced
from lab.papers.study.sources import Sources
from prism.cli.exit_codes import new_app, run
from prism.cli.terminal import new_console
from prism.errors import ConfigError
from prism_sim.cli.console import Bar
from prism_sim.cli.options import make_folder

app = new_app()
ALL = "all"
SEEDS = 5
"""Default number of seeds."""
TUNING = 1000
"""Distance of the first seed from that of the traces to tune on."""
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
Seeds = Annotated[
    int | None,
    typer.Option(min=1, max=100, help="Number of seeds; 5, or 1 with --quick.", show_default=False),
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
    seed: Annotated[int, typer.Option(help="First seed of the traces.")] = 0,
    seeds: Seeds = None,
) -> None:
    """Runs an evaluation of the Prism, MuxServe or SeaLLM paper and compares.

    Figures are means over several seeds with their 95 % confidence intervals. Systems are tuned
    once, on other traces.

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
    errors = new_console(stderr=True)
    options = Lab(
        out,
        lambda what: Bar(errors, what),
        quick=quick,
        jobs=jobs or os.cpu_count() or 1,
        tuning_seed=seed + TUNING,
        sources=sources,
    )
    run_all(chosen, options, spaced(seed, seeds or (1 if quick else SEEDS)))


def named(bar: Bars, name: str) -> Bars:
    return lambda what: bar(f"{name}: {what}")


def run_all(studies: list[Study], options: Lab, seeds: list[int]) -> None:
    """Runs each study with each seed. Raises ConfigError.

    Args:
        options: Lab with the folder of all studies.
    """
    console = new_console()
    results = []
    for chosen in studies:
        since_s = time.perf_counter()
        folder, sources = options.folder / chosen.name, Sources(options.sources.folder)
        make_folder(folder)
        ran = {}
        for seed in seeds:
            lab = replace(
                options,
                folder=folder,
                bar=named(options.bar, f"{chosen.name}, seed {seed}"),
                seed=seed,
                sources=sources,
            )
            ran[seed] = chosen.run(lab)
        found = study_report.result(chosen, ran, quick=options.quick, sources=sources)
        study_report.write(folder, found)
        console.print(study_report.table(found))
        console.print(f"results: {folder} ({time.perf_counter() - since_s:.0f} s)")
        results.append(found)
    if len(results) > 1:
        page = study_report.markdown(results)
        (options.folder / "studies.md").write_text(page, encoding="utf-8")


def main() -> None:
    run(lambda: app(prog_name="python -m lab.papers"), "papers")


if __name__ == "__main__":
    main()
