"""Models of benchmarks: their folders and specifications."""

from __future__ import annotations

from pathlib import Path

from prism.errors import ConfigError
from prism.messages.model_spec import ModelSpec
from prism.models.files import inspect_model
from prism.models.store import default_directory

CHECKOUT = Path(__file__).resolve().parent.parent


def model_folder(text: str) -> Path:
    """Returns the folder of a model for a command line's option (argparse also converts a text that
    is the default). Ends the process with an error of one line if it does not exist.

    text: a path with "/", or the name of a model that `prism-models prepare` has made in its
    default folder or in `.cache/models` of the checkout.
    """
    places = (default_directory(), CHECKOUT / ".cache" / "models")
    named = [Path(text)] if "/" in text else [place / text for place in places]
    found = next(filter(Path.is_dir, named), None)
    if found is None:
        others = "".join(f", nor is {path}" for path in named[1:])
        raise SystemExit(
            f"error: --model: {named[0]} is not a directory{others}; run prism-models prepare for"
            " the models of the benchmarks, or give a model's folder"
        )
    return found.absolute()


def spec_of(path: Path, context_length: int, dtype: str = "float32") -> ModelSpec:
    """Returns the specification of the model in a directory. Ends the process with an error of one
    line for bad files.

    dtype: "auto" is the type of the files.
    """
    try:
        files = inspect_model(path, "--model")
        shape = files.shape(files.stored_dtype if dtype == "auto" else dtype, context_length)
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None
    return ModelSpec(name=path.name, path=str(path), **shape, slo_ttft_s=1.0, slo_tpot_s=1.0)
