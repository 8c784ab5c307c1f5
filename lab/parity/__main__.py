"""`python -m lab.parity`: compares the live system with the simulator on one trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from lab.parity.compare import Inputs, compare
from lab.parity.console import print_parity
from lab.parity.journals import read_journals
from lab.parity.live import LiveConfig, record
from lab.parity.parity_report import write_report
from prism.cli.exit_codes import new_app, run
from prism.cli.terminal import new_console
from prism.config.resolve import load
from prism.errors import ConfigError
from prism_replay.cli.options import parse_scales
from prism_replay.results import read_results, write_json
from prism_replay.trace import read_trace
from prism_sim.cli.options import make_folder

app = new_app()

FILES = ("--results", "--journal", "--costs")

LiveYaml = Annotated[Path, typer.Option("--config", "-c", help="The live cluster's YAML.")]
Folder = Annotated[Path, typer.Option("--out", "-o", help="Folder for the results.")]
TraceOption = Annotated[
    Path | None, typer.Option(help="Trace to calibrate and replay on a separate prism-serve.")
]
ResultsOption = Annotated[Path | None, typer.Option(help="Results file of an earlier replay.")]
JournalOption = Annotated[
    list[Path] | None,
    typer.Option(
        help="Log folder with the journals of the cluster that served it. Further folders: of the"
        " same cluster at other times, for more measurements."
    ),
]
CostsOption = Annotated[
    Path | None, typer.Option(help="Cost tables of `prism-sim calibrate engine` on that cluster.")
]


@app.command(
    epilog="Example: python -m lab.parity --config examples/demo.yaml --trace traces/demo.jsonl "
    "--out results/parity"
)
def parity(
    *,
    config: LiveYaml,
    out: Folder,
    trace: TraceOption = None,
    results: ResultsOption = None,
    journal: JournalOption = None,
    costs: CostsOption = None,
    slo_scale: Annotated[str, typer.Option(help="SLO scales to report.")] = "0.5,1,2",
    cores: Annotated[
        float | None, typer.Option(help="Cores for the engines of host devices.", min=0.1)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    token_ids: Annotated[str, typer.Option(help="Range of synthetic token ids.")] = "100-1000",
    repeats: Annotated[int, typer.Option(help="Times to calibrate each step.", min=1)] = 3,
) -> None:
    """Compares a live cluster with the simulator calibrated on it, decision by decision.

    With --trace, it starts prism-serve, calibrates its models, replays the trace and compares. With
    --results, --journal and --costs, it compares an earlier recording. It writes parity.json and
    parity.html to --out.
    """
    scales = parse_scales(slo_scale, "--slo-scale")
    given_files = [path for path in (results, journal, costs) if path]
    if len(given_files) != (0 if trace else len(FILES)):
        raise ConfigError(f"parity: give either --trace or all of {', '.join(FILES)}")
    make_folder(out)
    console = new_console()
    if trace is not None:
        found = read_trace(trace)
        recording = LiveConfig(config, trace.name, found, out, scales, token_ids, seed, repeats)
        given = record(recording, console)
    else:
        assert results is not None
        assert journal is not None
        assert costs is not None
        given = from_files(config, results, journal, costs)
    outcome = compare(replace(given, scales=scales, cores=cores))
    write_json(out / "parity.json", outcome.results)
    write_report(out / "parity.html", outcome)
    print_parity(console, outcome.results)
    console.print(f"report: {out / 'parity.html'}", soft_wrap=True)


def from_files(config: Path, results: Path, journals: Sequence[Path], costs: Path) -> Inputs:
    """Returns the inputs of a comparison from files. Raises ConfigError.

    Args:
        journals: Log folders: of the replay first, then of the same cluster at other times.
    """
    resolved = load(config)
    journal, *earlier = (read_journals(folder, resolved) for folder in journals)
    return Inputs(resolved, read_results(results), journal, costs, earlier=tuple(earlier))


def main() -> None:
    run(lambda: app(prog_name="python -m lab.parity"), "parity")


if __name__ == "__main__":
    main()
