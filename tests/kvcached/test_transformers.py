"""transformers' `generate` on kvcached blocks: the tokens of DynamicCache, and memory that grows
and shrinks."""

from __future__ import annotations

import copy
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from kvcached import Client, Device, NoRoomError
from kvcached.errors import InvalidArgumentError
from prism.models import tiny
from prism.models.hugging_face import import_transformers
from tests.sglang.models import GEMMA3, path_of

from .conftest import PAGE

pytestmark = pytest.mark.slow

transformers = import_transformers()

import torch  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from kvcached.engines.transformers import ElasticCache  # noqa: E402

NAMES = [tiny.LLAMA.name, tiny.QWEN3.name, tiny.GPT2.name, GEMMA3.name]
LLAMA = tiny.LLAMA.name
BLOCK = 16
DOCS = Path(__file__).parent.parent.parent / "docs"


@lru_cache
def network(name: str) -> Any:
    torch.set_num_threads(1)
    auto = transformers.AutoModelForCausalLM
    loaded = auto.from_pretrained(path_of(name), dtype=torch.float32).eval()
    loaded.generation_config.eos_token_id = None  # every answer has its full length
    return loaded


@pytest.fixture
def client(device: Device) -> Iterator[Client]:
    with device.client("generate") as opened:
        yield opened


