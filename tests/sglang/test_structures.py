"""Outputs that match a grammar, biased outputs, and log probabilities, against transformers'
figures. The engine survives grammars that do not compile."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from xgrammar import GrammarMatcher

from prism.engines.sglang.grammars import vocabulary
from prism.engines.sglang.grammars.parsers import WHITESPACE_MAX
from prism.messages.engine import Submit
from prism.messages.requests import Grammar, Logprobs
from tests.engines.harness import DeviceUnderTest, Stream, request
from tests.sglang.models import LLAMA, _network, greedy, path_of, prompts, spec_of
from tests.sglang.slow_grammars import SLOW

pytestmark = pytest.mark.sglang

SAMPLED = {"temperature": 1.0, "ignore_eos": False}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "grace"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GRAMMARS = {
    "json": Grammar("json", json.dumps(SCHEMA)),
    "regex": Grammar("regex", "(cat|dog){2,4}!"),
    "ebnf": Grammar("ebnf", 'root ::= "a" ("b" | "c") root | "."'),
}
BROKEN = {
    "regex": Grammar("regex", "(a"),
    "ebnf": Grammar("ebnf", "root ::= nothing"),
    "schema": Grammar("json", '{"type": "object", "uniqueItems": true}'),
    "tag": Grammar("structural_tag", "[]"),
}


@pytest.fixture(scope="module")
def served(device: DeviceUnderTest) -> DeviceUnderTest:
    device.activate(spec_of(LLAMA), max_running=8)
    return device


def text_of(stream: Stream) -> str:
    tokenizer = Tokenizer.from_file(str(path_of(LLAMA) / "tokenizer.json"))
    return str(tokenizer.decode(stream.token_ids))


def logprobs_of(stream: Stream) -> Logprobs:
    joined = Logprobs()
    for chunk in stream.chunks:
        if chunk.logprobs:
            joined.extend(chunk.logprobs)
    return joined


BOUNDED = {
    "type": "object",
    "properties": {"s": {"type": ["string", "null"], "minLength": 2, "maxLength": 64}},
    "required": ["s"],
    "additionalProperties": False,
}
CALL = {"type": "json_schema", "json_schema": BOUNDED}
TAGGED = {"type": "tag", "begin": "<call>", "content": CALL, "end": "</call>"}


@pytest.mark.parametrize("tagged", [False, True])
def test_strings_of_bounded_length_are_json(tagged: bool) -> None:
    """Strings of XGrammar itself allow control characters and no escapes."""
    tokenizer, ends = vocabulary.load(path_of(LLAMA))
    compiler, _ = vocabulary.compiler(tokenizer, len(tokenizer), ends)
    if tagged:
        form = {"type": "structural_tag", "format": TAGGED}
        compiled = compiler.compile_structural_tag(json.dumps(form))
    else:
        compiled = compiler.compile_json_schema(json.dumps(BOUNDED))

    def takes(value: bytes) -> bool:
        matcher = GrammarMatcher(compiled, terminate_without_stop_token=True)
        text = b'{"s": %s}' % value
        whole = b"<call>%s</call>" % text if tagged else text
        return matcher.accept_string(whole) and matcher.is_terminated()

    strings = ["ab", "añ\u65e5\U0001f600", '\n"', "\\\t", "\x7f\x80", "x" * 64]
    assert all(takes(json.dumps(value, ensure_ascii=False).encode()) for value in strings)
    assert takes(b"null")
    wrong = [b"a", b"a\tb", b"a\x01b", b'a"b', b"a\\qb", b"x" * 65]
    no_utf8 = [b"ab\xff", b"ab\x80", b"ab\xc0\x80", b"ab\xed\xa0\x80", b"ab\xf5\x80\x80\x80"]
    assert not any(takes(b'"%s"' % value) for value in [*wrong, *no_utf8])


def test_strings_of_longer_bounds_hold_nothing_that_is_escaped() -> None:
    """Masks of XGrammar itself would take a trial of every token."""
    tokenizer, ends = vocabulary.load(path_of(LLAMA))
    compiler, _ = vocabulary.compiler(tokenizer, len(tokenizer), ends)
    compiled = compiler.compile_json_schema('{"type": "string", "minLength": 2, "maxLength": 1000}')

    def takes(value: str) -> bool:
        matcher = GrammarMatcher(compiled, terminate_without_stop_token=True)
        return matcher.accept_string(json.dumps(value, ensure_ascii=False)) and bool(
            matcher.is_terminated()
        )

    assert all(takes(value) for value in ("ab", "añ\u65e5\U0001f600\ud55c", "x" * 1000))
    assert not any(takes(value) for value in ("a", "x" * 1001, "a\nb", 'a"b', "a\\b"))


def test_outputs_match_their_grammars(served: DeviceUnderTest) -> None:
    """Runs with a request without a grammar, whose tokens stay the same; runs each grammar several
    times, from the cache, too."""
    asked = prompts(LLAMA, 4, (5, 60), seed=9)
    made = [
        request(f"{kind}-{n}", LLAMA, prompt, 200, grammar=grammar, seed=n, **SAMPLED)
        for n, prompt in enumerate(asked)
        for kind, grammar in GRAMMARS.items()
    ]
    served.send(Submit([request("plain", LLAMA, asked[0]), *made]))
    [plain] = served.finish("plain")
    assert plain.token_ids == greedy(LLAMA, asked[0], 16)
    for item, stream in zip(made, served.finish(*(i.id for i in made)), strict=True):
        assert stream.failure is None, item.id
        assert stream.finish_reason in ("stop", "length"), item.id
        if stream.finish_reason == "stop":
            check(item.id.partition("-")[0], text_of(stream))
    ended = [i for i in made if i.id.startswith("json")]
    assert ended


def test_white_space_in_json_ends(served: DeviceUnderTest) -> None:
    """Ends however likely the model makes white space: small models write nothing else."""
    tokenizer = Tokenizer.from_file(str(path_of(LLAMA) / "tokenizer.json"))
    ids = range(tokenizer.get_vocab_size())
    blank = {i: 100.0 for i in ids if tokenizer.decode([i]) and not tokenizer.decode([i]).strip()}
    assert blank
    [prompt] = prompts(LLAMA, 1, (20, 20))
    content = {"type": "json_schema", "json_schema": SCHEMA, "max_whitespace_cnt": WHITESPACE_MAX}
    tag = {"type": "structural_tag", "format": content}
    made = [
        request(f"blank-{g.kind}", LLAMA, prompt, 400, grammar=g, logit_bias=blank, **SAMPLED)
        for g in (GRAMMARS["json"], Grammar("structural_tag", json.dumps(tag)))
    ]
    served.send(Submit(made))
    for stream in served.finish(*(i.id for i in made)):
        text = text_of(stream)
        # Not at once: the model may begin with one token for `{"`, which is not a blank.
        assert re.search(r"\s{2}", text), text
        assert max(map(len, re.findall(r"\s+", text))) <= WHITESPACE_MAX, text


def check(kind: str, text: str) -> None:
    if kind == "json":
        answer = json.loads(text)
        assert answer["name"] in ("ada", "grace")
        assert answer["age"] <= 99
    else:
        pattern = r"(cat|dog){2,4}!" if kind == "regex" else r"(a[bc])*\."
        assert re.fullmatch(pattern, text), text


def test_what_cannot_be_compiled_is_refused_and_ends_nothing(served: DeviceUnderTest) -> None:
    [prompt] = prompts(LLAMA, 1, (20, 20))
    made = [request(f"no-{n}", LLAMA, prompt, grammar=g, **SAMPLED) for n, g in BROKEN.items()]
    again = [request(f"{i.id}-again", LLAMA, prompt, grammar=i.sampling.grammar) for i in made]
    served.send(Submit([*made, request("beside", LLAMA, prompt)]))
    served.send(Submit(again))
    for stream in served.finish(*(i.id for i in (*made, *again))):
        assert stream.failure is not None
        assert stream.failure.code == "invalid_request_error"
        assert not stream.failure.retryable
    assert served.finish("beside")[0].token_ids == greedy(LLAMA, prompt, 16)


def test_biases_and_least_tokens(served: DeviceUnderTest) -> None:
    [prompt] = prompts(LLAMA, 1, (20, 20), seed=4)
    first = greedy(LLAMA, prompt, 16)
    changes: dict[str, dict[str, Any]] = {
        "forced": {"logit_bias": {77: 100.0}},
        "banned": {"logit_bias": {first[0]: -100.0}},
        "stopped": {"stop_token_ids": (first[2],)},
        "later": {"stop_token_ids": tuple(set(first)), "min_tokens": 5},
        "likeliest": {"min_p": 1.0, "temperature": 1.0},
    }
    served.send(Submit([request(n, LLAMA, prompt, 16, **c) for n, c in changes.items()]))
    got = dict(zip(changes, served.finish(*changes), strict=True))
    assert got["forced"].token_ids == [77] * 16
    assert first[0] not in got["banned"].token_ids
    assert got["stopped"].token_ids == first[: first.index(first[2]) + 1]
    assert not set(got["later"].token_ids[:5]) & set(first)
    assert got["likeliest"].token_ids == first


def test_a_seeds_tokens_do_not_depend_on_the_others(served: DeviceUnderTest) -> None:
    """Holds if one of the others has a top_p, top_k or min_p, too."""
    [prompt] = prompts(LLAMA, 1, (20, 20), seed=6)
    sampled: dict[str, Any] = {"temperature": 1.0, "seed": 11}
    alone = request("alone", LLAMA, prompt, 16, **sampled)
    served.send(Submit([alone]))
    [expected] = served.finish("alone")
    for name, change in {"p": {"top_p": 0.5}, "k": {"top_k": 3}, "m": {"min_p": 0.3}}.items():
        beside = request(f"beside-{name}", LLAMA, prompt, 16, **sampled, **change)
        again = request(f"again-{name}", LLAMA, prompt, 16, **sampled)
        served.send(Submit([beside, again]))
        _, got = served.finish(beside.id, again.id)
        assert got.token_ids == expected.token_ids, name


def test_log_probabilities_are_the_models(served: DeviceUnderTest) -> None:
    """Covers output and prompt, whole and in chunks of 64 tokens, batched with requests without
    log-probabilities; computes a cached prompt again."""
    asked = prompts(LLAMA, 3, (30, 200), seed=8)
    wanted = {"logprobs": 3, "prompt_logprobs": True}
    for turn in ("first", "cached"):
        made = [request(f"{turn}-{n}", LLAMA, p, 8, **wanted) for n, p in enumerate(asked)]
        beside = request(f"{turn}-beside", LLAMA, asked[0], 8)
        served.send(Submit([*made, beside]))
        streams = served.finish(*(i.id for i in made))
        for prompt, stream in zip(asked, streams, strict=True):
            check_logprobs(prompt, stream)
        [plain] = served.finish(beside.id)
        assert plain.token_ids == streams[0].token_ids
        assert all(chunk.logprobs is None for chunk in plain.chunks)


def check_logprobs(prompt: list[int], stream: Stream) -> None:
    output = stream.token_ids
    with torch.inference_mode():
        logits = _network(LLAMA)(torch.tensor([prompt + output])).logits[0, :-1]
    expected = torch.log_softmax(logits.float(), dim=-1)
    chosen = expected.gather(1, torch.tensor((prompt + output)[1:])[:, None])[:, 0]
    of_prompt = stream.chunks[0].prompt_logprobs
    assert of_prompt is not None
    joined = Logprobs()
    for part in (of_prompt, logprobs_of(stream)):
        joined.extend(part)
    torch.testing.assert_close(torch.tensor(joined.values), chosen, atol=2e-3, rtol=0)
    top = torch.tensor(joined.top_values)
    torch.testing.assert_close(top, expected.topk(3).values, atol=2e-3, rtol=0)
    assert all(len(ids) == 3 for ids in joined.top_ids)


@pytest.mark.parametrize("name", SLOW)
def test_a_grammar_that_takes_too_long_to_match_ends_its_request_alone(
    served: DeviceUnderTest, name: str
) -> None:
    """Moves another request of the same grammar to another process; others are not affected."""
    [prompt] = prompts(LLAMA, 1, (20, 20), seed=3)
    letter = Tokenizer.from_file(str(path_of(LLAMA) / "tokenizer.json")).token_to_id("a")
    slow: dict[str, Any] = {"grammar": SLOW[name], "logit_bias": {letter: 100.0}}
    pid = served.pids["e0"]
    made = [
        request(f"{name}-slow", LLAMA, prompt, 1000, **slow),
        request(f"{name}-plain", LLAMA, prompt, 16),
        request(f"{name}-word", LLAMA, prompt, 200, grammar=GRAMMARS["regex"], **SAMPLED),
    ]
    served.send(Submit(made))
    ended, plain, word = served.finish(*(item.id for item in made))
    assert ended.failure is not None
    assert ended.failure.code == "invalid_request_error"
    assert "more than 100 ms of CPU time" in ended.failure.message
    assert not ended.failure.retryable
    assert plain.token_ids == greedy(LLAMA, prompt, 16)
    assert word.finish_reason in ("stop", "length")
    assert served.pids["e0"] == pid
    again = request(f"{name}-again", LLAMA, prompt, 3, grammar=SLOW[name])
    served.send(Submit([again]))
    assert served.finish(again.id)[0].finish_reason == "length"
