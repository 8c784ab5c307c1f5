"""Images in prompts: answers are those of transformers' whole models."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from kvcached.engines.sglang.hybrid.overrides import WINDOW_POOLS
from prism.engines.sglang.platform.supported_models import IMAGES, refuses
from prism.errors import BadRequestError
from prism.frontend.images.preparation import Preparer
from prism.frontend.requests.prompt_images import with_images
from prism.messages.engine import Deactivate, Deactivated, Submit
from prism.messages.model_spec import ImageSpec, ModelSpec
from prism.messages.requests import Request
from prism.models.files import inspect_model
from tests import vision_models
from tests.engines.harness import DeviceUnderTest, Stream, request
from tests.families import VOCAB_SIZE
from tests.sglang.models import TIE

pytestmark = pytest.mark.sglang

TOKENS = 12
PREPARER = Preparer()


def spec_of(kind: str, folder: Path) -> ModelSpec:
    shape = inspect_model(folder, kind, WINDOW_POOLS, images=True).shape("float32", None)
    images = ImageSpec(VOCAB_SIZE)
    slos = {"slo_ttft_s": 2.0, "slo_tpot_s": 0.2}
    return ModelSpec(name=kind, path=str(folder), images=images, **slos, **shape)


def asked(name: str, spec: ModelSpec, parts: Sequence[list[int] | bytes], **more: Any) -> Request:
    """Returns a request with these texts, as token ids, and image files."""
    ids: list[int] = []
    for part in parts:
        start, end = vision_models.around(spec.name)
        ids += part if isinstance(part, list) else [*start, VOCAB_SIZE, *end]
    files = [part for part in parts if isinstance(part, bytes)]
    made = [PREPARER.prepare(spec.path, "float32", file, 1 << 20) for file in files]
    ids, images = with_images(ids, made, VOCAB_SIZE)
    sent = request(name, spec.name, ids, TOKENS, logprobs=0, **more)
    return structs.replace(sent, images=images)


def logprobs_of(stream: Stream) -> list[float]:
    return [value for c in stream.chunks if c.logprobs for value in c.logprobs.values]


def difference(sent: Request, files: Sequence[bytes], stream: Stream) -> float:
    """Returns the largest difference from transformers' whole model: of a token's log probability,
    or from that of the likeliest token."""
    kind, ids, output = sent.model, sent.prompt_ids, stream.token_ids
    _, chosen, best = vision_models.logprobs(kind, FOLDERS[kind], output, files, ids=ids)
    own = logprobs_of(stream)
    return max(abs(a - b) for one in (own, best) for a, b in zip(chosen, one, strict=True))


FOLDERS: dict[str, Path] = {}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    for kind in vision_models.KINDS:
        FOLDERS[kind] = vision_models.write(kind, tmp_path_factory.mktemp(kind))
    return FOLDERS


BEFORE, AFTER = list(range(20, 60)), list(range(100, 140))
FILES = [vision_models.png(seed, (90, 60 + 20 * seed)) for seed in range(2)]
CASES: dict[str, list[list[int] | bytes]] = {
    "first": [BEFORE, FILES[0], AFTER],
    "second": [BEFORE, FILES[1], AFTER],
    "both": [BEFORE, FILES[0], FILES[1], AFTER],
    "text": [BEFORE, AFTER],
}


def check(device: DeviceUnderTest, requests: dict[str, Request]) -> dict[str, Stream]:
    """Runs requests of CASES together, and compares their answers with transformers'."""
    images = {each.digest: each.tensors for sent in requests.values() for each in sent.images}
    device.send(Submit([sent.without_tensors() for sent in requests.values()], images))
    device.finish(*(each.id for each in requests.values()))
    streams = {case: device.stream(sent.id) for case, sent in requests.items()}
    for case, stream in streams.items():
        assert stream.failure is None, stream.failure
        assert len(stream.token_ids) == TOKENS
        files = [part for part in CASES[case] if isinstance(part, bytes)]
        assert difference(requests[case], files, stream) < TIE, case
    return streams


@pytest.mark.parametrize("kind", sorted(vision_models.KINDS))
def test_answers_are_those_of_the_whole_model(
    device: DeviceUnderTest, folders: dict[str, Path], kind: str
) -> None:
    """Checks the answers together, and again with the prompts in the prefix cache, where the same
    text has another image."""
    folder = folders[kind]
    assert refuses(folder, images=True) == ""
    spec = spec_of(kind, folder)
    done = device.activate(spec)
    assert done.static_bytes < spec.weight_bytes + (2 << 20)
    together = {case: asked(f"{kind}-{case}", spec, parts) for case, parts in CASES.items()}
    streams = check(device, together)
    first, second = (logprobs_of(streams[case]) for case in ("first", "second"))
    assert max(abs(a - b) for a, b in zip(first, second, strict=True)) > 10 * TIE
    for case, parts in CASES.items():
        again = check(device, {case: asked(f"{kind}-{case}-again", spec, parts)})
        assert again[case].chunks[0].cached_tokens > len(BEFORE)
    device.send(Deactivate())
    device.wait_for(Deactivated)


@pytest.mark.usefixtures("preloaded")
def test_a_config_without_an_image_token_is_refused() -> None:
    from prism.engines.sglang.scheduling.image_inputs import _token_id

    with pytest.raises(BadRequestError, match="does not take images"):
        _token_id(SimpleNamespace(image_token_id=None))
    assert _token_id(SimpleNamespace(image_token_id=None, image_token_index=0)) == 0


def test_the_page_of_supported_models_has_the_families() -> None:
    page = (Path(__file__).parents[2] / "docs" / "supported-models.md").read_text()
    rows = re.findall(r"^\| [^`|]*\(`(\w+)`\) \|", page, re.M)
    assert rows == sorted(IMAGES) == sorted({*map(vision_models.family, vision_models.KINDS)})
