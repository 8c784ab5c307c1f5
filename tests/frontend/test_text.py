"""Detokenising and stop strings do not depend on how the output was split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream

from prism.frontend.text import detokenizer
from prism.frontend.text.detokenizer import Detokenizer
from prism.frontend.text.stop_strings import StopMatcher
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


BYTES = [TOKENIZER.get_vocab()[letter] for letter in "ÿâĤð¬A"]


@given(st.lists(st.sampled_from([*BYTES, 0]), max_size=120), st.booleans())
def test_long_runs_of_incomplete_characters_decode_as_a_whole(ids: list[int], skip: bool) -> None:
    shown = Detokenizer(TOKENIZER, [], skip)
    text = "".join(shown.push(i) for i in ids) + shown.flush()
    assert text == TOKENIZER.decode(ids, skip_special_tokens=skip)


class Counting:
    """Tokenizer that counts the ids that it decodes."""

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        self.decoded += len(ids)
        return str(TOKENIZER.decode(ids, skip_special_tokens=skip_special_tokens))


@pytest.mark.parametrize("token_id", [0, *BYTES])
def test_tokens_without_text_are_not_read_again_with_each_one(
    token_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes in linear time: 8,000 such tokens took 1.2 s, 16,000 four times that.

    An output with `ignore_eos` may have no other tokens.
    """
    counting = Counting()

    class Stream:
        """Stream of the library whose work is counted."""

        def __init__(self, ids: list[int], skip_special_tokens: bool) -> None:
            self._real = DecodeStream(ids=ids, skip_special_tokens=skip_special_tokens)
            self._waiting = len(ids)

        def step(self, _: object, token_id: int) -> str | None:
            self._waiting += 1
            counting.decoded += self._waiting
            piece: str | None = self._real.step(TOKENIZER, token_id)
            self._waiting = self._waiting if piece is None else 1
            return piece

    monkeypatch.setattr(detokenizer, "DecodeStream", Stream)
    made = Detokenizer(counting, [5, 6])  # type: ignore[arg-type]
    for _ in range(4000):
        made.push(token_id)
    made.flush()
    assert counting.decoded < 4000 * 24


def test_a_space_behind_many_special_tokens_is_kept() -> None:
    words = {"▁the": 0, "▁end": 1, "<unk>": 2, "<eos>": 3}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.add_special_tokens(["<eos>"])
    made.decoder = decoders.Metaspace()
    shown = Detokenizer(made, [0])
    assert "".join(shown.push(i) for i in [*[3] * 100, 1, *[3] * 33, 0]) == " end the"


def test_incomplete_characters_wait() -> None:
    ids = TOKENIZER.encode("€").ids
    assert len(ids) == 3
    detokenizer = Detokenizer(TOKENIZER, [])
    assert [detokenizer.push(i) for i in ids] == ["", "", "€"]
    assert detokenizer.flush() == ""


def test_a_leading_space_is_kept_behind_a_prompt() -> None:
    """Keeps the space that SentencePiece-like decoders drop at the start of a text."""
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
    """Returns the text before the first stop string that is complete, by the plain rule."""
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


class Letter:
    """Character that counts its comparisons."""

    compared = 0

    def __init__(self, letter: str) -> None:
        self._letter = letter

    def __eq__(self, other: object) -> bool:
        Letter.compared += 1
        return other == self._letter

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    "stops",
    [
        ["x" * 1023 + "y"] * 16,
        ["x" * (1023 - n) + "y" for n in range(16)],
        ["y" * n + "x" * 1000 + "z" for n in range(16)],
        [("x" * (500 + n) + "y") * 2 for n in range(16)],
    ],
)
def test_characters_are_compared_a_few_times_however_long_the_stops_are(stops: list[str]) -> None:
    """Keeps the event loop free: it took 1 ms a token for each of 128 choices."""
    matcher, Letter.compared = StopMatcher(stops), 0
    for number in range(8000):
        matcher._take(Letter("xw"[number % 511 == 510]))  # type: ignore[arg-type]
    assert Letter.compared < 3 * 8000 * len(stops)
