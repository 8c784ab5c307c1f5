"""Options shared by the commands, and their parsers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import prism_sim
from prism.config.policy_knobs import named_policy
from prism.config.reader import parse
from prism.errors import ConfigError
from prism.policies import registry
from prism_sim.scenario.scenario import read_config

EXAMPLES = Path(prism_sim.__file__).parent / "examples"
EXAMPLE = EXAMPLES / "eight-models.yaml"

Config = Annotated[
    Path, typer.Argument(metavar="[CONFIG]", help="YAML. Default: the bundled example.")
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the results.")]
NAMES = ", ".join(registry.names())
PolicyOption = Annotated[
    str | None, typer.Option(help=f"Policy; replaces the file's. Installed: {NAMES}.")
]
PoliciesOption = Annotated[
    str | None, typer.Option(help="Several policies in turn: prism,static; or all.")
]
GpusOption = Annotated[
    int | None, typer.Option(help="Number of GPUs; replaces the file's gpus.count.")
]
RateScale = Annotated[float | None, typer.Option(help="Factor on the number of requests.")]
SloScale = Annotated[float | None, typer.Option(help="Factor on every SLO.")]
Seed = Annotated[
    int | None, typer.Option(help="Seed of the trace. The same seed gives the same results.")
]
Seeds = Annotated[
    int,
    typer.Option(
        help="Number of seeds per point, starting at the file's seed. Results are means with 95 %"
        " confidence intervals."
    ),
]
Requests = Annotated[
    bool,
    typer.Option(
        "--requests",
        help="Also write the table of requests of each point and seed, as CSV and Parquet, which"
        " seeds.csv names.",
    ),
]
Against = Annotated[
    str | None,
    typer.Option(
        help="Policy to compare the others with, over common seeds (--seeds). Default: the first."
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Sets a key of the YAML: --set engine.mixed_chunk=true. May be repeated."
    ),
]


def named(**options: Any) -> dict[str, Any]:
    """Returns the given options by their keys in the YAML."""
    keys = {"gpus": "gpus.count"}
    return {keys.get(k, k): value for k, value in options.items() if value is not None}


def parse_sets(texts: list[str]) -> dict[str, Any]:
    """Parses texts such as "engine.max_running=8" into {"engine.max_running": 8}. Raises
    ConfigError."""
    found = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise ConfigError(f"--set {text!r}: not KEY=VALUE, such as engine.max_running=64")
        found[key] = parse_value(value, f"--set {text!r}")
    return found


def parse_value(text: str, where: str) -> Any:
    """Parses a YAML value. Raises ConfigError that begins with `where`."""
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def policy_names(text: str) -> list[str]:
    """Parses "prism,static", or "all" for all usable policies. Raises ConfigError for an unknown
    policy."""
    if text == "all":
        return [name for name in registry.names() if problem_of(name) is None]
    for name in text.split(","):
        named_policy(name)
    return text.split(",")


def problem_of(policy: str) -> str | None:
    """Returns why a policy cannot be used, or None."""
    try:
        registry.get(policy)
    except ConfigError as error:
        return str(error)
    return None


def warn_of_policies() -> None:
    """Warns on stderr of packages whose policies are left out because of their names."""
    for line in registry.refused():
        print(f"warning: {line}", file=sys.stderr)


def reference(against: str | None, policies: Sequence[str], seeds: int) -> str:
    """Returns the policy that the others are compared with. Raises ConfigError."""
    if against is None:
        return policies[0] if policies else ""
    if against not in policies or len(policies) < 2:
        raise ConfigError(
            f"--against {against}: is not one of several policies to compare; these are"
            f" {', '.join(policies) or 'not varied'}"
        )
    if seeds < 2:
        raise ConfigError(f"--against {against}: needs at least two seeds; add --seeds 5")
    return against


def seeds_of(config: Path, fixed: dict[str, Any], count: int) -> tuple[int, ...]:
    """Returns `count` seeds from the file's seed on, or none for a count of 1. Raises
    ConfigError."""
    if count < 1:
        raise ConfigError(f"--seeds {count}: must be >= 1")
    if count == 1:
        return ()
    read = read_config(config, fixed)
    if read.trace is not None:
        print(
            "warning: --seeds: the trace is a file, so seeds change only the random choices of"
            " rate_scale and source: intervals do not cover the differences between traces",
            file=sys.stderr,
        )
    return tuple(range(read.seed, read.seed + count))


def make_folder(path: Path | None) -> None:
    """Makes the folder of the results, before a simulation that may take minutes. Raises
    ConfigError."""
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {path}: cannot be written: {error.strerror}") from error
