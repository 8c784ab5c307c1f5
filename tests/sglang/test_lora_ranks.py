"""LoRA adapters of a model that two ranks serve."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from prism.messages.engine import Submit
from prism.models.lora_files import WEIGHTS
from tests.engines.harness import DeviceUnderTest
from tests.sglang.adapters import make_adapter, merged
from tests.sglang.conftest import opened_pair
from tests.sglang.models import LLAMA, TIE, gap_of, network, path_of, prompts
from tests.sglang.test_lora import TOKENS, asked, with_adapters

pytestmark = pytest.mark.sglang


@pytest.fixture
def pair() -> Iterator[DeviceUnderTest]:
    with opened_pair(64 << 20) as device:
        yield device


def test_each_adapter_says_what_its_merged_model_says(
    pair: DeviceUnderTest, tmp_path: Path
) -> None:
    """Serves more adapters than slots. An adapter whose file was removed after the start and one
    that never existed fail only their own requests, on both ranks."""
    adapters = {
        "all": make_adapter(tmp_path / "all", LLAMA),
        "part": make_adapter(tmp_path / "part", LLAMA, rank=2, targets=("v_proj", "o_proj")),
        "down": make_adapter(tmp_path / "down", LLAMA, targets=("down_proj",), seed=2),
    }
    gone = make_adapter(tmp_path / "gone", LLAMA)
    pair.activate(with_adapters(LLAMA, {**adapters, "gone": gone}, slots=2))
    (gone / WEIGHTS).unlink()
    names, [prompt] = ("", *adapters), prompts(LLAMA, 1, (40, 40))
    said = []
    for again in range(2):
        asks = {name: f"{name}-{again}" for name in (*names, "gone", "never")}
        pair.send(Submit([asked(rid, LLAMA, prompt, name) for name, rid in asks.items()]))
        said += [[stream.token_ids for stream in pair.finish(*(asks[name] for name in names))]]
        for name in ("gone", "never"):
            failure = pair.stream(asks[name]).failure
            assert failure is not None
            assert failure.code == "adapter_unavailable"
    assert said[0] == said[1]
    for name, output in zip(names, said[0], strict=True):
        path = merged(adapters[name], LLAMA, tmp_path / f"m-{name}") if name else path_of(LLAMA)
        assert len(output) == TOKENS
        assert gap_of(network(path), prompt, output) < TIE
    assert len({str(output) for output in said[0]}) == len(names)
