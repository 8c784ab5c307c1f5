"""Detokenising and stop strings do not depend on how the output was cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from prism.frontend.detokenizer import Detokenizer
from prism.frontend.stop_strings import StopMatcher
from tests.frontend.tiny_model import VOCAB_SIZE, tokenizer

TOKENIZER = tokenizer()


def text_of(ids: list[int], prompt: list[int] | None = None) -> str:
    detokenizer = Detokenizer(TOKENIZER, prompt or [])
    return "".join(detokenizer.push(i) for i in ids) + detokenizer.flush()


@given(st.text(max_size=30))
def test_text_survives(text: str) -> None:
    assert text_of(list(TOKENIZER.encode(text).ids)) == text


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40))
def test_any_ids_decode_as_a_whole(ids: list[int]) -> None:
    assert text_of(ids) == TOKENIZER.decode(ids, skip_special_tokens=True)


@given(st.text(min_size=1, max_size=8), st.data())
def test_a_character_cut_by_the_prompts_end_is_completed(text: str, data: st.DataObject) -> None:
    ids = list(TOKENIZER.encode(text).ids)
    cut = data.draw(st.integers(0, len(ids)))
    whole = TOKENIZER.decode(ids[cut:], skip_special_tokens=True)
    assert text_of(ids[cut:], ids[:cut]) == whole


def test_incomplete_characters_wait() -> None:
    ids = TOKENIZER.encode("€").ids
    assert len(ids) == 3
    detokenizer = Detokenizer(TOKENIZER, [])
    assert [detokenizer.push(i) for i in ids] == ["", "", "€"]
    assert detokenizer.flush() == ""


def test_a_leading_space_is_kept_behind_a_prompt() -> None:
    """SentencePiece-like decoders drop the first space of a text; an output is no first text."""
    words = {"▁the": 0, "▁end": 1, "<unk>": 2}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    detokenizer = Detokenizer(made, [0])
    assert detokenizer.push(1) == " end"


def run(text: str, stops: list[str], cuts: list[int]) -> tuple[str, bool]:
    matcher, out, start = StopMatcher(stops), "", 0
    for end in [*sorted(c for c in cuts if c < len(text)), len(text)]:
        out += matcher.push(text[start:end])
        start = end
        if matcher.stopped:
            return out, True
    return out + matcher.flush(), False


def first_completed(text: str, stops: list[str]) -> tuple[str, bool]:
    """The rule, spelled out: the prefix at which a stop string is first complete."""
    for end in range(1, len(text) + 1):
        lengths = [len(s) for s in stops if text[:end].endswith(s)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


@given(
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 12), max_size=6),
)
def test_stops_do_not_depend_on_the_cuts(text: str, stops: list[str], cuts: list[int]) -> None:
    assert run(text, stops, cuts) == first_completed(text, stops)


@pytest.mark.parametrize(("text", "sent"), [("abc", ""), ("abcx", "abcx"), ("xab", "x")])
def test_a_possible_beginning_of_a_stop_is_held_back(text: str, sent: str) -> None:
    assert StopMatcher(["abcd"]).push(text) == sent
