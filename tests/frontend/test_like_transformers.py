"""Prompts and texts are those of Hugging Face transformers on the same files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from prism.frontend.protocol.chat_types import ChatBody
from prism.frontend.requests.specs import _rendered
from prism.frontend.text.chat_template import ChatTemplate
from prism.frontend.text.detokenizer import Detokenizer
from prism.frontend.text.tokenizers import ModelTokenizer, load_tokenizers
from tests.frontend.conftest import make_spec
from tests.frontend.tiny_model import VOCAB_SIZE, make_model


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelTokenizer, Any]:
    """Returns Prism's tokenizer and that of transformers."""
    from prism.models.hugging_face import import_transformers

    directory: Path = make_model(tmp_path_factory.mktemp("m"))
    ours = load_tokenizers([make_spec("m", directory)])["m"]
    return ours, import_transformers().AutoTokenizer.from_pretrained(directory)


CONVERSATIONS = [
    [{"role": "user", "content": "Hi, größer € 😀"}],
    [
        {"role": "system", "content": " be nice \n"},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y\n"},
        {"role": "user", "content": " z "},
    ],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
async def test_chat_prompts(
    pair: tuple[ModelTokenizer, Any], messages: list[dict[str, str]]
) -> None:
    ours, theirs = pair
    assert ours.chat_template is not None
    text = ours.chat_template.render(messages, {})
    options = {"add_generation_prompt": True}
    assert text == theirs.apply_chat_template(messages, tokenize=False, **options)
    (ids,) = await ours.encode([text], special_tokens=False)
    assert ids == theirs.apply_chat_template(messages, return_dict=True, **options)["input_ids"]


TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "größer", "parameters": {"type": "object"}},
}
PLAIN = "{{ messages[0].content }}"
WITH_TOOLS = "{{ tools | tojson(ensure_ascii=False, sort_keys=True, indent=1) }}" + PLAIN


@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_a_template_for_tools(tmp_path: Path, tools: list[dict[str, Any]] | None) -> None:
    from prism.models.hugging_face import import_transformers

    directory = make_model(tmp_path / "m")
    named = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": WITH_TOOLS}]
    settings = {"eos_token": "<|end|>", "chat_template": named}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = load_tokenizers([make_spec("m", directory)])["m"].chat_template
    theirs = import_transformers().AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "user", "content": "x"}]
    text = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
    assert ours is not None
    assert ours.render(messages, {"tools": tools}) == text
    assert ("größer" in text) is (tools is not None)


@pytest.mark.parametrize("text", ["<", "It will ", "", " \n", "It will<|im_end|>"])
def test_an_answer_goes_on_where_its_text_ends(text: str) -> None:
    source = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": text}]
    body = {"model": "m", "messages": said, "continue_final_message": True}
    prompt = _rendered(ChatBody.model_validate(body), ChatTemplate(source, {}))
    assert prompt == f"<|im_start|>user x<|im_end|><|im_start|>assistant {text}"


async def test_long_texts_are_encoded_alike(pair: tuple[ModelTokenizer, Any]) -> None:
    ours, theirs = pair
    text = "the quick brown fox — jumps\n\n" * 300
    texts = [text, "x", text[1:]]
    wanted = [theirs(t)["input_ids"] for t in texts]
    assert await ours.encode(texts, special_tokens=True) == wanted


@pytest.mark.parametrize("seed", range(20))
def test_outputs(pair: tuple[ModelTokenizer, Any], seed: int) -> None:
    ours, theirs = pair
    rng = random.Random(seed)
    prompt = "the quick größer €"
    ids = [rng.randrange(VOCAB_SIZE) for _ in range(80)]
    detokenizer = Detokenizer(ours.tokenizer, theirs(prompt)["input_ids"])
    text = "".join(detokenizer.push(i) for i in ids) + detokenizer.flush()
    whole = theirs.decode(theirs(prompt)["input_ids"] + ids, skip_special_tokens=True)
    assert prompt + text == whole
