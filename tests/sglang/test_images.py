"""Images in prompts: answers are those of transformers' whole models."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from kvcached.engines.sglang.hybrid.overrides import WINDOW_POOLS
from prism.config.checks.memory_needs import shard_of
from prism.config.schema.lora import LoraConfig, lora_spec
from prism.engines.sglang.platform.supported_models import (
    IMAGE_ADAPTERS,
    IMAGE_RANKS,
    IMAGES,
    WHOLE_WEIGHTS,
    refuses,
)
from prism.errors import BadRequestError
from prism.frontend.images.preparation import Preparer
from prism.frontend.requests.prompt_images import with_images
from prism.messages.engine import ActivateEngine, Deactivate, Deactivated, Submit
from prism.messages.model_spec import ImageSpec, ModelSpec
from prism.messages.requests import Request
from prism.models.files import inspect_model
from prism.models.hugging_face import import_transformers
from tests import vision_models
from tests.engines.harness import DeviceUnderTest, Stream, request
from tests.families import VOCAB_SIZE
from tests.sglang.adapters import make_adapter, merged
from tests.sglang.conftest import opened_pair, run
from tests.sglang.models import TIE
from tests.sglang.test_families import logs

pytestmark = pytest.mark.sglang

TOKENS = 12
PREPARER = Preparer()


def spec_of(kind: str, folder: Path) -> ModelSpec:
    files = inspect_model(folder, kind, WINDOW_POOLS, None, WHOLE_WEIGHTS, images=True)
    shape = files.shape("float32", None)
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
    ids, images = with_images(ids, made, VOCAB_SIZE, VOCAB_SIZE)
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
        assert not spec.is_plain or again[case].chunks[0].cached_tokens > len(BEFORE)
    device.send(Deactivate())
    device.wait_for(Deactivated)


@pytest.fixture(scope="module")
def pair() -> Iterator[DeviceUnderTest]:
    with opened_pair(64 << 20) as device:
        yield device


@pytest.mark.parametrize("kind", ["glm4v", "llava", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_two_ranks_answer_as_the_whole_model(
    pair: DeviceUnderTest, folders: dict[str, Path], kind: str
) -> None:
    """Checks the answers, and that each rank has the weights that are counted for it."""
    assert kind in IMAGE_RANKS
    spec = spec_of(kind, folders[kind])
    part_bytes = shard_of(spec, 2).weight_bytes
    done = pair.activate(spec)
    assert part_bytes < done.static_bytes < part_bytes + (2 << 20)
    check(pair, {case: asked(f"{kind}-2-{case}", spec, parts) for case, parts in CASES.items()})
    assert f"model {kind}: its weights take" not in logs(pair)
    pair.send(Deactivate())
    pair.wait_for(Deactivated)


@pytest.mark.filterwarnings("ignore:VisionAttention:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("kind", sorted(IMAGE_ADAPTERS))
def test_an_adapter_answers_as_its_merged_model(
    idle: Any, folders: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    """Runs the adapter and the model itself in one batch, with equal prompts."""
    folder, adapter = folders[kind], make_adapter(tmp_path / "adapter", folders[kind])
    whole = merged(adapter, folder, tmp_path / "merged")
    spec, files = spec_of(kind, folder), inspect_model(folder, kind, images=True)
    base = (folder, files, "float32")
    lora = lora_spec([("own", adapter, "")], base, "lora", LoraConfig(slots=2), images=True)
    idle.activate(ActivateEngine(structs.replace(spec, lora=lora)))
    parts = [BEFORE, FILES[0], AFTER]
    both = {
        name: structs.replace(asked(f"x{name}", spec, parts), lora=name) for name in ("", "own")
    }
    chunks, failures = run(idle, list(both.values()))
    assert not failures
    auto = import_transformers().AutoModelForImageTextToText
    judges = {"": None, "own": auto.from_pretrained(whole, dtype="float32").eval()}
    for name, sent in both.items():
        output = [token for chunk in chunks[sent.id] for token in chunk.token_ids]
        _, chosen, best = vision_models.logprobs(
            kind, folder, output, FILES[:1], ids=sent.prompt_ids, model=judges[name]
        )
        assert max(b - c for b, c in zip(best, chosen, strict=True)) < TIE
    said = [[c.token_ids for c in chunks[sent.id]] for sent in both.values()]
    assert said[0] != said[1]


def in_flight() -> list[Any]:
    """Returns the images of requests that SGLang's scheduler holds in this process."""
    from sglang.srt.managers.schedule_batch import MultimodalDataItem

    gc.collect()
    return [each for each in gc.get_objects() if type(each) is MultimodalDataItem]


@pytest.mark.filterwarnings("ignore:VisionAttention:DeprecationWarning")
@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
def test_a_prompt_is_cancelled_and_moved_half_way(
    idle: Any, folders: dict[str, Path], kind: str
) -> None:
    """Cancels a request whose prompt is computed in part, as for a client that disconnects, and
    moves another one that has answered in part."""
    spec = spec_of(kind, folders[kind])
    idle.activate(ActivateEngine(spec))
    run(idle, [asked("before", spec, [AFTER])])  # the pages of one request stay
    before = idle.status().available_tokens
    parts = [BEFORE, FILES[0], AFTER, AFTER[::-1], BEFORE, AFTER]
    gone = asked("gone", spec, parts)
    idle.submit([gone])
    while idle.status().pending_prefill_tokens == len(gone.prompt_ids):
        assert idle.step().chunks == []
    assert idle.status().pending_prefill_tokens > 0
    assert len(in_flight()) == 1
    idle.cancel(["gone"])
    chunks, failures = run(idle, [])
    assert not failures
    assert [chunk.finish_reason for chunk in chunks["gone"]] == ["cancelled"]
    assert idle.status().available_tokens == before
    assert in_flight() == []

    sent = asked("moved", spec, parts)
    idle.submit([sent])
    first: list[int] = []
    while len(first) < 4:
        first += [token for chunk in idle.step().chunks for token in chunk.token_ids]
    [left] = idle.export(None)
    assert not any(image.tensors for image in left.images)
    images = {image.digest: image.tensors for image in sent.images}
    chunks, failures = run(idle, [left.with_tensors(images)])
    assert not failures
    output = first + [token for chunk in chunks["moved"] for token in chunk.token_ids]
    assert len(output) == TOKENS
    _, chosen, best = vision_models.logprobs(
        kind, folders[kind], output, FILES[:1], ids=sent.prompt_ids
    )
    assert max(b - c for b, c in zip(best, chosen, strict=True)) < TIE
    run(idle, [asked("after", spec, [AFTER])])  # the last batch stays until the next one
    assert in_flight() == []


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
