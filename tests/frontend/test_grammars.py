"""Trials of grammars in a process that may die, and the grammars that bodies may ask for."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from prism.errors import BadRequestError, RequestError
from prism.frontend.http import calls
from prism.frontend.http.calls import Call
from prism.frontend.http.error_bodies import OverloadedError, UnavailableError
from prism.frontend.http.fair_lock import FairLock
from prism.frontend.protocol.openai_types import CompletionBody
from prism.frontend.requests import grammars
from prism.frontend.requests.grammars import CHARS_MAX, GrammarTrials, grammar_of
from prism.messages.requests import Grammar
from prism.process import PARENT_VARIABLE

MODEL: Any = SimpleNamespace(path="/nowhere")
TOKENIZER: Any = SimpleNamespace(vocab_size=7)


@pytest.fixture
async def trials() -> AsyncIterator[GrammarTrials]:
    made = GrammarTrials("sglang")
    made._module = "tests.frontend.scripted_trial"
    yield made
    await made.close()


async def error_of(trials: GrammarTrials, text: str) -> str:
    try:
        await trials.check(MODEL, TOKENIZER, Grammar("ebnf", text), "ebnf")
    except BadRequestError as error:
        return str(error)
    return ""


def pid_of(trials: GrammarTrials) -> int:
    assert trials._process is not None
    return trials._process.pid


async def test_a_process_that_died_is_replaced(trials: GrammarTrials) -> None:
    assert await error_of(trials, "good") == ""
    first = pid_of(trials)
    os.kill(first, signal.SIGKILL)
    assert await error_of(trials, "another") == ""
    assert await error_of(trials, "wrong") == "ebnf: cannot be compiled: it is wrong"
    second = pid_of(trials)
    assert second != first
    # Memory of earlier ones is not the grammar's fault, and a fresh process shows it.
    assert await error_of(trials, "dies late") == ""
    assert pid_of(trials) != second
    assert await error_of(trials, "orphan") == ""


async def test_failures_are_forgotten_and_verdicts_are_not(
    trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "TRIAL_CPU_S_MAX", 0.2)
    ends = "ebnf: cannot be compiled: it crashes the compiler"
    late = "ebnf: cannot be compiled: it takes longer than 0.2 s"
    for turn in range(2):
        assert await error_of(trials, "dies") == ends
        assert await error_of(trials, "slow") == late
        assert trials._process is None, turn  # the second time from memory
    monkeypatch.setattr(grammars, "_FAILURE_KNOWN_S", 0.0)
    trials._known.clear()
    for _ in range(2):
        assert await error_of(trials, "dies") == ends
    [(error, until_s)] = trials._known.values()
    assert error == "it crashes the compiler"
    assert until_s <= asyncio.get_running_loop().time()
    assert await error_of(trials, "good") == ""
    assert trials._known.popitem()[1] == ("", float("inf"))


async def test_a_slow_one_holds_up_neither_known_ones_nor_too_many(
    trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await error_of(trials, "good") == ""
    monkeypatch.setattr(grammars, "TRIALS_MAX", 2)
    slow = [asyncio.create_task(error_of(trials, "slow")) for _ in range(5)]
    other = asyncio.create_task(error_of(trials, "other"))
    await asyncio.sleep(0.1)
    assert await error_of(trials, "good") == ""
    with pytest.raises(OverloadedError, match="too many grammars are waiting"):
        await trials.check(MODEL, TOKENIZER, Grammar("ebnf", "one more"), "ebnf")
    for task in slow[:3]:
        task.cancel()  # clients that go away take nothing from the others
    os.kill(pid_of(trials), signal.SIGKILL)  # tried once more, in a fresh process
    await asyncio.sleep(0.1)
    assert not slow[4].done()
    await trials.close()
    assert not trials._trials
    done = await asyncio.gather(*slow, other, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in done)


async def test_a_machine_without_time_refuses_no_grammar(
    trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await error_of(trials, "good") == ""
    monkeypatch.setattr(grammars, "TRIAL_S_MAX", 0.2)
    for _ in range(2):
        with pytest.raises(UnavailableError, match="cannot be tried now"):
            await error_of(trials, "slow")
    assert len(trials._known) == 1


async def test_a_client_with_slow_grammars_keeps_the_others_waiting_for_one_of_them(
    trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await error_of(trials, "good") == ""
    monkeypatch.setattr(grammars, "TRIAL_CPU_S_MAX", 0.3)
    monkeypatch.setattr(grammars, "TRIALS_OF_A_CLIENT_MAX", 4)
    order: list[str] = []

    async def ask(client: str, text: str) -> None:
        calls.current.set(Call(client, client=client))
        await error_of(trials, text)
        order.append(text)

    async with asyncio.TaskGroup() as group:
        for n in range(4):
            group.create_task(ask("one", f"slow {n}"))
        await asyncio.sleep(0.05)
        with pytest.raises(OverloadedError):
            await ask("one", "slow 4")
        group.create_task(ask("two", "first"))
        group.create_task(ask("two", "second"))
    assert order == ["slow 0", "first", "second", "slow 1", "slow 2", "slow 3"]
    assert not trials._clients
    assert not trials._lock._used_s


async def test_turns_are_lost_with_who_waits_for_them() -> None:
    lock = FairLock()
    await lock.acquire("a")
    waiting = [asyncio.create_task(lock.acquire(name)) for name in "abc"]
    await asyncio.sleep(0)
    waiting[1].cancel()
    await asyncio.sleep(0)
    lock.release("a", 1.0)
    waiting[2].cancel()  # it has just got the lock
    await asyncio.gather(*waiting[1:], return_exceptions=True)
    await waiting[0]
    lock.release("a", 1.0)
    assert not lock._is_taken


ORPHAN = f"""
import os, subprocess, sys, time
environment = {{**os.environ, {PARENT_VARIABLE!r}: str(os.getpid())}}
program = "prism.engines.sglang.grammars.try_grammar"
subprocess.Popen([sys.executable, "-m", program], env=environment)
time.sleep(600)
"""


def test_the_process_ends_with_its_frontend() -> None:
    """Ends even while it compiles, when it cannot notice that its frontend is gone."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", ORPHAN], stdin=pipe, stdout=pipe) as frontend:
        assert frontend.stdin is not None
        assert frontend.stdout is not None
        asked = {"directory": "/nowhere", "vocab_size": 7, "kind": "ebnf", "text": "x"}
        asked["cpu_s_max"] = 10.0
        frontend.stdin.write(json.dumps(asked).encode() + b"\n")
        frontend.stdin.flush()
        assert b"error" in frontend.stdout.readline()
        frontend.kill()
        assert frontend.stdout.read() == b""  # the last that held it has ended


