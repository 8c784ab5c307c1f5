"""Options that the commands on traces share, and their parsers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prism.errors import ConfigError, TraceError
from prism_replay.formats.reader import FORMATS, read_format
from prism_replay.lengths import EmpiricalLengths, Lengths, lengths_of
from prism_replay.trace import TOKENS_MAX

if TYPE_CHECKING:
    from prism_replay.live.client import Endpoint

TraceFile = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE", help="JSON lines, or the format of --format; may end in .gz or .xz."
    ),
]
Out = Annotated[Path, typer.Option("--out", "-o", help="File to write.")]
Seed = Annotated[int, typer.Option(help="Same seed, same result.", min=0)]
TimeScale = Annotated[float, typer.Option(help="Multiplies timestamps; 0.5 is twice as fast.")]
RateScale = Annotated[float, typer.Option(help="Multiplies the number of requests.")]
Limit = Annotated[int | None, typer.Option(help="Take only the first N requests.", min=1)]
Format = Annotated[str, typer.Option("--format", help=", ".join(FORMATS))]
SloOption = Annotated[
    list[str] | None,
    typer.Option(
        "--slo",
        help="TTFT/TPOT or TTFT/TPOT/E2E in ms, for all models or as MODEL=...; may be repeated.",
    ),
]
Url = Annotated[str, typer.Option(help="URL of a server with OpenAI's API.")]
ApiKey = Annotated[
    str,
    typer.Option(
        envvar="OPENAI_API_KEY",
        help="API key of the server. Other users of the machine see it on the command line, but not"
        " in the variable.",
    ),
]
StatusUrl = Annotated[
    str,
    typer.Option(
        metavar="URL|unix:PATH",
        help="Server or Unix socket of /status (`frontend.admin`), if it is not that of --url.",
        show_default=False,
    ),
]
CaFile = Annotated[
    Path | None,
    typer.Option("--cacert", help="Certificates to trust (PEM), such as a server's own."),
]
Timeout = Annotated[float, typer.Option(help="Timeout of a request, in seconds.", min=0.001)]
BlockTokens = Annotated[int, typer.Option(help="Tokens per hash id.", min=1)]
TokenIds = Annotated[str, typer.Option(help="Range of synthetic token ids.")]
BaseSlosOption = Annotated[
    Path | None,
    typer.Option(help="SLOs and execution times of `base-slos`, instead of the trace's SLOs."),
]
LengthsOption = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT=FILE", help="Draw lengths from this trace, such as sharegpt=sg.json."
    ),
]


def endpoint(url: str, api_key: str, ca_file: Path | None) -> Endpoint:
    """Returns the server of these options. Raises ConfigError."""
    from prism_replay.live.client import Endpoint, parse_url

    key = api_key.strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("--api-key: has characters that no key can have; copy it again")
    return Endpoint(parse_url(url), key, ca_file)


def status_address(text: str) -> str:
    """Returns the address of /status in this option, or "" for none. Raises ConfigError."""
    from prism_replay.live.client import parse_status_url

    return parse_status_url(text)


def complete_policies(incomplete: str) -> list[str]:
    """Returns the policies that may be the last of a list such as "prism,sta", for a shell."""
    from prism.policies import registry

    before, comma, last = incomplete.rpartition(",")
    given = before.split(",")
    names = [name for name in ("all", *registry.names()) if name not in given]
    return [f"{before}{comma}{name}" for name in names if name.startswith(last)]


def check_writable(path: Path | None) -> None:
    """Raises ConfigError if `path` is not writable. Called before long work, not after it."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path}: cannot be written; name a file in a writable folder")


def parse_models(text: str) -> dict[str, float | None]:
    """Parses "a:0.5,b" to {"a": 0.5, "b": None}. Raises ConfigError."""
    shares: dict[str, float | None] = {}
    for part in text.split(","):
        name, separator, share = part.strip().partition(":")
        if not name or name in shares:
            raise ConfigError(f"--models {text!r}: {name!r} is empty or given twice")
        try:
            shares[name] = float(share) if separator else None
        except ValueError as error:
            raise ConfigError(f"--models {text!r}: {share!r} is not a number") from error
    return shares


def parse_names(option: str, text: str) -> list[str]:
    """Parses "a,b" to its names. Raises ConfigError."""
    names = [part.strip() for part in text.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise ConfigError(f"{option} {text!r}: a name is empty or given twice")
    return names


def parse_scales(text: str, option: str) -> tuple[float, ...]:
    """Parses "0.5,1,2" to numbers. Raises ConfigError that names the option."""
    try:
        scales = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: write numbers such as 0.5,1,2") from error
    if not all(0 < scale < float("inf") for scale in scales):
        raise ConfigError(f"{option} {text!r}: every scale must be > 0 and finite")
    return scales


def parse_token_counts(inputs: str, outputs: str) -> Lengths:
    """Parses token counts such as "40:1024", median and maximum. Raises ConfigError."""
    try:
        (input_median, input_max), (output_median, output_max) = (
            (float(part) for part in text.split(":")) for text in (inputs, outputs)
        )
    except ValueError as error:
        raise ConfigError(f"token counts {inputs!r}, {outputs!r}: write MEDIAN:MAX") from error
    if not all(1 <= n <= TOKENS_MAX for n in (input_median, input_max, output_median, output_max)):
        raise ConfigError(
            f"token counts {inputs!r}, {outputs!r}: must be between 1 and {TOKENS_MAX}"
        )
    return Lengths(
        input_median=input_median,
        input_max=int(input_max),
        output_median=output_median,
        output_max=int(output_max),
    )


def parse_lengths(text: str, option: str = "--lengths", folder: Path = Path()) -> EmpiricalLengths:
    """Returns the lengths of the trace that `text` names, such as "sharegpt=sg.json".

    The file is relative to `folder`. Raises ConfigError or TraceError, which name the option.
    """
    name, separator, path = text.partition("=")
    if not separator or not path:
        raise ConfigError(f"{option} {text!r}: write FORMAT=FILE, such as sharegpt=sg.json")
    try:
        return lengths_of(read_format(folder / path, name))
    except TraceError as error:
        raise TraceError(f"{option} {text!r}: {error}") from error
