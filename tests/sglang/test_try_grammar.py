"""Grammars are tried with the tokens of outputs that they allow."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

import pytest

from prism.engines.sglang.grammars.try_grammar import grammar_error
from prism.messages.requests import Grammar
from tests.sglang.models import LLAMA, path_of
from tests.sglang.slow_grammars import SLOW, random_slow

VOCABULARY = 1536
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 2},
        "when": {"type": "string", "format": "date-time"},
        "more": {"$ref": "#"},
    },
    "required": ["name", "tags", "when"],
}
GOOD = {
    "json": Grammar("json", json.dumps(SCHEMA)),
    "regex": Grammar("regex", r"(\+\d{1,3} )?\d{3}-\d{4}(, ext\. \d+)*"),
    "ebnf": Grammar(
        "ebnf", 'root ::= sum\nsum ::= term ("+" term)*\nterm ::= [0-9]+ | "(" sum ")"'
    ),
    "one": Grammar("ebnf", 'root ::= "a"'),
}


def asked(grammar: Grammar) -> dict[str, Any]:
    directory = str(path_of(LLAMA))
    return {
        "directory": directory,
        "vocab_size": VOCABULARY,
        "kind": grammar.kind,
        "text": grammar.text,
    }


@pytest.mark.parametrize("name", GOOD)
def test_good_ones_pass(name: str) -> None:
    assert grammar_error(asked(GOOD[name])) == ""


@pytest.mark.parametrize("name", SLOW)
def test_slow_ones_are_refused(name: str) -> None:
    assert "of CPU time to match one token" in grammar_error(asked(SLOW[name]))


def test_a_trial_that_takes_too_much_cpu_time_ends_its_process() -> None:
    command = [sys.executable, "-m", "prism.engines.sglang.grammars.try_grammar"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for limit_s, grammar in ((10.0, GOOD["one"]), (0.05, SLOW["stars"])):
            print(
                json.dumps(asked(grammar) | {"cpu_s_max": limit_s}), file=process.stdin, flush=True
            )
            line = process.stdout.readline()
            if limit_s > 1:
                assert json.loads(line)["error"] == ""
        assert not line
        assert process.wait() == -signal.SIGPROF


@pytest.mark.long
def test_most_of_200_ambiguous_grammars_are_refused() -> None:
    """Grammars that pass are ended by the engine if a match takes too long."""
    refused = sum(bool(grammar_error(asked(random_slow(seed)))) for seed in range(200))
    assert refused > 180