def asked_for(**fields: Any) -> Grammar:
    found = grammar_of(CompletionBody(model="m", prompt=["x"], **fields))
    assert found is not None
    return found[0]


def test_choices_stay_as_they_are_written() -> None:
    made = asked_for(guided_choice=["smörgås", "😀", 'a"b\\'])
    assert made == Grammar("ebnf", 'root ::= "smörgås" | "😀" | "a\\"b\\\\"')


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": "[" + "[]," * CHARS_MAX + "[]]"},
        {"guided_json": {"enum": ["x" * 100] * CHARS_MAX}},
        {"guided_choice": ["x"] * (CHARS_MAX + 1)},
        {"guided_choice": ["x" * CHARS_MAX, "x"]},
        {"guided_regex": "x" * (CHARS_MAX + 1)},
    ],
)
def test_what_is_too_long_is_not_read(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was read or written whole")

    body = CompletionBody(model="m", prompt=["x"], **fields)
    monkeypatch.setattr(json, "loads", never)
    monkeypatch.setattr(json, "dumps", never)
    with pytest.raises(RequestError, match=f"has more than {CHARS_MAX} characters"):
        grammar_of(body)


def test_a_format_has_nothing_that_is_left_out() -> None:
    for kind in ("json_object", "json_schema"):
        with pytest.raises(RequestError, match=f"'schema' is not a field of {kind}; set a schema"):
            asked_for(response_format={"type": kind, "json_schema": None, "schema": {}})
    asked_for(response_format={"type": "json_object", "json_schema": None})


def test_a_schema_that_is_no_text_is_refused() -> None:
    for text in ("{", "[" * 60000, "[]"):
        with pytest.raises(RequestError, match="guided_json: "):
            asked_for(guided_json=text)
    made = asked_for(guided_json='{"const": "é"}')
    assert made == Grammar("json", '{"const": "é"}')


def test_bounds_beside_a_pattern_are_refused() -> None:
    """Rejects the schema, because the engine's grammar would ignore the bounds."""
    both = {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}
    for schema in (both, {"properties": {"s": {"items": both}}}, {"anyOf": [both]}):
        with pytest.raises(
            RequestError, match="guided_json: maxLength cannot be combined with a pattern"
        ):
            asked_for(guided_json=schema)
        with pytest.raises(
            RequestError, match="response_format: maxLength cannot be combined with a pattern"
        ):
            asked_for(response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    named = {"pattern": {"type": "string", "maxLength": 3}, "maxLength": {"type": "integer"}}
    for schema in ({"properties": named}, {"const": both}, {"type": "string", "pattern": "a"}):
        asked_for(guided_json=schema)