def prompts(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(16, 1000, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def answer(name: str, ids: torch.Tensor, cache: Any, tokens: int = 50, **options: Any) -> Any:
    return network(name).generate(
        ids, past_key_values=cache, max_new_tokens=tokens, do_sample=False, **options
    )


def elastic(client: Client, name: str, tokens: int = 1 << 14, **options: Any) -> ElasticCache:
    return ElasticCache(client, network(name).config, tokens, **options)


def dynamic(name: str) -> DynamicCache:
    return DynamicCache(config=network(name).config)


# --- the same tokens -------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_unequal_prompts_answers_as_with_dynamic_cache(
    client: Client, name: str
) -> None:
    ids = prompts(3, 21)
    mask = torch.ones_like(ids)
    mask[0, :9] = mask[1, :2] = 0
    cache = elastic(client, name)
    told = answer(name, ids, cache, attention_mask=mask)
    assert torch.equal(told, answer(name, ids, dynamic(name), attention_mask=mask))
    cache.kv.check_integrity()


@pytest.mark.parametrize("name", [LLAMA, GEMMA3.name])
def test_beams_answer_as_with_dynamic_cache_and_share_blocks(client: Client, name: str) -> None:
    options: dict[str, Any] = {"num_beams": 4, "num_return_sequences": 3}
    cache = elastic(client, name)
    told = answer(name, prompts(2, 40), cache, **options)
    assert torch.equal(told, answer(name, prompts(2, 40), dynamic(name), **options))
    full = cache.kv.live_blocks()["full"]
    assert full < 8 * -(-cache.get_seq_length() // BLOCK) // 2
    cache.kv.check_integrity()


@pytest.mark.parametrize("name", [LLAMA, GEMMA3.name])
def test_guessed_tokens_are_taken_back(client: Client, name: str) -> None:
    ids = prompts(1, 8).repeat(1, 6)  # repeats: the guesses begin at once
    told = answer(name, ids, elastic(client, name), prompt_lookup_num_tokens=5)
    assert torch.equal(told, answer(name, ids, dynamic(name)))


def test_a_conversation_goes_on_in_its_cache(client: Client) -> None:
    cache = elastic(client, LLAMA)
    told = answer(LLAMA, prompts(1, 30), cache)
    more = torch.cat((told, prompts(1, 11, seed=1)), dim=1)
    assert torch.equal(answer(LLAMA, more, cache), answer(LLAMA, more, dynamic(LLAMA)))


class Walk:
    """Random calls on both caches, which must return the same to the model."""

    def __init__(self, client: Client, seed: int) -> None:
        self.random = random.Random(seed)
        self.elastic = elastic(client, LLAMA)
        self.dynamic = DynamicCache()
        self.rows = 0

    def forward(self) -> None:
        self.rows = self.rows or self.random.randint(1, 4)
        heads, dim = self.elastic.layers[0].view["k"].shape[2:]
        tokens = self.random.choice([1, 1, 1, 2, BLOCK, 37])
        for layer in range(len(self.elastic.layers)):
            new = [torch.randn(self.rows, heads, tokens, dim) for _ in "kv"]
            ours = self.elastic.update(*new, layer)
            assert all(map(torch.equal, ours, self.dynamic.update(*new, layer)))

    def select(self) -> None:
        chosen = torch.tensor(self.random.choices(range(self.rows), k=self.random.randint(1, 5)))
        for cache in (self.elastic, self.dynamic):
            cache.batch_select_indices(chosen)
        self.rows = len(chosen)

    def reorder(self) -> None:
        beams = torch.tensor(self.random.choices(range(self.rows), k=self.rows))
        for cache in (self.elastic, self.dynamic):
            cache.reorder_cache(beams)

    def repeat(self) -> None:
        if self.rows < 4:
            for cache in (self.elastic, self.dynamic):
                cache.batch_repeat_interleave(2)
            self.rows *= 2

    def crop(self) -> None:
        length = self.dynamic.get_seq_length()
        if length > 1:
            fewer = self.random.randint(1, length - 1)
            for cache in (self.elastic, self.dynamic):
                cache.crop(-fewer)

    def reset(self) -> None:
        self.rows = 0
        for cache in (self.elastic, self.dynamic):
            cache.reset()

    def step(self) -> None:
        calls = [self.forward, self.select, self.reorder, self.repeat, self.crop, self.reset]
        call = self.random.choices(calls, [8, 3, 3, 1, 2, 0.5])[0] if self.rows else self.forward
        call()
        assert self.elastic.get_seq_length() == self.dynamic.get_seq_length()
        for ours, theirs in zip(self.elastic.layers, self.dynamic.layers, strict=False):
            if self.rows:
                assert torch.equal(ours.keys, theirs.keys)
                assert torch.equal(ours.values, theirs.values)


@pytest.mark.parametrize("seed", range(8))
def test_any_sequence_of_calls_gives_what_dynamic_cache_gives(client: Client, seed: int) -> None:
    torch.manual_seed(seed)
    walk = Walk(client, seed)
    for _ in range(60):
        walk.step()
        (table,) = walk.elastic._tables.values()
        assert walk.elastic.kv.live_blocks()["full"] == len(set(table.ids.flat))
    walk.elastic.kv.check_integrity()
    walk.reset()
    assert walk.elastic.mapped_bytes() == 0


# --- memory ----------------------------------------------------------------------------------


def test_pages_come_with_tokens_and_go_with_the_cache(device: Device, client: Client) -> None:
    cache = elastic(client, LLAMA, tokens=1 << 20)
    layout = cache.kv.layout
    assert device.usage().committed_bytes == 0
    answer(LLAMA, prompts(2, 40), cache, tokens=1)
    small = cache.mapped_bytes()
    assert 0 < device.resident_bytes() <= small == layout.quantum_bytes(PAGE)
    answer(LLAMA, prompts(2, 400), cache, tokens=1)  # continues from the first 40
    assert cache.mapped_bytes() > 2 * small
    cache.reset()
    assert device.usage().committed_bytes == 0
    answer(LLAMA, prompts(1, 40), cache, tokens=1)
    assert device.usage().committed_bytes == small
    del cache
    assert device.usage().committed_bytes == 0


def test_a_window_keeps_its_own_blocks_alone(client: Client) -> None:
    cache = elastic(client, GEMMA3.name)
    answer(GEMMA3.name, prompts(1, 20), cache, tokens=200)
    live = cache.kv.live_blocks()
    assert live["full"] == -(-219 // BLOCK)
    assert live["window"] <= 32 // BLOCK + 2


def test_a_cache_outlives_its_client_harmlessly(device: Device) -> None:
    with device.client("short") as client:
        cache = elastic(client, LLAMA)
        answer(LLAMA, prompts(1, 40), cache, tokens=2)
    assert device.usage().committed_bytes == 0
    del cache


# --- no room ---------------------------------------------------------------------------------


def hog(device: Device, name: str, leave_bytes: int) -> Client:
    """Returns a client that holds all but `leave_bytes` of the device."""
    client = device.client(name)
    client.reserve_static(device.usage().free_bytes - leave_bytes, "everything")
    return client


def test_without_room_the_step_raises_and_can_be_done_again(device: Device, client: Client) -> None:
    cache = elastic(client, LLAMA)
    quantum = cache.kv.layout.quantum_bytes(PAGE)
    with hog(device, "other", quantum):
        told = answer(LLAMA, prompts(1, 100), cache, tokens=1)
        long = torch.cat((told, prompts(1, 60, seed=1)), dim=1)
        with pytest.raises(NoRoomError, match="generate less at a time") as caught:
            answer(LLAMA, long, cache)
        assert caught.value.need_bytes == quantum
        assert cache.get_seq_length() == 100
    assert torch.equal(answer(LLAMA, long, cache), answer(LLAMA, long, dynamic(LLAMA)))


def test_others_are_asked_while_it_waits(device: Device, client: Client) -> None:
    cache = elastic(client, LLAMA, wait_s=30.0)
    with device.client("idle") as idle:
        lease = idle.reserve_static(device.usage().free_bytes, "what an idle engine can give")
        release = threading.Thread(target=lambda: (idle.fileno(), lease.release()))
        idle.publish_evictable(1)
        release.start()
        assert answer(LLAMA, prompts(1, 40), cache, tokens=2).shape == (1, 42)
        release.join()


def test_too_few_addresses_differ_from_a_full_device(client: Client) -> None:
    cache = elastic(client, LLAMA, tokens=128)
    with pytest.raises(NoRoomError, match="num_tokens"):
        answer(LLAMA, prompts(2, 100), cache)


# --- mistakes --------------------------------------------------------------------------------


def test_a_cache_of_another_type_names_the_right_one(client: Client) -> None:
    cache = elastic(client, LLAMA, dtype="bfloat16")
    with pytest.raises(InvalidArgumentError, match="dtype='float32'"):
        answer(LLAMA, prompts(1, 8), cache)
    assert cache.mapped_bytes() == 0


def test_a_cache_of_another_model_is_refused(client: Client) -> None:
    with pytest.raises(InvalidArgumentError, match="2 of 64; make it from this model's config"):
        answer(LLAMA, prompts(1, 8), elastic(client, tiny.QWEN3.name))


def test_another_batch_needs_a_reset(client: Client) -> None:
    cache = elastic(client, LLAMA)
    answer(LLAMA, prompts(2, 8), cache, tokens=2)
    with pytest.raises(InvalidArgumentError, match="holds 2 sequences, but the model was given 3"):
        answer(LLAMA, prompts(3, 20), cache, tokens=2)


def test_training_is_refused(client: Client) -> None:
    with pytest.raises(InvalidArgumentError, match=r"torch\.no_grad"):
        network(LLAMA)(prompts(1, 8), past_key_values=elastic(client, LLAMA))


def test_it_is_not_copied(client: Client) -> None:
    cache = elastic(client, LLAMA)
    for duplicate in (copy.copy, copy.deepcopy):  # the first goes the way of pickling
        with pytest.raises(InvalidArgumentError, match="cannot be"):
            duplicate(cache)


def test_a_window_cannot_go_back_to_what_it_left(client: Client) -> None:
    cache = elastic(client, GEMMA3.name)
    answer(GEMMA3.name, prompts(1, 20), cache, tokens=100)
    with pytest.raises(InvalidArgumentError, match="sliding window has dropped"):
        cache.crop(-60)


def test_arguments_are_checked(client: Client) -> None:
    config = network(LLAMA).config
    with pytest.raises(InvalidArgumentError, match="config must be a PreTrainedConfig"):
        ElasticCache(client, "llama", 64)
    with pytest.raises(InvalidArgumentError, match="num_tokens is 0"):
        ElasticCache(client, config, 0)
    with pytest.raises(InvalidArgumentError, match="dtype 'int3' is not supported"):
        ElasticCache(client, config, 64, dtype="int3")


def test_models_that_keep_no_heads_are_refused(client: Client) -> None:
    latent = transformers.AutoConfig.for_model("deepseek_v3")
    with pytest.raises(InvalidArgumentError, match="latent attention"):
        ElasticCache(client, latent, 64)
    linear = transformers.AutoConfig.for_model("qwen3_next")
    with pytest.raises(InvalidArgumentError, match="layers without K and V"):
        ElasticCache(client, linear, 64)


# --- the document ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        # 120 tokens of 256 bytes in four buffers: a page of 64 KiB holds 256 tokens.
        ("my-chat-machine", ["0", str(4 * PAGE), "0"]),
        ("my-batch-machine", ["True", "0", "True", "0"]),
    ],
)
def test_the_documents_programs_run(namespace: str, machine: str, said: list[str]) -> None:
    document = (DOCS / "kvcached-transformers.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", document, re.DOTALL)
    (code,) = [program for program in programs if machine in program]
    code = code.replace(f'"{machine}"', repr(namespace))
    # torchvision's compiled half may be missing here: its operators are declared first.
    first = "from prism.models.hugging_face import import_transformers as i; i()\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", first + code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == said


def test_what_the_document_names_exists() -> None:
    document = (DOCS / "kvcached-adapters.md").read_text()
    named = set(re.findall(r"`(_?[A-Za-z]+\.[a-z_]+|_[A-Za-z]+)`", document))
    source = Path(sys.modules[ElasticCache.__module__].__file__ or "").read_text()
    ours = {name for name in named if name.startswith(("_", "ElasticCache."))}
    assert len(ours) >= 4
    for name in ours:
        assert re.search(rf"(class|def) {name.rpartition('.')[2]}\b", source), name
